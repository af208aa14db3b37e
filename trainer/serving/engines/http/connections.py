"""Limits on the number of connections and on the time that one may wait for its client. Needs the
extra ``serve``.
"""

import os
import resource
import socket
import sys
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for the head of a request to arrive
UNREAD_SECONDS = 20.0  # for the client to read anything more of its answer
MOST_CONNECTIONS = 4096  # without a limit of descriptors


class Connection(H11Protocol):
    """A connection that is closed if no complete head arrives within :data:`HEAD_SECONDS` of its
    beginning or its last answer.

    A client that sends a request before the answer to the one before (pipelining) gets that answer
    and no other, so that it cannot queue work for the server and read nothing.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # so that writing pauses as soon as the system takes no more
        transport.set_write_buffer_limits(0)
        if sys.platform == "linux":  # other systems have no such limit
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000)
            )
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if not self.idle and not self.cycle.more_body and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """No request is being answered: its head is incomplete, or the rest of a refused body is
        arriving.
        """
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self.idle:  # otherwise the end of the answer sets the timer again
            self.transport.close()


def most_connections() -> int:
    """Returns the number of connections from which requests get 503: three quarters of the
    descriptors that are free, so that a model can open its files.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, 3 * (limit - len(os.listdir("/dev/fd"))) // 4)


class Few:
    """Returns True for the first ``most`` calls in a minute, for lines of the log of which clients
    can cause any number.
    """

    def __init__(self, most: int) -> None:
        self._most, self._calls, self._end = most, 0, 0.0

    def __call__(self) -> bool:
        if time.monotonic() >= self._end:
            self._calls, self._end = 0, time.monotonic() + 60
        self._calls += 1
        return self._calls <= self._most

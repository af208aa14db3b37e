"""Limits on connections: on their number and on the time that one may wait for its client. Needs the extra ``serve``."""

import logging
import math
import os
import resource
import socket
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("msattn.serve")
HEAD_SECONDS = 10.0  # for the head of a request to arrive
RESERVE = 32  # descriptors that connections leave to the rest of the process
FULL_SECONDS = 0.001  # for a request to end if no connection can be closed; the event loop would try again at once
LOG_SECONDS = 60.0  # between two lines about a lack of descriptors


class Connection(H11Protocol):
    """A connection that is closed if no complete head arrives within :data:`HEAD_SECONDS`.

    ``since`` is the time of its beginning, or of the end of its last answer.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = time.monotonic()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """No request is being answered: its head is incomplete, or the rest of a refused body is arriving."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def receiving(self) -> bool:
        """The client has yet to send the rest of a request, or the next one."""
        return self.idle or self.cycle.more_body

    def _close_if_idle(self) -> None:
        left = self.since + HEAD_SECONDS - time.monotonic()
        if self.idle and left <= 0:
            self.transport.close()  # after sending the rest of an answer
        else:
            self._timer = self.loop.call_later(left if self.idle else HEAD_SECONDS, self._close_if_idle)


class Listener(socket.socket):
    """A listening socket that keeps :data:`RESERVE` descriptors of the process free, or a quarter of a small limit.

    Without descriptors, asyncio's loop neither accepts nor closes connections, and prints a traceback at each try. So if few
    are left, the connection that has waited longest for its client is closed. If all connections await answers, the new client
    waits in the system's queue. This object replaces ``bound``; ``connections`` are the open ones, as uvicorn keeps them.
    """

    def __init__(self, bound: socket.socket, connections: set[Any]) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._connections = connections
        self._logged = -LOG_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns a new connection and the address of its client; BlockingIOError without one, or without a descriptor."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or self._lowest_free() < limit - min(RESERVE, limit // 4):
            return super().accept()
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            LOG.warning("connections leave few of the %d descriptors; those that wait for their client make room", limit)
        receiving = [each for each in self._connections if each.receiving and not each.transport.is_closing()]
        if receiving:
            min(receiving, key=lambda each: each.since).transport.close()
        else:
            time.sleep(FULL_SECONDS)
        raise BlockingIOError

    def _lowest_free(self) -> float:
        """Returns the number that the next descriptor gets."""
        try:
            free = os.dup(self.fileno())
        except OSError:  # there is none
            return math.inf
        os.close(free)
        return free

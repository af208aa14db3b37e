"""Limits on connections: on their number and on the time that one may wait for its client. Needs
the extra ``serve``.
"""

import asyncio
import logging
import os
import resource
import socket
import sys
import time
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("msattn.serve")
HEAD_SECONDS = 10.0  # for the head of a request to arrive
UNREAD_SECONDS = 20.0  # for the client to read anything more of its answer
RESERVE = 32  # descriptors that connections leave to the rest of the process
MOST_CONNECTIONS = 4096  # if there are more descriptors
FULL_SECONDS = 0.01  # between two looks for a connection that can be closed


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
        self.began = time.monotonic()
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

    @property
    def waits(self) -> bool:
        """The client has yet to send the rest of a request or the next one, or to read its
        answer.
        """
        return self.idle or self.cycle.more_body or self.flow.write_paused

    def _close_if_idle(self) -> None:
        if self.idle:  # otherwise the end of the answer sets the timer again
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which leaves :data:`RESERVE` descriptors of the process free, or a quarter
    of a small limit.

    Without descriptors, asyncio neither accepts nor closes connections, and a model could not open
    files. So a connection that is too many replaces the oldest that waits for its client. If there
    is none, further clients wait in the system's queue. Another exception than OSError while it
    accepts one ends the server, and ``run`` raises it.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        (bound,) = sockets or []
        bound.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(bound, _most_connections()))
        self._accepting.add_done_callback(lambda _: setattr(self, "should_exit", True))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().shutdown(sockets)
        if not self._accepting.cancelled():
            self._accepting.result()

    async def _accept(self, bound: socket.socket, most: int) -> None:
        loop, connections = (
            asyncio.get_running_loop(),
            cast("set[Connection]", self.server_state.connections),
        )
        protocol = partial(Connection, self.config, self.server_state, self.lifespan.state)
        may_warn = Few(1)
        while True:
            try:
                client, _ = await loop.sock_accept(bound)
                if sys.platform == "linux":  # other systems have no such limit
                    client.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000)
                    )
                _, new = await loop.connect_accepted_socket(protocol, client)
            except OSError:  # the client has left, or something else has taken the reserve
                await asyncio.sleep(FULL_SECONDS)
                continue
            while len(connections) > most:
                if may_warn():
                    LOG.warning(
                        "%d connections are open; those that wait for their client make room for "
                        "others",
                        most,
                    )
                waiting = [each for each in connections if each.waits and each is not new]
                if waiting:
                    # close would wait until an answer is read
                    min(waiting, key=lambda each: each.began).transport.abort()
                await asyncio.sleep(0 if waiting else FULL_SECONDS)


def _most_connections() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(
        1, min(MOST_CONNECTIONS, limit - len(os.listdir("/dev/fd")) - min(RESERVE, limit // 4))
    )


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

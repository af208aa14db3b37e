"""The life of a server: it listens until a signal or a fault ends it. Needs the extra ``serve``."""

import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from msattn.trainer.config.values import shown
from msattn.trainer.errors import Fault, UserError, first_line, print_once
from msattn.trainer.serving.engines.http.connections import Connection, most_connections
from msattn.trainer.serving.engines.http.engine import Engine
from msattn.trainer.signals import end_at_once, handle, handled

POLL = 0.05  # seconds
CLOSE_SECONDS = 5  # for answers that are being sent when the server stops


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen yet; UserError for an address that cannot
    be used.
    """
    where = f"--host {shown(host)} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(
            f"--host {shown(host)}: {first_line(error)}; expected an address of this machine"
        ) from error
    except OSError as error:
        raise UserError(
            f"{where}: {getattr(error, 'strerror', None) or error}; give another one, e.g. --port 0"
        ) from error
    return bound


def address(bound: socket.socket) -> str:
    """Returns the address of a socket as the beginning of a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Supervisor:
    """Runs the HTTP server in a thread until Ctrl-C or SIGTERM, or until the engine fails; belongs
    to the main thread.

    After a first signal, requests that run have ``drain_s`` seconds to finish, and new ones get
    503. A second one ends the process at once.
    """

    def __init__(self, app: Any, engine: Engine, *, drain_s: float) -> None:
        # Errors and accesses have lines of their own; a client that sends no HTTP needs none.
        config = uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
            loop="asyncio", http=Connection, limit_concurrency=most_connections(),
            server_header=False, timeout_graceful_shutdown=CLOSE_SECONDS,
        )  # fmt: skip
        self._server, self._engine, self._drain_s = uvicorn.Server(config), engine, drain_s
        self._stopped = False
        self._error: BaseException | None = None  # has ended the HTTP server

    def run(self, bound: socket.socket) -> None:
        """Serves at ``bound`` and returns after a signal; Fault if the engine or the HTTP server
        ends by itself.
        """
        thread = threading.Thread(
            target=self._serve, args=(bound,), name="msattn-http", daemon=True
        )
        with handled(self._on_signal):
            thread.start()
            while not self._stopped and self._fault(thread) is None:
                self._engine.tend()
                time.sleep(POLL)
            fault = self._fault(thread)
            self._engine.draining = True
            if fault is None:
                self._drain()
            self._engine.fail_all()
            self._server.should_exit = True
            thread.join(CLOSE_SECONDS + 1)
        if fault is not None:
            raise fault

    def _serve(self, bound: socket.socket) -> None:
        try:
            self._server.run(sockets=[bound])
        except BaseException as error:
            self._error = error

    def stop(self) -> None:
        """Begins to stop, as a first signal does."""
        self._stopped = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handle(end_at_once)
        self.stop()

    def _fault(self, thread: threading.Thread) -> Fault | None:
        if self._engine.fault is not None or thread.is_alive():
            return self._engine.fault
        reason = (
            ""
            if self._error is None
            else f" ({type(self._error).__name__}: {first_line(self._error)})"
        )
        return Fault(f"the HTTP server has ended{reason}")

    def _drain(self) -> None:
        """Waits until the requests that run have finished, at most ``drain_s`` seconds."""
        if open_requests := self._engine.running + self._engine.waiting:
            print_once(
                f"stopping: {open_requests} requests have {self._drain_s:g} s to finish; a second "
                f"signal ends them at once"
            )
        deadline = time.monotonic() + self._drain_s
        while (
            self._engine.running + self._engine.waiting
            and self._engine.fault is None
            and time.monotonic() < deadline
        ):
            self._engine.tend()
            time.sleep(POLL)

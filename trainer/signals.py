"""Ctrl-C and SIGTERM on the command line: exit code 130 or 143 and at most one line, whatever the
process is doing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from msattn.trainer.errors import Terminated
from msattn.trainer.ranks import is_main_rank

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def handle(handler: Handler) -> None:
    """Handles Ctrl-C and SIGTERM by ``handler``, unless they are ignored. Only the main thread can
    change that.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


@contextmanager
def handled(handler: Handler) -> Iterator[Callable[[], None]]:
    """Handles Ctrl-C and SIGTERM by ``handler`` inside the context, or until the function is called
    that it yields.
    """
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            for number, each in previous.items():
                signal.signal(number, each)

    handle(handler)
    try:
        yield restore
    finally:
        restore()


def end_at_once(number: int, frame: FrameType | None = None) -> None:
    """Ends the process without cleaning up. An exception might be lost, or become another, in the
    imports of libraries.
    """
    handle(lambda number, frame: None)  # a further signal must not print a second line
    if is_main_rank():
        with suppress(OSError):  # stderr is closed
            os.write(2, b"msattn: interrupted\n")
    end_silently(number)


def end_silently(number: int, frame: FrameType | None = None) -> None:
    """Ends the process without cleaning up, after it printed its last line."""
    os._exit(128 + number)


@contextmanager
def raised() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside the context and SIGTERM Terminated; a second signal
    ends the process at once.

    Libraries turn the exception into others, such as ImportError, so an error that follows is
    replaced by it.
    """
    stop: KeyboardInterrupt | None = None

    def stop_once(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        handle(end_at_once)
        stop = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        raise stop

    def end_if_lost(lost: Any) -> None:
        """Python drops exceptions that are raised inside a destructor."""
        if stop is not None and lost.exc_value is stop:
            end_at_once(signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        report(lost)

    report = sys.unraisablehook
    sys.unraisablehook = end_if_lost
    with handled(stop_once):
        try:
            yield
        except Exception as error:
            if stop is None:
                raise
            raise stop from error
        finally:
            sys.unraisablehook = report

"""Progress of long work: bars on a terminal; elsewhere a line on stderr after every 10 seconds.

The innermost work that runs describes itself. Only rank 0 prints.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich import progress as rich
from rich.console import Console

INTERVAL = 10.0  # seconds without a line after which one is printed


def is_main_rank() -> bool:
    """Returns True in the one process of a ``torchrun`` that prints."""
    return os.environ.get("RANK", "0") == "0"


def duration(seconds: float) -> str:
    """Returns ``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def report(describe: Callable[[], str | None]) -> Iterator[None]:
    """Prints ``describe()`` on stderr whenever :data:`INTERVAL` seconds passed without a line, while the context runs.

    Parameters
    ----------
    describe : returns a line, "" if nothing must be printed because a bar shows the progress, or None to leave the line to the
        surrounding context.
    """
    _reporter.add(describe)
    try:
        yield
    finally:
        _reporter.remove(describe)


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Reports work whose length is not known, e.g. ``loading the model tiny``, with the time that it took so far."""
    began = time.monotonic()
    with report(lambda: f"{what}, {duration(time.monotonic() - began)} so far"):
        yield


def postpone() -> None:
    """Restarts the interval: the caller printed a line that shows the progress."""
    _reporter.printed = time.monotonic()


class Progress(rich.Progress):
    """Tasks with bars if ``console`` is a terminal; elsewhere the task that runs is reported in lines on stderr.

    Parameters
    ----------
    *columns : columns of the bars.
    console : by default standard output.
    transient : bars disappear at the end.
    enabled : shows anything at all; by default on rank 0.
    """

    def __init__(
        self, *columns: Any, console: Console | None = None, transient: bool = True, enabled: bool | None = None
    ) -> None:
        console = console or Console()
        enabled = is_main_rank() if enabled is None else enabled
        # Lines estimate the remaining time from the whole run: a task may take longer than the bars' 30 seconds.
        period = 30.0 if console.is_terminal else 3600.0
        shown = enabled and console.is_terminal
        super().__init__(
            *columns,
            console=console,
            auto_refresh=shown,  # otherwise track() would count only while a bar is shown
            transient=transient,
            disable=not shown,
            speed_estimate_period=period,
        )
        self._reports = ExitStack()
        self._enabled = enabled

    def start(self) -> None:
        super().start()
        if self._enabled:
            self._reports.enter_context(report(self._describe))

    def stop(self) -> None:
        self._reports.close()
        if not self.disable:  # otherwise rich would print an empty line
            super().stop()

    def _describe(self) -> str | None:
        if not self.disable:
            return ""
        task = next((task for task in reversed(self.tasks) if not task.finished), None)
        if task is None:
            return None
        total = "" if task.total is None else f"/{task.total:,.0f}"
        left, elapsed = task.time_remaining, task.elapsed or 0.0
        when = f"{duration(elapsed)} so far" if left is None else f"{duration(left)} left"
        return f"{task.description}: {task.completed:,.0f}{total}, {when}"


class _Reporter:
    """A thread that prints the innermost description, while there is one."""

    def __init__(self) -> None:
        self.printed = 0.0
        self._descriptions: list[Callable[[], str | None]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, describe: Callable[[], str | None]) -> None:
        self._descriptions.append(describe)
        if self._thread is None and is_main_rank():
            self.printed = time.monotonic()
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="msattn-progress", daemon=True)
            self._thread.start()

    def remove(self, describe: Callable[[], str | None]) -> None:
        self._descriptions.remove(describe)
        if not self._descriptions and self._thread is not None:
            thread, self._thread = self._thread, None  # before join, which Ctrl-C may interrupt
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(0.01, self.printed + INTERVAL - time.monotonic())):
            if time.monotonic() - self.printed < INTERVAL:  # postponed meanwhile
                continue
            found = (describe() for describe in reversed(self._descriptions.copy()))
            if line := next((text for text in found if text is not None), ""):
                sys.stderr.write(f"msattn: {line}\n")  # in one call, so that lines of several processes do not interleave
                sys.stderr.flush()
            self.printed = time.monotonic()


_reporter = _Reporter()

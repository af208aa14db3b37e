"""Progress of long work: bars on a terminal, elsewhere lines on stderr.

The first line comes after 10 seconds, the next ones at growing intervals. The innermost work that
runs describes itself. Only rank 0 prints.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich import progress as rich
from rich.console import Console

from msattn.trainer.ranks import is_main_rank

# seconds until the first line of work that has begun; until each further one it takes twice as long
INTERVAL = 10.0
LONGEST_INTERVAL = 300.0


def duration(seconds: float) -> str:
    """Returns ``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def estimate(command: str, parts: Mapping[str, float], others: Sequence[str] = ()) -> None:
    """Prints how long a command takes in all, from the seconds of its parts, unless that is less
    than :data:`INTERVAL`. With ``others``, parts of unknown length, it is a lower bound.
    """
    total = sum(parts.values())
    if total >= INTERVAL and is_main_rank():
        listed = ", ".join(f"{what} {duration(seconds)}" for what, seconds in parts.items())
        how = f"at least {duration(total)}" if others else f"about {duration(total)} in all"
        unknown = f"; not estimated: {', '.join(others)}" if others else ""
        sys.stderr.write(f"msattn: {command} takes {how}: {listed}{unknown}\n")
        sys.stderr.flush()
        postpone()


@contextmanager
def report(describe: Callable[[], str | None]) -> Iterator[None]:
    """Prints ``describe()`` on stderr after :data:`INTERVAL` seconds without a line, then at twice
    the distance each time.

    ``describe`` returns a line, "" if a bar shows the progress, or None to leave the line to the
    surrounding context.
    """
    _reporter.add(describe)
    try:
        yield
    finally:
        _reporter.remove(describe)


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Reports work whose length is not known, e.g. ``loading the model tiny``, with the time that
    it took so far.
    """
    began = time.monotonic()
    with report(lambda: f"{what}, {duration(time.monotonic() - began)} so far"):
        yield


def postpone() -> None:
    """Restarts the interval: the caller printed a line that shows the progress."""
    _reporter.printed = time.monotonic()


class Progress(rich.Progress):
    """Tasks with bars if ``console`` is a terminal; elsewhere the task that runs is reported in
    lines on stderr.

    The console is by default standard output, or standard error if only that is a terminal. By
    default only rank 0 shows them.
    """

    def __init__(
        self,
        *columns: Any,
        console: Console | None = None,
        transient: bool = True,
        enabled: bool | None = None,
    ) -> None:
        console = console or _terminal()
        enabled = is_main_rank() if enabled is None else enabled
        shown = enabled and console.is_terminal
        super().__init__(
            *columns,
            console=console,
            auto_refresh=shown,  # otherwise track() would count only while a bar is shown
            transient=transient,
            disable=not shown,
            speed_estimate_period=3600.0,  # a part of a task may take minutes
        )
        self._reports = ExitStack()
        self._enabled = enabled
        self._before: dict[rich.TaskID, float] = {}  # what was done when a task began

    def add_task(
        self, description: str, *given: Any, completed: int = 0, **options: Any
    ) -> rich.TaskID:
        task = super().add_task(description, *given, completed=completed, **options)
        self._before[task] = completed
        return task

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
        # Not rich's estimate, which stands still while a part of the task takes longer than others.
        elapsed, done = task.elapsed or 0.0, task.completed - self._before[task.id]
        left = elapsed * task.remaining / done if done and task.remaining is not None else None
        when = f"{duration(elapsed)} so far" if left is None else f"about {duration(left)} left"
        return f"{task.description}: {int(task.completed):,}{total}, {when}"


def _terminal() -> Console:
    """Returns standard output, or standard error if only that is a terminal."""
    out, err = Console(), Console(stderr=True)
    return err if err.is_terminal and not out.is_terminal else out


class _Reporter:
    """A thread that prints the innermost description, while there is one."""

    def __init__(self) -> None:
        self.printed = 0.0
        self._interval = INTERVAL
        self._descriptions: list[Callable[[], str | None]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, describe: Callable[[], str | None]) -> None:
        self._descriptions.append(describe)
        self._interval = INTERVAL
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
        # In short waits, as work with a shorter interval may begin meanwhile.
        while not self._ended.wait(
            min(INTERVAL, max(0.01, self.printed + self._interval - time.monotonic()))
        ):
            if time.monotonic() - self.printed < self._interval:  # postponed meanwhile
                continue
            found = (describe() for describe in reversed(self._descriptions.copy()))
            if line := next((text for text in found if text is not None), ""):
                # in one call, so that lines of several processes do not interleave
                sys.stderr.write(f"msattn: {line}\n")
                sys.stderr.flush()
                self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            self.printed = time.monotonic()


_reporter = _Reporter()

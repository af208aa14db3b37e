"""Tries: hostile inputs and how each ended.

Each try says how it has to end: refused in one sentence (a ``UserError`` in Python, exit code 2 on
the command line), served with the right result, or either. Tracebacks, hangs, other results and
code that ran are bad ends.
"""

import io
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import cycle
from types import FrameType
from typing import Any, TypeVar

from msattn import cli
from msattn.trainer.errors import UserError

REFUSED, SERVED = "refused", "served"
# seconds after which a try counts as hanging; tries take less than a second on an idle machine
TIME_LIMIT = 60.0
Case = TypeVar("Case")
Context = TypeVar("Context")


class Hung(BaseException):
    """A try took longer than :data:`TIME_LIMIT`."""


def spread(cases: Iterable[Case], contexts: Iterable[Context]) -> Iterator[tuple[Case, Context]]:
    """Pairs each case with one of the contexts, in turn: a fault of a case seldom depends on the
    context.
    """
    return zip(cases, cycle(contexts), strict=False)


class Tries:
    """Tries of one test; ``bad`` has a line for each that did not end well."""

    def __init__(self) -> None:
        self.count, self.bad = 0, list[str]()

    def record(self, case: object, fault: str | None) -> None:
        """Counts a try; ``fault`` says how it ended badly, None that it ended well."""
        self.count += 1
        if fault is not None:
            self.bad.append(f"{case}: {fault}")

    def python(
        self,
        case: object,
        call: Callable[[], Any],
        right: Callable[[Any], bool] | None = None,
        *,
        accepted: bool | None = None,
        refusal: type[Exception] = UserError,
    ) -> None:
        """Tries a Python call.

        Parameters
        ----------
        right : whether a result is right; None: the call must be refused.
        accepted : True if the call must return, False if it must be refused, None if either is
            well.
        refusal : the error that refuses, of one line.
        """
        self.record(case, python_fault(call, right, good_ends(right, accepted), refusal))

    def command(
        self,
        case: object,
        *arguments: str,
        right: Callable[[str], bool] | None = None,
        accepted: bool | None = None,
        says: str = "",
    ) -> None:
        """Tries ``msattn *arguments``: exit code 2 and one line on stderr, which holds ``says``, or
        0 and an output that is ``right``.
        """
        self.record(case, command_fault(arguments, right, good_ends(right, accepted), says))

    def check(self) -> None:
        """Fails unless there were tries, and each ended well."""
        shown = "\n".join(line[:600] for line in self.bad[:20])
        assert self.count, "no tries"
        assert not self.bad, f"{len(self.bad)} of {self.count} tries ended badly:\n{shown}"


def good_ends(right: Callable[[Any], bool] | None, accepted: bool | None) -> set[str]:
    if right is None or accepted is False:
        return {REFUSED}
    return {SERVED} if accepted else {REFUSED, SERVED}


def python_fault(
    call: Callable[[], Any],
    right: Callable[[Any], bool] | None,
    ends: set[str],
    refusal: type[Exception],
) -> str | None:
    """Returns how a Python call ended badly, or None."""
    try:
        with limited_time():
            result = call()
    except refusal as error:
        lines = str(error).strip().splitlines()
        if len(lines) != 1:
            return f"refused in {len(lines)} lines: {error}"
        return None if REFUSED in ends else f"refused: {error}"
    except Hung:
        return f"hung for {TIME_LIMIT:.0f} s"
    except BaseException as error:  # any other exception is a bad end
        return f"{type(error).__name__}: {error}"
    return (
        None
        if SERVED in ends and right is not None and right(result)
        else f"served: {result!r:.200}"
    )


def command_fault(
    arguments: Sequence[str], right: Callable[[str], bool] | None, ends: set[str], says: str
) -> str | None:
    """Returns how a command ended badly, or None. It runs in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with limited_time(), redirect_stdout(out), redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    except Hung:
        return f"hung for {TIME_LIMIT:.0f} s"
    except BaseException as error:  # a traceback on a terminal
        return f"{type(error).__name__}: {error}"
    return output_fault(code, out.getvalue(), err.getvalue(), right, ends, says)


def output_fault(
    code: int, out: str, err: str, right: Callable[[str], bool] | None, ends: set[str], says: str
) -> str | None:
    """Returns how a command with these results ended badly, or None."""
    lines = [
        line
        for line in err.splitlines()
        if line.startswith("msattn: ") and not line.startswith("msattn: warning")
    ]
    if "Traceback" in err:
        return f"traceback: {err[-300:]}"
    if code == 2:
        if len(lines) != 1:
            return f"exit code 2 with {len(lines)} lines: {err[-300:]}"
        return None if REFUSED in ends and says in lines[0] else f"refused: {lines[0]}"
    if code == 0:
        return (
            None if SERVED in ends and right is not None and right(out) else f"served: {out[-200:]}"
        )
    return f"exit code {code}: {err[-300:]}"


def last_lines(output: str) -> list[str]:
    """Returns the lines that tell how a command ended, without those about its progress."""
    lines = [line for line in output.splitlines() if line.startswith("msattn: ")]
    return [line for line in lines if "so far" not in line and "earlier evaluation" not in line]


@contextmanager
def limited_time() -> Iterator[None]:
    """Raises :class:`Hung` in the main thread after :data:`TIME_LIMIT`, and every second again."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

"""Forked processes that are stopped at a chosen file operation, or in which the operation fails."""

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from tests.running import wait_until

# audit events; opening a file to write is one, too
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Child:
    """A forked process that runs ``body``; its stdout and stderr go to the file ``output``, by
    default to those of this one.
    """

    def __init__(self, body: Callable[[], None], output: Path | None = None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(body, output)

    def poll(self) -> int | None:
        """Returns None while the process runs, then its exit code, or the number of the signal that
        ended it, negative.
        """
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code

    def wait(self) -> int:
        """Waits for the end of the process and returns :meth:`poll`. A process that hangs is
        killed.
        """
        if not wait_until(lambda: self.poll() is not None):
            self.send(signal.SIGKILL)
            wait_until(lambda: self.poll() is not None)
        assert self._code is not None
        return self._code

    def send(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(body: Callable[[], None], output: Path | None) -> None:
    code = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
        if output is not None:
            redirect(output, 1, 2)
        body()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def redirect(path: Path, *descriptors: int, buffered: bool = True) -> None:
    """Lets the file ``path`` take the place of ``descriptors``, 1 for stdout and 2 for stderr."""
    with path.open("ab") as file:
        for descriptor in descriptors:
            replace_stream(descriptor, file.fileno(), buffered=buffered)


def replace_stream(descriptor: int, by: int, *, buffered: bool = True) -> None:
    """Lets the open file ``by`` take the place of stdout (1) or stderr (2), also of those that
    pytest has put there.

    Streams without a buffer are those of PYTHONUNBUFFERED.
    """
    os.dup2(by, descriptor)
    raw = io.FileIO(descriptor, "w", closefd=False)
    stream = io.TextIOWrapper(
        cast("BinaryIO", io.BufferedWriter(raw) if buffered else raw), write_through=not buffered
    )
    setattr(sys, {1: "stdout", 2: "stderr"}[descriptor], stream)


def on_each_change(action: Callable[[int], None]) -> None:
    """Calls ``action`` with 0, 1, ... before each change of a folder or file by this process, until
    it ends.

    The sync of a file counts as well.
    """
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        action(count - 1)

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            step()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (step(), call(*arguments))[1]

    os.fsync = counted(os.fsync)
    sys.addaudithook(before)


def killed_at(
    step: int, body: Callable[[], None], between: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Returns ``body``, killed by SIGKILL at its file operation ``step``; ``between`` is called
    before the earlier ones.
    """

    def run() -> None:
        on_each_change(
            lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == step else between()
        )
        body()

    return run


def count_changes(body: Callable[[], None], report: Path) -> int:
    """Returns the number of file operations of ``body``, which runs in a forked process; ``report``
    is a scratch file.
    """

    def run() -> None:
        numbers: list[int] = []
        on_each_change(numbers.append)
        body()
        count = len(numbers)
        report.write_text(str(count))

    assert Child(run).wait() == 0
    return int(report.read_text())

"""Stops a process at a chosen file operation, or lets the operation fail."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from msattn.trainer.storage import replace

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")  # audit events; opening a file to write is one, too


def on_each_change(action: Callable[[int], None]) -> None:
    """Calls ``action`` with 0, 1, ... before each change of a folder or file by this process, until it ends.

    The exchange of two folders and the sync of a file count as well.
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

    replace._rename_exchange = counted(replace._rename_exchange)
    os.fsync = counted(os.fsync)
    sys.addaudithook(before)


def in_child(body: Callable[[], None]) -> int:
    """Runs ``body`` in a forked process and returns its process id; see :func:`exit_code`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
        body()
        code = 0
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    """Waits for a process of :func:`in_child`; returns its exit code, or the number of the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ended(pid: int) -> int | None:
    """Returns :func:`exit_code` if the process has ended, else None."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def killed_at(step: int, body: Callable[[], None], between: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Returns ``body``, killed by SIGKILL at its file operation ``step``; ``between`` is called before the earlier ones."""

    def run() -> None:
        on_each_change(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == step else between())
        body()

    return run


def count_changes(body: Callable[[], None], report: Path) -> int:
    """Returns the number of file operations of ``body``, which runs in a forked process; ``report`` is a scratch file."""

    def run() -> None:
        numbers: list[int] = []
        on_each_change(numbers.append)
        body()
        count = len(numbers)
        report.write_text(str(count))

    assert exit_code(in_child(run)) == 0
    return int(report.read_text())

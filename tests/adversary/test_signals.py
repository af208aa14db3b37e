"""Ctrl-C and SIGTERM at random moments, and output that nobody reads: exit codes and one line."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from msattn import cli
from msattn.trainer.signals import end_at_once, handle, raised
from tests.adversary.commands import COMMANDS
from tests.adversary.steps import Child, replace_stream
from tests.adversary.tries import Tries, last_lines, spread
from tests.running import wait_until

HELP = {
    "help": ["help"],
    "page": ["help", "train.steps"],
    "--help": ["eval", "--help"],
    "--version": ["--version"],
}
STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def output_fault(code: int, expected: set[int], output: str) -> str | None:
    """Returns how an interrupted command ended badly, or None."""
    lines = last_lines(output)
    if any(word in output for word in ("Traceback", "Exception ignored", "Error executing job")):
        return f"traceback: {output[-500:]}"
    if code not in expected:
        return f"exit code {code}: {output[-500:]}"
    if len(lines) != (code != 0):
        return f"exit code {code} with {len(lines)} lines: {output[-500:]}"
    return None


def started(
    folder: Path, *arguments: str, change_streams: Callable[[], None] = lambda: None
) -> Child:
    """Starts ``msattn *arguments`` in a forked process that handles signals; its output goes to
    ``folder/output``.
    """

    def command() -> None:
        os.setpgrp()
        change_streams()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["msattn", *arguments])
            handle(end_at_once)  # as when msattn.cli is imported
            (folder / "ready").touch()
            cli.main()

    for name in ("output", "ready"):
        (folder / name).unlink(missing_ok=True)
    child = Child(command, folder / "output")
    assert wait_until((folder / "ready").exists)
    return child


@pytest.mark.slow
def test_signals_to_each_command(tries: Tries, work: Path) -> None:
    draw = random.Random(5)
    for command, (number, times) in spread([*COMMANDS, *HELP], product(STOPS, (1, 2))):
        child = started(work, *(COMMANDS | HELP)[command])
        pauses = [draw.uniform(0, 1.5 if command in COMMANDS else 0.1), draw.uniform(0, 0.2)][
            :times
        ]
        for pause in pauses:
            time.sleep(pause)
            child.send(number)
        case = f"{command}, {number.name} after {', '.join(f'{pause:.2f}' for pause in pauses)} s"
        tries.record(
            case, output_fault(child.wait(), {0, STOPS[number]}, (work / "output").read_text())
        )


def close_reader() -> None:
    """Makes stdout a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    replace_stream(1, writer)


def close() -> None:
    """Closes stdout, as ``>&-`` does before Python starts."""
    os.close(1)
    sys.stdout = None


@pytest.mark.slow
def test_output_that_nobody_reads(tries: Tries, work: Path) -> None:
    """Results are complete and nothing is printed on stderr; the exit code is 0, or 1 where a line
    could not be written.
    """
    for command, change in spread(COMMANDS | HELP, (close_reader, close)):
        shutil.rmtree("outputs/tiny/base/eval", ignore_errors=True)
        code = started(work, *(COMMANDS | HELP)[command], change_streams=change).wait()
        output = (work / "output").read_text()
        lines = [line for line in output.splitlines() if " so far" not in line]
        fault = f"printed: {output[-500:]}" if lines else None
        if code not in ((0, 1) if change is close_reader else (0,)):
            fault = f"exit code {code}: {output[-500:]}"
        if command == "eval" and not Path("outputs/tiny/base/eval/report.html").exists():
            fault = "no results"
        tries.record(f"{command}, {change.__name__}", fault)


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    class Ends:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def run() -> None:
        with raised():
            Ends()

    assert Child(run).wait() == 128 + signal.SIGTERM

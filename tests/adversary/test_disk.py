"""Real commands under a limit of the size of files, and with outputs that are full.

A command that cannot write ends with exit code 2 and one line. With space again, the same command,
with ``resume=true`` if it trains, ends as one that was never interrupted.
"""

import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from msattn import cli
from msattn.trainer.artifacts import read
from msattn.trainer.storage.parts import FinishedParts
from msattn.trainer.training import callbacks
from tests.adversary.commands import COMMANDS
from tests.adversary.steps import Child, redirect
from tests.adversary.tries import Tries, last_lines, spread

pytestmark = pytest.mark.filterwarnings("ignore")
Result = dict[str, torch.Tensor]
TRAINED = {  # with the folders of what they write
    "train-gate": "tiny/base/gate",
    "fit-kmeans": "tiny/base/kmeans",
    "train-qmodel": "tiny/base/qmodel",
    "finetune": "tiny/finetuned/model",
    "train-mta": "mta/base/solver",
}
ARTIFACTS = {**TRAINED, "import-gate": "theirs/base/gate"}
WRITING = [*ARTIFACTS, "eval", "bench"]
REFUSALS = "cannot be written|are free|no permission to write|is not writable"


def limit_files(size: int) -> None:
    """Lets no file of this process grow beyond ``size`` bytes; Python would cache truncated
    bytecode and believe it.
    """
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def end_of(
    folder: Path, output: Path, arguments: list[str], change: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Returns exit code and output of ``msattn *arguments`` in ``folder``, by a forked process that
    first calls ``change``.
    """

    def command() -> None:
        os.chdir(folder)
        change()
        cli.main(arguments)

    output.write_text("")
    code = Child(command, output).wait()
    return code, output.read_text()


def fault_of(code: int, output: str) -> str | None:
    """Returns how a command that may have lacked space ended badly, or None."""
    lines = last_lines(output)
    if "Traceback" in output or code not in (0, 2):
        return f"exit code {code}: {output[-600:]}"
    if code == 2 and not (len(lines) == 1 and re.search(REFUSALS, lines[0])):
        return f"exit code 2 with {len(lines)} lines: {output[-600:]}"
    return None


def result(folder: Path, command: str) -> Result:
    """The tensors that ``command`` writes, of a fine-tuned model also its gates; none of others."""
    if command not in ARTIFACTS:
        return {}
    artifact = folder / "outputs" / ARTIFACTS[command]
    if command in ("finetune", "train-mta"):
        return {
            f"{path.parent.name} {name}": tensor
            for path in sorted(artifact.parent.glob("*/*.safetensors"))
            for name, tensor in load_file(path).items()
        }
    return dict(read(artifact).tensors)


@pytest.mark.slow
def test_files_that_may_not_grow(tries: Tries, work: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    for command in WRITING:
        folder = tmp_path / command
        whole = tmp_path / "whole" / command
        size = int(8192 * 50 ** draw.random())
        shutil.copytree(work, folder)
        shutil.copytree(work, whole)
        fault = fault_of(
            *end_of(folder, tmp_path / "output", COMMANDS[command], partial(limit_files, size))
        )
        resume = ["resume=true"] if command in TRAINED else []
        code, _ = end_of(folder, tmp_path / "output", [*COMMANDS[command], *resume])
        assert end_of(whole, tmp_path / "output", COMMANDS[command])[0] == 0
        found, expected = result(folder, command), result(whole, command)
        fault = fault or resumed_fault(code, found, expected)
        tries.record(f"{command}, files of {size:,} bytes", fault)


def resumed_fault(code: int, found: Result, expected: Result) -> str | None:
    """Returns how a run that continues another one ended badly, or None."""
    same = found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    return None if same and not code else f"the second run ends with {code}, same result: {same}"


def killed_after(owner: Any, name: str) -> None:
    """Lets the first return of a function kill this process."""
    whole = getattr(owner, name)
    setattr(owner, name, lambda *given: (whole(*given), os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.slow
def test_trainings_that_are_killed_after_a_checkpoint(
    tries: Tries, work: Path, tmp_path: Path
) -> None:
    """They continue to the bits of a run that was not killed, and with the same text alone."""
    for command in TRAINED:
        arguments, output = COMMANDS[command], tmp_path / "output"
        folder, whole = (
            shutil.copytree(work, tmp_path / name / command) for name in ("killed", "whole")
        )
        saves = (FinishedParts, "save") if command == "fit-kmeans" else (callbacks, "mark_complete")
        code, text = end_of(folder, output, arguments, partial(killed_after, *saves))
        assert code == -signal.SIGKILL, text
        other = end_of(folder, output, [*arguments, "resume=true", "seed=9"])
        assert other[0] == 2, other[1]
        code, _ = end_of(folder, output, [*arguments, "resume=true"])
        assert end_of(whole, output, arguments)[0] == 0
        expected = result(whole, command)
        assert expected
        tries.record(command, resumed_fault(code, result(folder, command), expected))


@pytest.mark.slow
def test_outputs_that_are_full(tries: Tries, work: Path, tmp_path: Path) -> None:
    """A full stdout is named on stderr, also without a buffer; a full stderr changes nothing."""
    streams = ((1, False), (1, False), (2, False), (1, True), (2, True))
    # shorter and longer than a buffer
    pages = {"help": ["help"], "configuration": ["eval", "--cfg", "job"]}
    of_pages = [(page, (1, buffered)) for page in pages for buffered in (True, False)]
    for command, (descriptor, buffered) in (*spread(COMMANDS, streams), *of_pages):
        full = partial(redirect, Path("/dev/full"), descriptor, buffered=buffered)
        code, output = end_of(work, tmp_path / "output", (COMMANDS | pages)[command], full)
        named = code == 2 and "msattn: standard output cannot be written" in output
        right = named if descriptor == 1 else code == 0
        fault = fault_of(code, output) or (None if right else f"exit code {code}: {output}")
        tries.record(f"{command}, /dev/full as {descriptor}, with a buffer: {buffered}", fault)

"""Real commands under a limit of the size of files, and with outputs that are full.

A command that cannot write ends with exit code 2 and one line. With space again, the same command,
with ``resume=true`` if it trains, ends as one that was never interrupted.
"""

import os
import random
import re
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msattn import cli
from msattn.trainer.artifacts import read
from tests.adversary.commands import COMMANDS
from tests.adversary.steps import Child, redirect
from tests.adversary.tries import Tries, last_lines, spread

pytestmark = pytest.mark.filterwarnings("ignore")
Result = dict[str, torch.Tensor]
TRAINED = {
    "train-gate": "gate",
    "fit-kmeans": "kmeans",
    "train-qmodel": "qmodel",
    "finetune": "model",
    "train-mta": "solver",
}
KINDS = {**TRAINED, "import-gate": "gate"}
MODELS = {"train-mta": "mta", "import-gate": "theirs"}
WRITING = [*KINDS, "eval", "bench"]
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
    """The tensors of the artifact that ``command`` writes; none of other commands."""
    if command not in KINDS:
        return {}
    artifact = folder / "outputs" / MODELS.get(command, "tiny") / "base" / KINDS[command]
    if command in ("finetune", "train-mta"):
        return {
            name: tensor
            for path in sorted(artifact.glob("*.safetensors"))
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
        same = found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )
        fault = fault or (
            None if same and not code else f"the second run ends with {code}, same result: {same}"
        )
        tries.record(f"{command}, files of {size:,} bytes", fault)


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

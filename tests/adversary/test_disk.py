"""Real commands on a disk that fills up or is read-only, under a limit of the size of files, and with outputs that are full.

A command that cannot write ends with exit code 2 and one line. With space again, the same command, with ``resume=true`` if it
trains, ends as one that was never interrupted.
"""

import math
import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msattn import cli
from msattn.trainer.artifacts import read
from tests.adversary.commands import COMMANDS
from tests.adversary.steps import Child, redirect
from tests.adversary.tries import Tries

pytestmark = [pytest.mark.area("disk full"), pytest.mark.filterwarnings("ignore")]
Result = dict[str, torch.Tensor]
TRAINED = {"train-gate": "gate", "fit-kmeans": "kmeans", "train-qmodel": "qmodel", "finetune": "model", "train-mta": "solver"}
KINDS = {**TRAINED, "import-gate": "gate"}
MODELS = {"train-mta": "mta", "import-gate": "theirs"}
WRITING = [*KINDS, "eval", "bench"]
REFUSALS = "cannot be written|are free|no permission to write|is not writable"
LARGEST = 400_000  # bytes: no command writes as much into one file


@contextmanager
def limited_disk(folder: Path, size: int) -> Iterator[None]:
    """Puts ``folder`` on a file system with room for ``size`` more bytes; skips the test if that is not permitted."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    used = sum(4096 * math.ceil(path.stat().st_size / 4096 + 1) for path in folder.rglob("*"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={(used + size) // 1024}k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounts are not permitted")
    try:
        shutil.copytree(copy, folder, dirs_exist_ok=True)
        yield
    finally:
        shutil.rmtree(copy)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def limit_files(size: int) -> None:
    """Lets no file of this process grow beyond ``size`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def end_of(folder: Path, output: Path, arguments: list[str], change: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Returns exit code and output of ``msattn *arguments`` in ``folder``, by a forked process that first calls ``change``."""

    def command() -> None:
        os.chdir(folder)
        change()
        cli.main(arguments)

    output.write_text("")
    code = Child(command, output).wait()
    return code, output.read_text()


def fault_of(code: int, output: str) -> str | None:
    """Returns how a command that may have lacked space ended badly, or None."""
    lines = [line for line in output.splitlines() if line.startswith("msattn: ")]
    lines = [line for line in lines if "so far" not in line and "earlier evaluation" not in line]
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
        return {name: tensor for path in sorted(artifact.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    return dict(read(artifact).tensors)


def again(command: str) -> list[str]:
    return [*COMMANDS[command], *(["resume=true"] if command in TRAINED else [])]


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Returns the result of a command that had enough space."""
    found: dict[str, Result] = {}

    def compute(command: str) -> Result:
        if command not in found:
            folder = tmp_path_factory.mktemp(command) / "work"
            shutil.copytree(prepared, folder)
            assert end_of(folder, folder / "output", COMMANDS[command])[0] == 0
            found[command] = result(folder, command)
        return found[command]

    return compute


def second_fault(folder: Path, output: Path, command: str, expected: Result) -> str | None:
    """Runs ``command`` again with enough space; says whether it fails or has another result."""
    code, text = end_of(folder, output, again(command))
    if code:
        return f"the second run ends with {code}: {text[-600:]}"
    found = result(folder, command)
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return None if same else "the second run has another result"


def sizes(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(8192 * (LARGEST / 8192) ** draw.random()) for _ in range(5)]


@pytest.mark.slow
def test_files_that_may_not_grow(tries: Tries, work: Path, tmp_path: Path, whole: Callable[[str], Result]) -> None:
    for number, (command, size) in enumerate(tries.chosen(product(WRITING, sizes(1)))):
        folder = tmp_path / str(number)
        shutil.copytree(work, folder)
        fault = fault_of(*end_of(folder, tmp_path / "output", COMMANDS[command], partial(limit_files, size)))
        fault = fault or second_fault(folder, tmp_path / "output", command, whole(command))
        tries.record(f"{command}, files of {size:,} bytes", fault)


@pytest.mark.slow
def test_disks_that_fill_up(tries: Tries, work: Path, tmp_path: Path, whole: Callable[[str], Result]) -> None:
    for number, (command, size) in enumerate(tries.chosen(product(WRITING, sizes(2)))):
        folder = tmp_path / str(number)
        shutil.copytree(work, folder)
        with limited_disk(folder, size):
            fault = fault_of(*end_of(folder, tmp_path / "output", COMMANDS[command]))
            subprocess.run(["mount", "-o", "remount,size=100m", str(folder)], check=True)
            fault = fault or second_fault(folder, tmp_path / "output", command, whole(command))
        tries.record(f"{command}, {size:,} bytes free", fault)


@pytest.mark.slow
def test_disks_that_are_read_only(tries: Tries, work: Path, tmp_path: Path, whole: Callable[[str], Result]) -> None:
    for number, command in enumerate(tries.chosen(WRITING)):
        folder = tmp_path / str(number)
        shutil.copytree(work, folder)
        with limited_disk(folder, 100_000_000):
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            code, output = end_of(folder, tmp_path / "output", COMMANDS[command])
            fault = fault_of(code, output) or (None if code == 2 else f"exit code {code}: {output[-600:]}")
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
            fault = fault or second_fault(folder, tmp_path / "output", command, whole(command))
        tries.record(f"{command}, read-only", fault)


@pytest.mark.slow
@pytest.mark.parametrize("descriptor", [1, 2], ids=["stdout", "stderr"])
def test_outputs_that_are_full(tries: Tries, work: Path, tmp_path: Path, descriptor: int) -> None:
    """A full stdout is named on stderr; a full stderr changes nothing."""
    for command in tries.chosen(COMMANDS):
        code, output = end_of(work, tmp_path / "output", COMMANDS[command], partial(redirect, Path("/dev/full"), descriptor))
        fault = fault_of(code, output)
        if descriptor == 2 and code:
            fault = f"exit code {code}: {output[-600:]}"
        tries.record(f"{command}, /dev/full as {descriptor}", fault)

"""Writers whose file operations fail, as on a full disk: the old content stays, and the next write works."""

import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.artifacts import read
from msattn.trainer.errors import UserError
from msattn.trainer.training.checkpoints import (
    TrainingResult,
    handle_write_errors,
    mark_complete,
    newest_checkpoint,
    remove_older,
)
from msattn.trainer.training.parts import FinishedParts
from tests.adversary.steps import Child, on_each_change
from tests.adversary.tries import Tries
from tests.test_artifacts import save

pytestmark = pytest.mark.area("disk full")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def failing(step: int, number: int, below: Path) -> Callable[[], None]:
    """Returns a function after which the file operation ``step`` and all later ones fail with the error ``number``."""

    def fail(current: int) -> None:
        if current >= step:
            raise OSError(number, os.strerror(number), str(below / "a file"))

    return partial(on_each_change, fail)


def test_writers_with_failing_operations(tries: Tries, tmp_path: Path) -> None:
    for number, (writer, step, error) in enumerate(tries.chosen(product(WRITERS, range(14), ERRORS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = f"{writer}, operation {step}: {errno.errorcode[error]}"

        code = Child(partial(_write_twice, writer, folder, failing(step, error, folder))).wait()
        values = {READERS[writer](folder)}
        WRITERS[writer](folder, 4.0)
        fault = None if code in (0, 2) else f"exit code {code}"
        if not values <= ({2.0, 3.0} if code == 2 else {3.0}):
            fault = f"exit code {code}, holds {values}"
        tries.record(case, fault if READERS[writer](folder) == 4.0 else "the next write is lost")


def _write_twice(writer: str, folder: Path, fail: Callable[[], None]) -> None:
    """Writes 1 and 2, and then 3 while operations fail; ends the process with code 2 if that is refused in one line."""
    WRITERS[writer](folder, 1.0)
    WRITERS[writer](folder, 2.0)
    fail()
    try:
        WRITERS[writer](folder, 3.0)
    except UserError as error:
        os._exit(3 if "\n" in str(error) else 2)


def _write_artifact(folder: Path, value: float) -> None:
    save(folder / "gate", value=value, overwrite=True)


def _write_part(folder: Path, value: float) -> None:
    FinishedParts(folder / "parts", {"seed": 0}, resume=False).save("part", {"x": torch.full((2,), value)})


def _write_checkpoint(folder: Path, value: float) -> None:
    checkpoint = folder / "checkpoints" / f"checkpoint-{int(value)}"
    with handle_write_errors(checkpoint):
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_text(str(value))
        mark_complete(checkpoint, {}, TrainingResult(int(value), 0.0, {}, {}))
    remove_older(checkpoint.parent)


def _read_checkpoint(folder: Path) -> float:
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return float((newest / "weights").read_text())


WRITERS: dict[str, Callable[[Path, float], None]] = {
    "artifact": _write_artifact,
    "part": _write_part,
    "checkpoint": _write_checkpoint,
}
READERS: dict[str, Callable[[Path], Any]] = {
    "artifact": lambda folder: float(read(folder / "gate").tensors["a"][0, 0]),
    "part": lambda folder: float(FinishedParts(folder / "parts", {"seed": 0}, resume=False).load("part")[0]["x"][0]),
    "checkpoint": _read_checkpoint,
}

"""Damaged checkpoints and damaged parts of a cache: resumption has the result of undisturbed
runs.
"""

import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from msattn.trainer.errors import Terminated
from msattn.trainer.storage.parts import FinishedParts
from tests.adversary.damage import BYTES, damage_bytes, drawn
from tests.adversary.tries import Tries
from tests.training.line import TRAIN as LONGER
from tests.training.line import Line, run, same_weights

TRAIN = replace(LONGER, steps=9, save_every=3, log_every=9)
DAMAGES = [
    "one bit flipped",
    "truncated",
    "empty",
    "all zeros",
    "bytes appended",
    "missing",
    "other content",
    "a folder",
]
DAMAGED = {
    "the newest": ["checkpoint-7"],
    "the older": ["checkpoint-6"],
    "both": ["checkpoint-6", "checkpoint-7"],
}
FILES = (
    "complete.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
    "trainer_state.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after step 7 of 9, with two checkpoints."""
    folder = tmp_path_factory.mktemp("stopped")
    module = Line(folder / "seen")
    module.stop = (8 * 7, signal.SIGTERM)
    with pytest.raises(Terminated):
        run(module, folder, TRAIN)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(Line(folder / "seen"), folder, TRAIN)
    return folder


def resumed(folder: Path) -> Path:
    run(Line(folder / "seen"), folder, TRAIN, resume=True)
    return folder


@pytest.mark.slow
def test_damaged_checkpoints(
    tries: Tries, stopped: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    same = partial(same_weights, undisturbed, steps=TRAIN.steps)
    for hurt, file, how in drawn(product(DAMAGED, FILES, DAMAGES), 20):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stopped, folder)
        for name in DAMAGED[hurt]:
            _damage(folder / "checkpoints" / name / file, how)
        # no checkpoint at all: the run starts again
        unmarked = file == "complete.json" and how in ("missing", "a folder")
        tries.python(
            f"{hurt}: {file} {how}",
            partial(resumed, folder),
            same,
            accepted=hurt != "both" or unmarked,
        )


def _damage(path: Path, how: str) -> None:
    if how in BYTES:
        damage_bytes(path, how, seed=len(str(path.name)))
        return
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "other content":
        path.write_bytes(b"{}")


PARTS = ("train_0000", "train_0001", "heldout_0000")
SWAPS = {
    "another part": ("train_0001", "train_0000"),
    "held-out as training": ("heldout_0000", "train_0000"),
    "training as held-out": ("train_0000", "heldout_0000"),
}


def test_damaged_parts_count_as_missing(tries: Tries, tmp_path: Path) -> None:
    """The folder alone: a part is either as it was written, or missing."""
    settings = {"seed": 0, "data": ["a", "b"], "model": {"id": "toy", "layers": 2}}
    whole = tmp_path / "whole"
    parts = FinishedParts(whole, settings, replace=False)
    saved = {
        name: {"queries": torch.rand(8, 4), "counts": torch.arange(3) + number}
        for number, name in enumerate(PARTS)
    }
    for name, tensors in saved.items():
        parts.save(name, tensors, {"seconds": 1.5})
    damages = [*zip(cycle(PARTS), BYTES, strict=False), *((name, "swapped") for name in SWAPS)]
    for number, (name, how) in enumerate(damages):
        folder = shutil.copytree(whole, tmp_path / str(number))
        source, target = SWAPS.get(name, ("", name))
        if source:
            shutil.copy(folder / f"{source}.safetensors", folder / f"{target}.safetensors")
        else:
            damage_bytes(folder / f"{name}.safetensors", how, number)

        def intact(opened: FinishedParts, damaged: str) -> bool:
            others = all(
                torch.equal(opened.load(each)[0]["queries"], saved[each]["queries"])
                for each in saved
                if each != damaged
            )
            return damaged not in opened and others

        opened = partial(FinishedParts, folder, settings, replace=False)
        tries.python(f"{name} {how}", opened, partial(intact, damaged=target), accepted=True)

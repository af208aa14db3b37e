"""Damaged checkpoints at resumption: the run ends with the weights of an undisturbed one. It is refused if none is intact."""

import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msattn.trainer.errors import Terminated
from tests.adversary.damage import BYTES, damage_bytes
from tests.adversary.tries import Tries
from tests.training.test_checkpoints_survive import TRAIN as LONGER
from tests.training.test_checkpoints_survive import Line, run

pytestmark = pytest.mark.area("checkpoints at resumption")
TRAIN = replace(LONGER, steps=9, save_every=3, log_every=9)
DAMAGES = ["one bit flipped", "truncated", "empty", "all zeros", "bytes appended", "missing", "other content", "a folder"]
DAMAGED = {"the newest": ["checkpoint-7"], "the older": ["checkpoint-6"], "both": ["checkpoint-6", "checkpoint-7"]}
FILES = (
    "complete.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
)


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(Line(folder / "seen"), folder, TRAIN)
    return folder


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints/checkpoint-9/model.safetensors")


def resumed(folder: Path) -> Path:
    run(Line(folder / "seen"), folder, TRAIN, resume=True)
    return folder


@pytest.mark.slow
def test_damaged_files(tries: Tries, stopped: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = final_weights(whole)

    def same(found: Path) -> bool:
        weights = final_weights(found)
        return all(torch.equal(weights[name], wanted[name]) for name in wanted)

    for hurt, file, how in tries.chosen(product(DAMAGED, FILES, DAMAGES)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stopped, folder)
        for name in DAMAGED[hurt]:
            _damage(folder / "checkpoints" / name / file, how)
        unmarked = file == "complete.json" and how in ("missing", "a folder")  # no checkpoint at all: the run starts again
        tries.python(f"{hurt}: {file} {how}", partial(resumed, folder), same, accepted=hurt != "both" or unmarked)


def _damage(path: Path, how: str) -> None:
    if how in BYTES:
        damage_bytes(path, how, seed=len(str(path.name)))
        return
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "other content":
        path.write_bytes(b"{}")


@pytest.mark.slow
def test_hostile_names(tries: Tries, stopped: Path, whole: Path, tmp_path: Path) -> None:
    """Folders that are no checkpoints, beside checkpoints, do not disturb a run."""
    wanted = final_weights(whole)

    def same(found: Path) -> bool:
        return torch.equal(final_weights(found)["line.weight"], wanted["line.weight"])

    names = [
        "checkpoint-",
        "checkpoint-x",
        "checkpoint--1",
        "checkpoint-9e9",
        "checkpoint-" + "9" * 40,
        "checkpoint-٣",
        "checkpoint-8 ",
    ]
    for name, content in tries.chosen(product(names, ["", "{}", "[]", "complete"])):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stopped, folder)
        odd = folder / "checkpoints" / name
        odd.mkdir()
        (odd / "complete.json").write_text(content)
        tries.python(f"{name} {content}", partial(resumed, folder), same, accepted=True)

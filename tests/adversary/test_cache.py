"""Damaged caches of the query classifiers' training: damaged parts are made again, with the same result."""

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from msattn.trainer import artifacts
from msattn.trainer.methods.classifier.fit_kmeans import fit_kmeans
from msattn.trainer.methods.classifier.train import train_qmodel
from msattn.trainer.training.parts import SETTINGS, FinishedParts
from tests.adversary.damage import BYTES, VALUES, damage_bytes, places, with_value, without
from tests.adversary.tries import Tries
from tests.methods.classifier.test_train import configs, text

pytestmark = pytest.mark.area("classifier's cache")
__all__ = ["text"]  # a fixture
PARTS = ("train_0000", "train_0001", "heldout_0000")
SWAPS = {
    "another part": ("train_0001", "train_0000"),
    "held-out as training": ("heldout_0000", "train_0000"),
    "training as held-out": ("train_0000", "heldout_0000"),
}


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of a short training, with its cache."""
    outputs = tmp_path_factory.mktemp("cached")
    for_kmeans, _ = configs(text, outputs)
    fit_kmeans(for_kmeans)
    train(text, outputs, resume=False)
    return outputs


def train(text: Path, outputs: Path, *, resume: bool) -> dict[str, Tensor]:
    _, cfg = configs(text, outputs)
    short = replace(cfg.train, steps=3, log_every=3, save_every=3)
    folder = train_qmodel(replace(cfg, train=short, resume=resume, overwrite=True))
    return artifacts.read(folder).tensors


@pytest.fixture
def outputs(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "outputs")


def same(found: dict[str, Tensor], trained: Path) -> bool:
    wanted = artifacts.read(trained / "toy/base/qmodel").tensors
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_training_over_damaged_parts(tries: Tries, trained: Path, text: Path, tmp_path: Path) -> None:
    damages = [*product(PARTS[1:], ["one bit flipped", "truncated", "all zeros", "empty"]), *product(SWAPS, ["swapped"])]
    damages += [("settings", "one bit flipped"), ("settings", "empty"), ("settings", "all zeros")]
    for number, (name, how) in enumerate(tries.chosen(damages)):
        outputs = tmp_path / str(number)
        shutil.copytree(trained, outputs)
        cache = outputs / "toy/base/runs/qmodel/cache"
        if how == "swapped":
            source, target = SWAPS[name]
            shutil.copy(cache / f"{source}.safetensors", cache / f"{target}.safetensors")
        else:
            damage_bytes(cache / (SETTINGS if name == "settings" else f"{name}.safetensors"), how, number)
        resume = number % 2 == 1
        right = partial(same, trained=trained)
        accepted = name != "settings" or not resume
        tries.python(f"{name} {how}", partial(train, text, outputs, resume=resume), right, accepted=accepted)


def test_damaged_parts_count_as_missing(tries: Tries, tmp_path: Path) -> None:
    """The folder alone: a part is either as it was written, or missing."""
    settings = {"seed": 0, "data": ["a", "b"], "model": {"id": "toy", "layers": 2}}
    whole = tmp_path / "whole"
    parts = FinishedParts(whole, settings, resume=False)
    saved = {name: {"queries": torch.rand(8, 4), "counts": torch.arange(3) + number} for number, name in enumerate(PARTS)}
    for name, tensors in saved.items():
        parts.save(name, tensors, {"seconds": 1.5})
    damages = [*product(PARTS, BYTES, range(4)), *product(SWAPS, ["swapped"], range(1))]
    for number, (name, how, seed) in enumerate(tries.chosen(damages)):
        folder = shutil.copytree(whole, tmp_path / str(number))
        source, target = SWAPS.get(name, ("", name))
        if source:
            shutil.copy(folder / f"{source}.safetensors", folder / f"{target}.safetensors")
        else:
            damage_bytes(folder / f"{name}.safetensors", how, seed)

        def intact(opened: FinishedParts, damaged: str) -> bool:
            others = all(
                torch.equal(opened.load(each)[0]["queries"], saved[each]["queries"]) for each in saved if each != damaged
            )
            return damaged not in opened and others

        opened = partial(FinishedParts, folder, settings, resume=True)
        tries.python(f"{name} {how}", opened, partial(intact, damaged=target), accepted=True)


def test_damaged_settings(tries: Tries, tmp_path: Path) -> None:
    """Other settings are refused by ``resume``, and otherwise remove the parts."""
    settings = {"seed": 0, "data": ["a", "b"], "model": {"id": "toy", "layers": 2}}
    changes = [with_value(settings, place, value) for place, value in product(places(settings), VALUES)]
    changes += [without(settings, place) for place in places(settings)]
    texts = [json.dumps(changed) for changed in changes if changed != settings]
    texts += ["", "{", "[]", "null", "NaN", "\0", "[" * 100_000, '{"a":' * 50_000, '{"seed": ' + "9" * 9999 + "}"]
    for number, (content, resume) in enumerate(tries.chosen(product(texts, [False, True]))):
        folder = tmp_path / str(number)
        FinishedParts(folder, settings, resume=False).save("part", {"x": torch.zeros(2)})
        (folder / SETTINGS).write_text(content)
        opened = partial(FinishedParts, folder, settings, resume=resume)
        tries.python(f"{content:.60} resume={resume}", opened, without_parts, accepted=not resume)


def without_parts(opened: FinishedParts) -> bool:
    return "part" not in opened

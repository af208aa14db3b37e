"""Hostile artifacts: tensors that do not fit, wrong manifests, damaged documents, links."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from msattn.trainer import models
from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.artifacts.manifest import checksum, describe_tensor
from msattn.trainer.config import ModelConfig
from msattn.trainer.serving.attach import attach, load
from msattn.trainer.storage.hashes import content_hash
from tests.adversary.damage import REMOVED, VALUES, drawn, places, with_value
from tests.adversary.tries import Tries, spread

KINDS = ("gate", "kmeans", "qmodel")
FILES = ("model.safetensors", "manifest.json", "config.yaml")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(
        ModelConfig(name="tiny", path="embedded"), device="cpu", dtype="float32"
    ).model


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that makes a fresh copy of a shipped artifact."""

    def copy(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(SHIPPED / kind, folder)

    return copy


@cache
def same_as_shipped(kind: str) -> Callable[[Any], bool]:
    """Returns a function that compares what was loaded with the shipped artifact."""
    wanted = load(SHIPPED / kind)

    def same(found: Any) -> bool:
        pairs = zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
        equal = type(found) is type(wanted) and all(torch.equal(a, b) for a, b in pairs)
        settings = ("thresholds", "cfg") if kind == "gate" else ("layers", "rope", "num_buckets")
        return equal and all(getattr(found, name) == getattr(wanted, name) for name in settings)

    return same


def sign(folder: Path, manifest: dict[str, Any], tensors: Tensors | None = None) -> None:
    """Writes a manifest, and tensors if given, with the hashes that an attacker would compute."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
        manifest = manifest | {
            "content_hash": content_hash(tensors),
            "tensors": {k: describe_tensor(t) for k, t in tensors.items()},
        }
    signed = manifest | {
        "checksum": checksum(manifest, (folder / "config.yaml").read_text("utf-8", "replace"))
    }
    (folder / "manifest.json").write_text(json.dumps(signed))


TENSORS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "missing": lambda tensors, name: {
        key: tensor for key, tensor in tensors.items() if key != name
    },
    "another name": lambda tensors, name: {
        f"{key}x" if key == name else key: tensor for key, tensor in tensors.items()
    },
    "extra": lambda tensors, name: tensors | {f"{name}.more": torch.zeros(3)},
    "one row less": lambda tensors, name: tensors | {name: tensors[name][:-1].clone()},
    "one column less": lambda tensors, name: tensors | {name: tensors[name][..., :-1].clone()},
    "another dimension": lambda tensors, name: tensors | {name: tensors[name][None].clone()},
    "scalar": lambda tensors, name: tensors | {name: torch.tensor(1.0)},
    "no elements": lambda tensors, name: tensors | {name: tensors[name][:0].clone()},
    "half": lambda tensors, name: tensors | {name: tensors[name].half()},
    "double": lambda tensors, name: tensors | {name: tensors[name].double()},
    "integers": lambda tensors, name: tensors | {name: tensors[name].int()},
    "booleans": lambda tensors, name: tensors | {name: tensors[name].bool()},
    "float8": lambda tensors, name: tensors | {name: tensors[name].to(torch.float8_e4m3fn)},
    "one NaN": lambda tensors, name: tensors | {name: _with_first(tensors[name], float("nan"))},
    "one infinity": lambda tensors, name: (
        tensors | {name: _with_first(tensors[name], float("inf"))}
    ),
}


def _with_first(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def test_signed_tensors_that_do_not_fit(tries: Tries, fresh: Callable[[str], Path]) -> None:
    names = [(kind, name) for kind in KINDS for name in load_file(SHIPPED / kind / FILES[0])]
    for how, (kind, name) in [*spread(TENSORS, names), *spread(TENSORS, reversed(names))]:
        folder = fresh(kind)
        sign(
            folder,
            json.loads((folder / "manifest.json").read_text()),
            TENSORS[how](load_file(folder / FILES[0]), name),
        )
        tries.python(f"{kind} {name} {how}", partial(load, folder))


@pytest.mark.parametrize("signed", [False, True], ids=["edited", "signed"])
def test_wrong_values_in_the_manifest(
    tries: Tries, fresh: Callable[[str], Path], model: Any, signed: bool
) -> None:
    """A value for each place, or its removal. What is accepted is served as the shipped artifact.

    Signed manifests may describe other models, which the embedded model refuses.
    """

    def attached(folder: Path, kind: str, place: tuple[Any, ...]) -> Any:
        if place[0] == "model":
            with attach(model, **{"gate" if kind == "gate" else "qmodel": folder}, strict=True):
                pass
        return load(folder)

    shipped = {kind: json.loads((SHIPPED / kind / "manifest.json").read_text()) for kind in KINDS}
    every = [(kind, place) for kind in KINDS for place in places(shipped[kind])]
    for (kind, place), value in spread(drawn(every, 60), (*VALUES, REMOVED)):
        folder, before = fresh(kind), shipped[kind]
        changed = with_value(before, place, value)
        if changed == before:
            continue
        if signed:
            sign(folder, changed)
        else:
            (folder / "manifest.json").write_text(json.dumps(changed))
        right = partial(_legitimate, kind=kind, place=place) if signed else None
        tries.python(
            f"{kind} {'.'.join(map(str, place))}={value!r}",
            partial(attached, folder, kind, place),
            right,
        )


def _legitimate(found: Any, kind: str, place: tuple[Any, ...]) -> bool:
    """Returns True for the shipped weights and settings, and for other settings that a signed
    manifest may have.
    """
    allowed = ("thresholds", "gate", "rope")
    return same_as_shipped(kind)(found) or (
        place[0] == "details" and any(name in place for name in allowed)
    )


def test_hostile_documents(tries: Tries, fresh: Callable[[str], Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: 1")
    documents: dict[str, bytes] = {
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "deep yaml": b"a: " + b"[" * 5_000 + b"]" * 5_000,
        "many digits": b'{"seed": ' + b"9" * 10_000 + b"}",
        "NaN": b'{"seed": NaN}',
        "a list": b"[1, 2]",
        "not UTF-8": b'{"seed": "\xff"}',
        "NUL": b'{"seed": "\x00"}',
        "nothing": b"",
        "a tag": b"seed: !!python/object/apply:os.system ['touch owned']",
        "binary": b"seed: !!binary aGVsbG8=",
        "aliases": b"a: &a [1,1,1]\n"
        + b"".join(b"b%d: &b%d [*a,*a,*a,*a]\n" % (i, i) for i in range(30)),
        "keys that are lists": b"? [a, b]\n: 2",
        "several documents": b"a: 1\n---\nb: 2",
        "100 MB": b"a" * 100_000_000,
    }
    links: dict[str, Callable[[Path], None]] = {
        "a link to another file": lambda path: path.symlink_to(secret),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to(tmp_path / "nothing"),
        "a link to a folder": lambda path: path.symlink_to(tmp_path),
        "a pipe": lambda path: os.mkfifo(path),
        "a folder": lambda path: path.mkdir(),
        "missing": lambda path: None,
    }
    for (file, name), kind in spread(product(FILES, (*documents, *links)), KINDS):
        folder = fresh(kind)
        (folder / file).unlink()
        if name in documents:
            (folder / file).write_bytes(documents[name])
        else:
            links[name](folder / file)
        tries.python(f"{kind}/{file}: {name}", partial(load, folder))
        assert not Path("owned").exists(), "code of a YAML tag ran"

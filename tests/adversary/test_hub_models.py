"""Models of the Hub, in its cache: damaged files, and files that would make transformers load other weights."""

import hashlib
import shutil
from itertools import product
from pathlib import Path

import huggingface_hub
import pytest

from msattn.trainer.models import limited
from tests.adversary.model_folders import (
    CONFIG,
    GENERATION,
    SETTINGS,
    VOCABULARY,
    WEIGHTS,
    Damage,
    Models,
    Outcome,
    edit,
    load_folder,
    right,
)
from tests.adversary.test_models import INDEX, PICKLES, cut, file_damages, forms, pickled, shard, tensor_damages, twice
from tests.adversary.tries import Tries
from tests.factory import tiny_model

pytestmark = pytest.mark.area("model folders")
NAME, COMMIT = "someone/small", "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache, without the Hub."""
    monkeypatch.setattr(limited, "SECONDS", 4)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def cached(cache: Path, folder: Path) -> Path:
    """Copies a folder to the cache as the Hub's client does: blobs by hash, links in a snapshot. Returns the snapshot."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    shutil.rmtree(repository, ignore_errors=True)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            blob = hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, repository / "blobs" / blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
        else:
            shutil.move(path, snapshot / path.name)
    return snapshot


def attempt(tries: Tries, models: Models, cache: Path, case: str, *damages: Damage, accepted: bool | None = None) -> None:
    expected = models.expected()
    snapshot = cached(cache, models.damaged(*damages))

    def served(found: Outcome) -> bool:
        return right(snapshot, found, expected)

    tries.python(case, lambda: load_folder(NAME), served, accepted=accepted)


@pytest.mark.slow
def test_undamaged(tries: Tries, models: Models, cache: Path) -> None:
    for form, change in forms().items():
        attempt(tries, models, cache, form, change, accepted=True)


def test_adapters(tries: Tries, models: Models, cache: Path, tmp_path: Path) -> None:
    """transformers would load the base model that the adapter names; another complete model is there, with other weights."""
    other = tmp_path / "other"
    tiny_model(seed=7).save_pretrained(other)
    bases = {"a folder": str(other), "itself": NAME, "nowhere": "no/thing", "nothing": None}
    for (form, change), (base, name) in tries.chosen(product(forms().items(), bases.items())):

        def with_adapter(at: Path, name: str | None = name) -> None:
            edit(at / "adapter_config.json", ("base_model_name_or_path",), name)
            edit(at / "adapter_config.json", ("peft_type",), "LORA")

        attempt(tries, models, cache, f"{form}, adapter of {base}", change, with_adapter, accepted=False)


def test_damaged_files(tries: Tries, models: Models, cache: Path) -> None:
    cases = [
        (f"{file} {name}", [damage])
        for file in (CONFIG, GENERATION, VOCABULARY, SETTINGS)
        for name, damage in file_damages(file)
    ]
    cases += [(f"weights {name}", [damage]) for name, damage in tensor_damages("model.norm.weight")]
    cases += [(f"{INDEX} {name}", [shard, damage]) for name, damage in file_damages(INDEX)]
    cases += [("a tensor twice", [shard, twice]), ("cut", [lambda at: cut(at / WEIGHTS, 0.5)])]
    cases += [(f"pickle {name}, cut", [pickled(lambda file: cut(file, 0.5), **o)]) for name, o in PICKLES.items()]
    for name, damages in tries.chosen(cases):
        attempt(tries, models, cache, name, *damages)

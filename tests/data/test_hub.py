"""Hub datasets: scripts are refused and never run, errors while reading name the row, and held-out splits."""

import json
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.config import DataConfig
from msattn.trainer.data.hub import hub_identity
from msattn.trainer.data.sources import documents
from msattn.trainer.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(name: str, count: int = 30) -> str:
    return "".join(json.dumps({"text": f"{name} row {number}"}) + "\n" for number in range(count))


def texts(cfg: DataConfig, heldout: bool) -> list[str]:
    return [document.text for document in documents(cfg, heldout=heldout)]


def test_a_script_is_refused_and_never_run(here: Path) -> None:
    (here / "set").mkdir()
    (here / "set" / "set.py").write_text("open('ran', 'w').close()\n")
    with pytest.raises(UserError) as caught:
        texts(DataConfig("hub", path="set"), False)
    assert str(caught.value).startswith(
        "data.path=set: this dataset is a script, which is never run; data.revision=refs/convert"
    )
    assert not (here / "ran").exists()


def test_a_script_of_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("The repository contains custom code. Please pass the argument `trust_remote_code=True`.\nMore")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(
        UserError, match=r"^data\.path=a/b: this dataset is a script, which is never run; data\.revision=.*files$"
    ):
        texts(DataConfig("hub", path="a/b"), False)


@pytest.mark.parametrize("error", [RuntimeError("broken shard\nat 7"), KeyError("x")])
def test_an_error_while_rows_are_read_names_the_row(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream() -> Any:
        yield {"text": "a"}
        raise error

    class Builder:
        def as_streaming_dataset(self, split: str) -> Any:
            return stream()

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: Builder())
    with pytest.raises(UserError, match=r"^data\.path=a/b, row 1: (broken shard|'x')$"):
        texts(DataConfig("hub", path="a/b"), False)


def test_a_split_can_be_the_held_out_text(here: Path) -> None:
    (here / "set").mkdir()
    for split in ("train", "validation"):
        (here / "set" / f"{split}.jsonl").write_text(rows(split))
    cfg = DataConfig("hub", path="set", heldout_split="validation")
    assert texts(cfg, False) == [f"train row {number}" for number in range(30)], "all of the split, not nine tenths"
    assert texts(cfg, True) == [f"validation row {number}" for number in range(30)]
    names = [{document.name for document in documents(cfg, heldout=heldout)} for heldout in (False, True)]
    assert not names[0] & names[1]
    with pytest.raises(UserError, match=r"data\.heldout_split=train: expected another split than data\.split"):
        DataConfig("hub", path="set", heldout_split="train")


def test_the_identity_of_a_dataset_is_that_of_its_files(here: Path) -> None:
    (here / "set").mkdir()
    file = here / "set" / "train.jsonl"
    file.write_text(rows("a"))
    cfg = DataConfig("hub", path="set")
    before = json.dumps(hub_identity(cfg))
    assert json.dumps(hub_identity(cfg)) == before
    assert "train.jsonl" in before
    (here / "set" / "train-2.jsonl").write_text(rows("b"))
    assert json.dumps(hub_identity(cfg)) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "hub", "path": "a/b", "heldout_path": "c"}, r"data\.heldout_path=c: only data=text reads it; .*data=hub"),
        ({"source": None, "heldout_path": "c"}, r"data\.heldout_path=c: only data=text reads it; .*data=stdlib"),
        ({"source": "text", "path": "a", "heldout_split": "test"}, r"data\.heldout_split=test: only data=hub reads it"),
        ({"source": "text", "path": "a", "revision": "main"}, r"data\.revision=main: only data=hub reads it"),
        ({"source": "stdlib", "cache": " "}, r"data\.cache=' ': expected null, or a folder"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**options)

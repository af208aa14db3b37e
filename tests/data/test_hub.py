"""Hub datasets: scripts are refused and never run, errors while reading name the row, and held-out
splits.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig
from msattn.trainer.data.chunking import chunks
from msattn.trainer.data.hub import hub_identity
from msattn.trainer.data.sources import documents
from msattn.trainer.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_set(folder: Path, *splits: str) -> DataConfig:
    """Writes a local data set, which ``datasets`` loads without a network, with 30 rows in each
    split.
    """
    (folder / "set").mkdir(exist_ok=True)
    for split in splits:
        rows = (json.dumps({"text": f"{split} row {number}"}) + "\n" for number in range(30))
        (folder / "set" / f"{split}.jsonl").write_text("".join(rows))
    return DataConfig("hub", path="set")  # a relative path, because names decide the held-out split


def stream_from(monkeypatch: pytest.MonkeyPatch, stream: Callable[[], Iterator[Any]]) -> list[Any]:
    """Lets every data set have the rows of ``stream``; returns a list that collects what is asked
    for.
    """
    asked: list[Any] = []

    class Builder:
        def as_streaming_dataset(self, split: str) -> Iterator[Any]:
            asked.append(split)
            return stream()

    def load_dataset_builder(*arguments: Any, **options: Any) -> Builder:
        asked.append((arguments, options))
        return Builder()

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return asked


def texts(cfg: DataConfig, heldout: bool) -> list[str]:
    return [document.text for document in documents(cfg, heldout=heldout)]


def test_rows_are_split_and_read_only_as_far_as_needed(
    here: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = write_set(here, "train")
    train, heldout = (texts(cfg, side) for side in (False, True))
    assert sorted(train + heldout) == sorted(f"train row {number}" for number in range(30))
    assert heldout
    asked = stream_from(
        monkeypatch, lambda: itertools.repeat({"content": "Row of an endless data set. "})
    )
    cfg = DataConfig(
        "hub",
        path="some/set",
        subset="en",
        split="validation",
        column="content",
        seq_len=8,
        num_chunks=30,
    )
    assert len(chunks(cfg, tokenizer, seed=0)) == 30
    assert len(chunks(cfg, tokenizer, seed=0, heldout=True, num_chunks=5)) == 5
    assert asked[:2] == [(("some/set", "en"), {"revision": None}), "validation"]


def test_errors_name_the_setting(
    here: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = write_set(here, "train")
    for change, message in (
        ({"split": "nope"}, r"data\.path=.*Bad split: nope"),
        ({"column": "body"}, r"data\.column=body: .*row 0 has no such column \(it has: text\)"),
    ):
        with pytest.raises(UserError, match=message):
            texts(replace(cfg, **change), False)
    with pytest.raises(UserError, match=r"data\.num_chunks=null"):
        chunks(cfg, tokenizer, seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"data=hub: .*pip install datasets"):
        texts(cfg, False)


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
        raise ValueError(
            "The repository contains custom code. Please pass the argument "
            "`trust_remote_code=True`.\nMore"
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(
        UserError,
        match=r"^data\.path=a/b: this dataset is a script, which is never run; "
        r"data\.revision=.*files$",
    ):
        texts(DataConfig("hub", path="a/b"), False)


@pytest.mark.parametrize("error", [RuntimeError("broken shard\nat 7"), KeyError("x")])
def test_an_error_while_rows_are_read_names_the_row(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream() -> Any:
        yield {"text": "a"}
        raise error

    stream_from(monkeypatch, stream)
    with pytest.raises(UserError, match=r"^data\.path=a/b, row 1: (broken shard|'x')$"):
        texts(DataConfig("hub", path="a/b"), False)


def test_a_split_can_be_the_held_out_text(here: Path) -> None:
    cfg = replace(write_set(here, "train", "validation"), heldout_split="validation")
    assert texts(cfg, False) == [f"train row {number}" for number in range(30)], (
        "all of the split, not nine tenths"
    )
    assert texts(cfg, True) == [f"validation row {number}" for number in range(30)]
    names = [
        {document.name for document in documents(cfg, heldout=heldout)} for heldout in (False, True)
    ]
    assert not names[0] & names[1]
    with pytest.raises(
        UserError, match=r"data\.heldout_split=train: expected another split than data\.split"
    ):
        DataConfig("hub", path="set", heldout_split="train")


def test_the_identity_of_a_dataset_is_that_of_its_files(here: Path) -> None:
    cfg = write_set(here, "train")
    before = json.dumps(hub_identity(cfg))
    assert json.dumps(hub_identity(cfg)) == before
    assert "train.jsonl" in before
    write_set(here, "train-2")
    assert json.dumps(hub_identity(cfg)) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "hub", "path": "a/b", "heldout_path": "c"},
            r"data\.heldout_path=c: only data=text reads it; .*data=hub",
        ),
        (
            {"source": None, "heldout_path": "c"},
            r"data\.heldout_path=c: only data=text reads it; .*data=stdlib",
        ),
        (
            {"source": "text", "path": "a", "heldout_split": "test"},
            r"data\.heldout_split=test: only data=hub reads it",
        ),
        (
            {"source": "text", "path": "a", "revision": "main"},
            r"data\.revision=main: only data=hub reads it",
        ),
        ({"source": "stdlib", "cache": " "}, r"data\.cache=' ': expected null, or a folder"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**options)

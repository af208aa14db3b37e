"""Records of offline runs, read back from the files that ``wandb sync`` would upload."""

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from msattn import cli
from tests.running import exit_code_of

BLOCK = 32768  # bytes
LAST_PARTS = (1, 4)  # types of the parts that end a record
PROMPT = "def private_function(arguments):\n    return arguments\n\n" * 30
SECRET = "0123456789abcdef" * 2 + "01234567"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)


def records(folder: Path) -> list[Any]:
    """Returns the records of the only run in ``folder``, whose file wandb's service may complete
    after the end of the run.
    """
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):
        found = list(read_log(path.read_bytes()))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def read_log(data: bytes) -> Iterator[Any]:
    """Yields the records of LevelDB's log format: parts with checksum, length and type, in
    blocks.
    """
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:  # no part begins here
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in LAST_PARTS:
            record = wandb_internal_pb2.Record()  # pyrefly: ignore[missing-attribute]
            record.ParseFromString(whole)
            yield record
            whole = b""


def of_kind(folder: Path, kind: str) -> list[Any]:
    return [
        getattr(record, kind)
        for record in records(folder)
        if record.WhichOneof("record_type") == kind
    ]


def history(folder: Path) -> dict[str, Any]:
    """Returns the last logged value of each key."""
    items = [item for record in of_kind(folder, "history") for item in record.item]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def summary(folder: Path) -> dict[str, Any]:
    """Returns the last value of each key of the summary."""
    items = [item for record in of_kind(folder, "summary") for item in record.update]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of the table that was logged as ``name``."""
    (path,) = folder.glob(f"wandb/offline-run-*/files/{history(folder)[f'{name}/path']}")
    content = json.loads(path.read_text("utf-8"))
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def holding(text: str, folder: Path) -> list[Path]:
    """Returns the files in ``folder`` that hold ``text``."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    assert files
    return [path for path in files if text.encode() in path.read_bytes()]


SMALL = [
    "device=cpu",
    "data=text",
    "data.path=text.txt",
    "data.seq_len=192",
    "tracker=wandb",
    "tracker.group=study",
]
TRAIN = [
    "train.steps=2",
    "train.batch_size=1",
    "train.num_workers=0",
    "train.warmup_steps=0",
    "gate.block_size=16",
]
EVAL = [
    "eval.tasks=[perplexity]",
    "eval.perplexity={length: 160, num_chunks: 1, sparsities: [0.5]}",
    "eval.baselines=[quest]",
]


def run(*arguments: str) -> None:
    with patch.object(sys, "argv", ["msattn", *arguments]):
        assert exit_code_of(cli.main) == 0


def test_a_study_from_training_to_generation_is_a_group_of_linked_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate that train-gate uploads is what eval and generate read; the prompt on the command
    line is in no file.
    """
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "\n\n".join(f"def function_{i}(x):\n    return x + {i * i}" for i in range(1500))
    )
    run("train-gate", *SMALL, *TRAIN, "tracker.upload=true")
    run("eval", *SMALL, *EVAL, "select=topk", "select.block_size=16")
    run(
        "generate",
        "device=cpu",
        "tracker=wandb",
        "tracker.group=study",
        "select=topk",
        "max_new_tokens=3",
        "--prompt",
        PROMPT,
    )

    base = tmp_path / "outputs/tiny/base"
    (generated,) = (base / "runs/generate").iterdir()
    folders = {"train-gate": base / "runs/gate", "eval": base / "eval", "generate": generated}
    for job, folder in folders.items():
        (found,) = of_kind(folder, "run")
        assert (found.project, found.run_group, found.job_type, list(found.tags)) == (
            "msattn",
            "study",
            job,
            ["tiny", "base"],
        )

    (gate,) = [each for each in of_kind(folders["train-gate"], "artifact") if each.type == "gate"]
    content_hash = json.loads((base / "gate/manifest.json").read_text())["content_hash"]
    assert content_hash[:16] in gate.aliases
    assert {file.path for file in gate.manifest.contents} == {
        path.name for path in (base / "gate").iterdir()
    }
    assert history(folders["train-gate"])["_step"] == 2
    for job in ("eval", "generate"):
        assert summary(folders[job])["read/gate"] == content_hash

    rows = table(folders["eval"], "results")
    assert {row["method"] for row in rows} >= {"dense", "gate", "quest"}
    (page,) = folders["eval"].glob(
        f"wandb/offline-run-*/files/{history(folders['eval'])['report/path']}"
    )
    assert "<svg" in page.read_text("utf-8")
    written = json.loads((base / "eval/results.json").read_text())["rows"]
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in written])
    assert summary(folders["eval"])["perplexity/dense"] == rows[0]["score"]
    dense, sparse = table(folders["generate"], "results")
    assert (dense["attention"], dense["new_tokens"], sparse["attention"]) == ("dense", 3, "sparse")
    assert summary(folders["generate"])["sparse/sparsity"] == sparse["sparsity"] > 0
    assert holding(SECRET, tmp_path) == []
    assert holding("private_function", base) == []

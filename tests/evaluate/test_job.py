"""An evaluation that was interrupted continues after its last row."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from msattn.trainer import models
from msattn.trainer.config import DataConfig, EvalRunConfig
from msattn.trainer.config.evaluate import DocumentsConfig, RulerConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.job import PartialRows, texts_hash
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks import needle, perplexity, ruler
from tests.evaluate.named import named
from tests.evaluate.runs import config
from tests.running import WORDS

TIMES = ("latency_s", "peak_memory_mb")
EXTRA = {"by": {"0.5": [1, 2]}}
BOUNDS = (0.0, float("inf"))
ROW = EvalRow(
    "ruler",
    named("gate"),
    Setting("sparsity", 0.5),
    0.1,
    "share",
    interval=BOUNDS,
    samples=3,
    extra=EXTRA,
)


def rows_of(folder: Path) -> list[dict]:
    """The rows of an evaluation without what differs between two runs."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def tasks_of(text: str, outputs: Path) -> EvalRunConfig:
    """A configuration of the tasks whose rows are kept."""
    outputs.mkdir()
    (outputs / "words.txt").write_text(WORDS)
    cfg = config(
        outputs,
        text,
        tasks=["perplexity", "needle", "documents", "ruler"],
        baselines=["mean_pool", "random"],
        routers=["random", "lsh", "quest"],
        documents=DocumentsConfig(lengths=[64], num_documents=2, sparsities=[0.5]),
        ruler=RulerConfig(
            lengths=[600],
            samples=1,
            tasks=["niah_single_1"],
            haystack=str(outputs / "words.txt"),
            sparsities=[0.5],
            probes=[1],
        ),
    )
    long = {**(cfg.model.architecture or {}), "max_position_embeddings": 1024}
    return replace(cfg, model=replace(cfg.model, architecture=long))


@pytest.mark.slow
def test_an_interrupted_evaluation_continues_to_the_same_rows(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops in the middle of each task in turn, and prints the rows so far."""
    whole = rows_of(evaluate(tasks_of(text, tmp_path / "whole")))
    cfg = tasks_of(text, tmp_path / "stopped")
    partial = tmp_path / "stopped" / "rand" / "base" / "eval.rows"
    measured = []
    for module, name in (
        (perplexity, "measure"),
        (needle, "prefill_samples"),
        (needle, "decode_samples"),
        (ruler, "answer"),
    ):
        once, calls = getattr(module, name), 0

        def stopping(*given: object, once=once, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            measured.append(once.__name__)
            return once(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, stopping)
            capsys.readouterr()
            with pytest.raises(
                KeyboardInterrupt,
                match=r"\d rows are kept: the same command with resume=true continues after",
            ):
                evaluate(cfg)
            assert re.search(
                r"Perplexity of held-out text.*mean pooling +sparsity 0 ",
                capsys.readouterr().out,
                re.DOTALL,
            )
        cfg = replace(cfg, resume=True)
    assert rows_of(evaluate(cfg)) == whole
    assert not partial.exists()
    assert [path.name for path in partial.parent.iterdir()] == ["eval"]
    assert set(measured) == {"measure", "prefill_samples", "decode_samples", "answer"}


def test_rows_are_read_as_they_were_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "rows", {"seed": 0, "eval": {"ruler": {"lengths": (1, 2)}}}
    kept = PartialRows(folder, settings, resume=True)  # there is nothing to resume
    assert kept.get("ruler", 4096) is None
    assert kept.add([ROW, ROW], "ruler", 4096, "gate") == [ROW, ROW]
    again = PartialRows(folder, settings, resume=True)
    assert again.get("ruler", 4096, "gate") == [ROW, ROW]
    assert len(again) == 2
    assert again.get("ruler", "4096", "gate") is None
    for other, message in (
        ({"seed": 1}, "seed=0, not 1"),
        ({"eval": {"ruler": {"lengths": [1]}}}, r"lengths=\[1, 2\], not \[1\]"),
    ):
        with pytest.raises(UserError, match=f"{message}; use the same settings, or resume=false"):
            PartialRows(folder, settings | other, resume=True)
    (part,) = folder.glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    assert len(PartialRows(folder, settings, resume=True)) == 0, "a damaged file is measured again"
    again.add([ROW], "needle")
    capsys.readouterr()
    assert len(PartialRows(folder, settings, resume=False)) == 0
    assert capsys.readouterr().err == (
        f"msattn: {folder}, the rows of an interrupted evaluation, is removed; resume=true would "
        "have continued it\n"
    )
    PartialRows(folder, settings, resume=False)
    assert capsys.readouterr().err == ""


def test_changed_text_is_another_setting(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("one text")
    (tmp_path / "hay.txt").write_text("words")
    tasks = ["perplexity", "ruler"]
    cfg = config(
        tmp_path,
        str(tmp_path / "held.txt"),
        tasks=tasks,
        ruler=RulerConfig(haystack=str(tmp_path / "hay.txt")),
    )
    found = [texts_hash(cfg)]
    for name in ("held.txt", "hay.txt"):
        assert texts_hash(cfg) == found[-1]
        (tmp_path / name).write_text("another text")
        found.append(texts_hash(cfg))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("task", "source", "init", "lines"),
    [
        ("perplexity", None, "random", 1),
        ("perplexity", "stdlib", "random", 1),
        ("latency", None, "random", 0),
        ("latency", None, "pretrained", 1),
        ("decoding", None, "pretrained", 0),
    ],
)
def test_text_that_nobody_chose_is_named_if_a_task_reads_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    task: str,
    source: str | None,
    init: str,
    lines: int,
) -> None:
    cfg = config(tmp_path, "unused", tasks=[task])
    cfg = replace(cfg, data=DataConfig(source, seq_len=160), model=replace(cfg.model, init=init))
    monkeypatch.setattr(models, "describe", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(cfg)
    chosen = "" if source else "no text was chosen, so "
    line = rf"^msattn: {chosen}eval reads .*standard library; --data "
    assert len(re.findall(line, capsys.readouterr().err, re.M)) == lines

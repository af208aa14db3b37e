"""Latency and decoding tasks on a CPU: settings, ratios and notes of their rows."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from msattn.trainer import models
from msattn.trainer.config import (
    DataConfig,
    DecodingConfig,
    EvalConfig,
    EvalRunConfig,
    LatencyConfig,
    ModelConfig,
    ModelPresets,
    SelectConfig,
    TrackerConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import decoding, latency
from msattn.trainer.evaluate.latency import LatencyRun, break_even
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.models.sdpa import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.serving.cache import BucketLayer
from tests.factory import tiny_architecture

BUCKETS = 4


def config(outputs: Path, **changes: object) -> EvalRunConfig:
    """A small configuration of both tasks; ``changes`` replace fields."""
    presets = ModelPresets(num_buckets=BUCKETS, qmodel_hidden=8)
    architecture = tiny_architecture(vocab_size=4096)
    cfg = EvalRunConfig(
        model=ModelConfig(name="rand", path="embedded", init="random", architecture=architecture, presets=presets),
        data=DataConfig(source="stdlib", seq_len=64),
        tracker=TrackerConfig(kind="none"),
        outputs=str(outputs),
        device="cpu",
        select=SelectConfig(policy="calibrated", block_size=16, dense_below=10**6),
        eval=EvalConfig(
            tasks=["latency", "decoding"],
            baselines=[],
            latency=LatencyConfig(lengths=[96, 240], sparsities=[0.5, 0.9], seconds=0.01),
            decoding=DecodingConfig(lengths=[128, 1000], tokens=4),
        ),
        probes=2,
        recent=16,
    )
    return replace(cfg, **changes)


def test_both_tasks_without_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = evaluate(config(tmp_path))
    written = {path.name for path in folder.iterdir()}
    assert written == {"latency.png", "latency.svg", "results.json", "results.csv", "report.html", "metrics.jsonl"}
    results = json.loads((folder / "results.json").read_text())
    rows = {(row["task"], row["method"], row["setting"], row["extra"]["length"]): row for row in results["rows"]}
    for length in (96, 240):
        dense = rows["latency", "dense, SDPA", "", length]
        assert dense["ratio_to_dense"] == 1
        assert (dense["sparsity"], dense["extra"]["selection_s"]) == (None, 0)
        for sparsity in (0.5, 0.9):
            row = rows["latency", "gate, untrained", f"sparsity {sparsity}", length]
            assert row["score"] == row["latency_s"] > 0
            assert row["ratio_to_dense"] == pytest.approx(row["score"] / dense["score"])
            assert row["extra"]["times_SDPA"] == pytest.approx(dense["score"] / row["score"])
            assert row["sparsity"] == pytest.approx(sparsity, abs=0.3), "short rows round their shares"
            assert row["sparsity"] > 0, "the sparse path must be measured"
            assert 0 < row["extra"]["selection_s"] + row["extra"]["attention_s"] < row["score"] * 2
    for length in (128, 1000):
        dense = rows["decoding", "dense, SDPA", "", length]
        routed = rows["decoding", "classifier, untrained", "2 probes", length]
        assert routed["ratio_to_dense"] == pytest.approx(routed["score"] / dense["score"])
        assert 0 < routed["selectivity"] < 1
        assert routed["extra"]["device_tokens_per_s"] is None
    assert len(rows) == 2 * 3 + 2 * 2
    with (folder / "results.csv").open(newline="") as file:
        assert "times_SDPA" in next(csv.reader(file))
    shown = capsys.readouterr().out
    assert shown.count("CPU times say nothing about GPUs") == 1
    assert shown.count("faster than the fastest dense attention") == 2


def test_break_even() -> None:
    assert break_even({1024: 1.5, 4096: 0.5}) == round(1024 * 4 ** (0.405465 / 1.098612)) + 1
    assert break_even({1024: 2.0, 4096: 0.5}) == 2048
    assert break_even({1024: 0.9, 4096: 0.5}) == 1024, "shorter prompts were not measured"
    assert break_even({1024: 0.9, 2048: 1.0, 4096: 0.5}) == 2048, "sparse must stay faster"
    assert break_even({1024: 0.9, 2048: 1.1}) is None
    assert break_even({}) is None


def test_rows_have_the_speedup_over_each_dense_kernel() -> None:
    run = LatencyRun(seconds=[2.0, 1.0, 4.0], peak_mb=5.0, sparsity=0.9, selection_s=0.2, attention_s=0.5)
    row = latency.as_row("gate", "sparsity 0.9", 1024, run, {"cuDNN": 3.0, "flash": 8.0})
    assert (row.score, row.ratio_to_dense, row.samples) == (2.0, 2 / 3, 3)
    assert (row.extra["times_cuDNN"], row.extra["times_flash"]) == (1.5, 4.0)
    assert (row.extra["selection_share"], row.extra["attention_share"]) == (0.1, 0.25)
    decoded = decoding.as_row(
        "x", "2 probes", 9, decoding.DecodingRun(20, 60, 5.0, 0.1), {"flash": decoding.DecodingRun(10, 20, 5.0, None)}, 64
    )
    assert (decoded.score, decoded.ratio_to_dense, decoded.latency_s) == (20, 2, 0.05)
    assert (decoded.extra["times_flash"], decoded.extra["device_times_flash"]) == (2, 3)


def test_failing_methods_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = latency.measure

    def fails(model, ids, attached, seconds) -> LatencyRun:
        if ids.shape[1] == 240:
            raise torch.OutOfMemoryError
        return measure(model, ids, attached, seconds)

    monkeypatch.setattr(latency, "measure", fails)
    cfg = config(tmp_path)
    folder = evaluate(replace(cfg, eval=replace(cfg.eval, tasks=["latency"])))
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert {row["extra"]["length"] for row in rows} == {96}
    assert "dense, SDPA at 240 tokens: not timed: out of memory" in capsys.readouterr().out


def test_unavailable_backends_give_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match="no such SDPA backend"), use_backend(SDPA_BACKENDS["cuda"]["cuDNN"]):
        raise RuntimeError("No available kernel. Aborting execution.")  # the message of PyTorch
    with pytest.raises(BackendUnavailable, match="out of memory"), use_backend(None):
        raise torch.OutOfMemoryError
    with pytest.raises(RuntimeError, match="something else"), use_backend(None):
        raise RuntimeError("something else")


def test_a_filled_cache_decodes_like_a_grown_one(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    model = models.load(cfg.model, device="cpu").model
    routing = decoding._untrained_router(cfg, model)
    cache = decoding.filled_cache(model, routing.router, (0,), 100, seed=0)
    assert [isinstance(layer, BucketLayer) for layer in cache.layers] == [False, True]
    assert cache.get_seq_length() == 100
    with routing.attach(model, BUCKETS) as sparse:  # every bucket: every key
        tokens = [decoding.next_token(model, cache, torch.zeros(1, 1, dtype=torch.long))]
        stats = sparse.stats()
    assert (stats["selectivity"], stats["dense_fallbacks"], cache.get_seq_length()) == (1, 0, 101)
    with routing.attach(model, BUCKETS):
        again = [decoding.step(model, cache, tokens[0]) for _ in range(2)]
    assert torch.equal(*again)
    assert cache.get_seq_length() == 101
    other = decoding.filled_cache(model, routing.router, (), 100, seed=0)
    assert torch.equal(tokens[0], decoding.next_token(model, other, torch.zeros(1, 1, dtype=torch.long)))


def test_phase_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr("msattn.trainer.models.timing.time.perf_counter", lambda: next(clock))
    timer = PhaseTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.measure("attention"):
            pass
    assert timer.seconds("attention") == 2.5
    assert timer.seconds("selection") is None


def test_user_errors(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    with pytest.raises(UserError, match="length=512 of eval"):
        evaluate(replace(cfg, eval=replace(cfg.eval, latency=LatencyConfig(lengths=[512]))))
    with pytest.raises(UserError, match=f"probes=5: accepted are 0 to {BUCKETS}"):
        evaluate(replace(cfg, probes=5))
    for lengths in ([], [0]):
        with pytest.raises(UserError, match=r"eval\.latency\.lengths"):
            LatencyConfig(lengths=lengths)
    with pytest.raises(UserError, match=r"eval\.latency\.sparsities"):
        LatencyConfig(sparsities=[1.0])
    with pytest.raises(UserError, match=r"eval\.decoding\.tokens=0"):
        DecodingConfig(tokens=0)


def test_summary_keys_contain_the_length() -> None:
    from msattn.trainer.evaluate.run import summary

    row = EvalRow("latency", "gate", "sparsity 0.9", 2.0, "seconds to the first token", extra={"length": 1024})
    assert summary([row]) == {"latency/1024/gate/sparsity 0.9": 2.0}

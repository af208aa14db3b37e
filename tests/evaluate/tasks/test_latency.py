"""Latency and decoding tasks on a CPU: settings, ratios and notes of their rows."""

import argparse
import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn import attach
from msattn.trainer import models
from msattn.trainer.config import (
    ArtifactsConfig,
    DataConfig,
    EvalConfig,
    EvalRunConfig,
    LatencyConfig,
    ModelConfig,
    PerplexityConfig,
    SelectConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.job import reads_data
from msattn.trainer.evaluate.row import Setting
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks import decoding, latency, perplexity
from msattn.trainer.evaluate.tasks.latency import LatencyRun, break_even
from msattn.trainer.evaluate.tasks.timing import (
    random_cache,
    random_dynamic_cache,
    random_router,
    with_growing_layers,
)
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, tap
from msattn.trainer.models.timing import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer
from tests.evaluate.runs import BUCKETS, loaded_and_found, rows_of, timed_config


@pytest.mark.slow
def test_both_tasks_without_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = evaluate(timed_config(tmp_path))
    written = {path.name for path in folder.iterdir()}
    figures = {"latency.png", "latency.svg", "speed.png", "speed.svg"}
    assert written == figures | {"results.json", "results.csv", "report.html", "metrics.jsonl"}
    results = json.loads((folder / "results.json").read_text())
    every = {
        (row["task"], row["method"], row["setting"], row["extra"]["length"]): row
        for row in results["rows"]
    }
    rows = {key: row for key, row in every.items() if not row["extra"].get("situation")}
    for length in (96, 240):
        dense = rows["latency", "dense, SDPA", "", length]
        assert dense["ratio_to_dense"] == 1
        assert (dense["sparsity"], dense["extra"]["selection_s"]) == (None, 0)
        for sparsity in (0.5, 0.9):
            row = rows["latency", "gate_question, untrained", f"sparsity {sparsity}", length]
            assert row["score"] == row["latency_s"] > 0
            assert row["ratio_to_dense"] == pytest.approx(row["score"] / dense["score"])
            assert 0.15 < row["sparsity"] < sparsity + 0.1, (
                "of few blocks, those that are always read are a large part"
            )
            # These are times of other passes, and the machine may be busy.
            assert 0 < row["extra"]["selection_s"] + row["extra"]["attention_s"] < row["score"] * 10
    assert len(rows) == 2 * 3 + 2 * 4
    others = every.keys() - rows.keys()
    assert {(setting, length) for _, method, setting,
    length in others if method == "dense, SDPA"} == {
        ("chunks of 100", 240), ("64 new after 176", 240)
    }  # fmt: skip
    assert len(others) == 2 * 2, "one setting of each method"
    for name in ("chunks of 100", "64 new after 176"):
        dense = every["latency", "dense, SDPA", name, 240]
        sparse = every["latency", "gate_question, untrained", f"sparsity 0.5, {name}", 240]
        assert sparse["ratio_to_dense"] == pytest.approx(sparse["score"] / dense["score"])
        assert sparse["sparsity"] > 0
        assert (sparse["extra"]["situation"], sparse["extra"]["break_even"]) == (name, None)
    check_decoding(results["rows"])
    with (folder / "results.csv").open(newline="") as file:
        assert "times_SDPA" in next(csv.reader(file))
    shown = capsys.readouterr().out
    assert shown.count("CPU times say nothing about GPUs") == 1
    assert shown.count("faster than the fastest dense attention") == 2
    assert "decoding after 1,000 keys, batch 2: left out by eval.decoding.max_keys=1,000" in shown


def check_decoding(rows: list[dict]) -> None:
    """Asserts the methods, speed-ups and counts of the rows of decoding."""
    rows = [row for row in rows if row["task"] == "decoding"]
    assert {(row["extra"]["length"], row["extra"]["batch"]) for row in rows} == {
        (128, 1),
        (128, 2),
        (1000, 1),
    }
    for length, batch in ((128, 1), (128, 2), (1000, 1)):
        own = {
            row["method"]: row
            for row in rows
            if (row["extra"]["length"], row["extra"]["batch"]) == (length, batch)
        }
        routed = own.pop("classifier, untrained")
        assert list(own) == ["dense, transformers"] * (batch == 1) + [
            "dense, SDPA",
            "dense, same cache and graphs",
        ]
        assert routed["setting"] == "2 probes"
        assert routed["ratio_to_dense"] == pytest.approx(
            routed["score"] / max(row["score"] for row in own.values())
        )
        for method, row in own.items():
            name = method.removeprefix("dense, ")
            assert routed["extra"][f"times_{name}"] == pytest.approx(routed["score"] / row["score"])
            assert row["selectivity"] is None, "dense attention reads every key"
            assert row["extra"]["launched_by"] == ("host" if name == "SDPA" else "generate")
        assert 0 < routed["selectivity"] < 1, "short caches are routed, too"
        assert (routed["samples"], routed["extra"]["device_tokens_per_s"]) == (4, None)


def test_break_even() -> None:
    assert break_even({1024: 1.5, 4096: 0.5}) == round(1024 * 4 ** (0.405465 / 1.098612)) + 1
    assert break_even({1024: 2.0, 4096: 0.5}) == 2048
    assert break_even({1024: 0.9, 4096: 0.5}) == 1024, "shorter prompts were not measured"
    assert break_even({1024: 0.9, 2048: 1.0, 4096: 0.5}) == 2048, "sparse must stay faster"
    assert break_even({1024: 0.9, 2048: 1.1}) is None
    assert break_even({}) is None


def test_rows_have_the_speedup_over_each_dense_kernel() -> None:
    run = LatencyRun(
        seconds=[2.0, 1.0, 4.0],
        peak_mb=5.0,
        sparsity=0.9,
        parts={"selection": 0.2, "attention": 0.5},
        timed_s=4.0,
    )
    sparse = MethodSetting("gate", Setting("sparsity", 0.9), nullcontext)
    row = latency.as_row(sparse, 1024, run, {"cuDNN": 3.0, "flash": 8.0})
    assert (row.score, row.ratio_to_dense, row.samples) == (2.0, 2 / 3, 3)
    assert (row.extra["times_cuDNN"], row.extra["times_flash"]) == (1.5, 4.0)
    assert (row.extra["selection_share"], row.extra["attention_share"]) == (0.05, 0.125)
    case = decoding.DecodingCase(
        "x",
        Setting("probes", 2),
        "generate",
        lambda batch, length: decoding.DecodingRun(20, 5.0, 0.1, 64),
    )
    dense = {"flash": 10, "transformers": 4}
    decoded = decoding.as_row(case, 2, 9, case.measure(2, 9), dense)
    assert (decoded.score, decoded.ratio_to_dense, decoded.latency_s, decoded.samples) == (
        20,
        2,
        0.1,
        64,
    )
    assert (
        decoded.extra["times_flash"],
        decoded.extra["times_transformers"],
        decoded.extra["batch"],
    ) == (2, 5, 2)
    graph = decoding.as_row(case._replace(launched_by="CUDA graph"), 1, 9, case.measure(1, 9), {})
    assert (graph.ratio_to_dense, graph.extra["device_tokens_per_s"]) == (None, 20)


def test_random_caches_decode_like_grown_ones(tmp_path: Path) -> None:
    cfg = timed_config(tmp_path)
    model = models.load(cfg.model, device="cpu").model
    routing = random_router(cfg, model)
    first = torch.zeros(2, 1, dtype=torch.long)

    def filled() -> Any:
        return random_cache(model, 2, 100, new_tokens=8, seed=0)

    dense = with_growing_layers(model, filled())
    layer: Any = dense.layers[1]
    keys, values = layer.keys.clone(), layer.values.clone()
    tokens = decoding.next_token(model, dense, first)
    again = [decoding.step(model, dense, tokens) for _ in range(2)]
    assert torch.equal(*again)
    assert dense.get_seq_length() == 101
    with routing.attach(model, BUCKETS) as sparse:  # every bucket: every key
        routed = filled()
        assert torch.equal(decoding.next_token(model, routed, first), tokens)
        stats = sparse.stats()
    assert [isinstance(layer, BucketLayer) for layer in routed.layers] == [False, True]
    assert (stats["selectivity"], stats["dense_fallbacks"], routed.get_seq_length()) == (1, 0, 101)
    grown: Any = random_dynamic_cache(model, 2, 100, seed=0).layers[1]
    assert grown.keys.shape == keys.shape
    assert len(keys) == 2
    assert not torch.equal(keys, values)


def test_generate_is_measured_without_its_first_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = timed_config(tmp_path)
    model = models.load(cfg.model, device="cpu").model
    seconds = iter(
        [
            0.0,
            *(100.0 + i for i in range(decoding.WARMUP_TOKENS)),
            *(104.0 + 0.5 * i for i in range(4)),
        ]
    )
    monkeypatch.setattr(
        decoding.TokenClock, "put", lambda clock, value: clock.times.append(next(seconds))
    )
    done = decoding.measure_generate(
        model, partial(random_dynamic_cache, model, seed=0), 4, nullcontext, 3, 50
    )
    assert next(seconds, None) is None, "every token is recorded"
    assert (done.rate, done.tokens, done.selectivity) == (3 * 4 / 2.5, 4, None)


@pytest.mark.parametrize("random_keys", [True, False])
@pytest.mark.parametrize(
    "situation", [latency.Situation("turn", cached=60), latency.Situation("chunks", chunk=40)]
)
def test_situations_run_the_whole_prompt_each_time(
    situation: latency.Situation, random_keys: bool, tmp_path: Path
) -> None:
    model = models.load(timed_config(tmp_path).model, device="cpu").model
    ids, lengths = torch.zeros(1, 100, dtype=torch.long), []

    def read(x: LayerInputs) -> Tensor:
        lengths.append((x.num_queries, x.num_keys))
        return dense_attention(x)

    @contextmanager
    def attached(*, measure_time: bool = False) -> Iterator:
        with tap(model, read):
            yield SimpleNamespace(
                stats=lambda: {"sparsity": None, "selection_s": None, "attention_s": None}
            )

    done = latency.measure(model, ids, attached, 1e-6, situation, random_keys=random_keys)
    passes = [(40, 100)] if situation.cached else [(40, 40), (40, 80), (20, 100)]
    cached = [(60, 60)] if situation.cached and not random_keys else []
    assert len(done.seconds) == 1
    assert lengths == [each for each in cached + 3 * passes for _ in range(2)], (
        "a warm-up, a prompt, its parts, in two layers"
    )


def embedded_config(tmp_path: Path, heldout: str) -> EvalRunConfig:
    """Perplexity and latency of the embedded model and its gate on the same text: its first 1536
    tokens, the only chunk.
    """
    for name, text in (("train", "Other words are what a model trains on."), ("heldout", heldout)):
        (tmp_path / f"{name}.txt").write_text(text)
    train, held = str(tmp_path / "train.txt"), str(tmp_path / "heldout.txt")
    tasks = EvalConfig(
        tasks=["perplexity", "latency"],
        baselines=[],
        perplexity=PerplexityConfig(length=1536, num_chunks=1, sparsities=[0.5]),
        latency=LatencyConfig(lengths=[1536], sparsities=[0.5], seconds=1e-6, chunk=None, turn=512),
    )
    return timed_config(
        tmp_path,
        eval=tasks,
        model=ModelConfig(name="tiny", path="embedded"),
        artifacts=ArtifactsConfig(gate="embedded"),
        # the first token of each prompt is BOS, too
        data=DataConfig("text", train, heldout_path=held, bos=True),
        select=SelectConfig(policy="calibrated", sparsity=0.5),
    )


def test_prompts_of_a_pretrained_model_are_heldout_text(tmp_path: Path) -> None:
    cfg = embedded_config(tmp_path, heldout=Path(argparse.__file__).read_text()[:6500])
    loaded, methods = loaded_and_found(cfg)
    # the gate with its thresholds
    methods = replace(methods, block_selections=methods.block_selections[:1])
    rows = [row for task in (perplexity, latency) for row in rows_of(task, loaded, cfg, methods)]
    left_out: dict[Any, Any] = {
        (row.task, row.setting.situation): row.sparsity for row in rows if not row.method.is_dense
    }
    assert left_out["latency", ""] == left_out["perplexity", ""]

    model: Any = loaded.model
    ids, cache = latency.prepare(cfg, loaded), DynamicCache(config=model.config)
    random_ids = torch.randint(4096, (1, 1536), generator=torch.Generator().manual_seed(0))
    found = []
    for tokens, past in ((random_ids, None), (ids[:, :1024], cache), (ids[:, 1024:], cache)):
        with (
            attach(model, gate="embedded", sparsity=0.5, dense_below=0) as sparse,
            torch.inference_mode(),
        ):
            model(tokens, past_key_values=past)
        found.append(sparse.stats()["sparsity"])
    assert found[0] < left_out["latency", ""] - 0.03, (
        "the test needs a gate to which random tokens are not like text"
    )
    assert left_out["latency", "512 new after 1024"] == pytest.approx(found[2])


def test_only_pretrained_models_need_text(tmp_path: Path) -> None:
    cfg = embedded_config(tmp_path, heldout="A short text.")
    loaded = models.load(cfg.model, device="cpu")
    with pytest.raises(
        UserError,
        match=r"^eval\.latency\.lengths=1536: expected at most \d+, the tokens of the held-out "
        r"text$",
    ):
        latency.prepare(cfg, loaded)
    missing = timed_config(tmp_path, data=DataConfig("text", "no such folder"))
    assert not reads_data(missing)
    assert latency.prepare(missing, loaded).shape == (1, 240)


def test_random_classifiers_have_the_buckets_of_the_presets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"probes=5: expected 0 to {BUCKETS}"):
        evaluate(timed_config(tmp_path, probes=5))


def test_unavailable_backends_give_the_reason() -> None:
    with (
        pytest.raises(BackendUnavailable, match="no such SDPA backend"),
        use_backend(SDPA_BACKENDS["cuda"]["cuDNN"]),
    ):
        raise RuntimeError("No available kernel. Aborting execution.")  # the message of PyTorch
    with pytest.raises(BackendUnavailable, match="out of memory"), use_backend(None):
        raise torch.OutOfMemoryError
    with pytest.raises(RuntimeError, match="something else"), use_backend(None):
        raise RuntimeError("something else")

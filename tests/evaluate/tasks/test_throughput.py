"""Requests served together on a CPU: rows, percentiles, and refusals of the engine."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from msattn.trainer import models
from msattn.trainer.config import EvalConfig, ThroughputConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks import throughput
from msattn.trainer.evaluate.tasks.throughput import ThroughputRun, measure
from tests.evaluate.runs import read_rows, timed_config

SETTINGS = ThroughputConfig(lengths=[96], requests=[1, 3], tokens=5, page_size=32, batch_tokens=64)


@pytest.mark.slow
def test_the_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = evaluate(
        timed_config(tmp_path, eval=EvalConfig(["throughput"], baselines=[], throughput=SETTINGS))
    )
    rows = list(read_rows(folder, "batch").values())
    assert [(row["method"], row["extra"]["batch"]) for row in rows] == [
        (method, requests)
        for requests in (1, 3)
        for method in (
            "dense, transformers",
            "dense, same engine",
            "gate_question, untrained + classifier, untrained",
        )
    ]
    for row in rows:
        extra = row["extra"]
        assert row["samples"] == extra["batch"]
        assert row["score"] == pytest.approx(5 * extra["batch"] / extra["seconds"])
        assert 0 < extra["first_token_p50_s"] <= extra["first_token_p99_s"] < extra["seconds"]
        is_dense = row["method"].startswith("dense")
        assert (row["sparsity"] is None) == (row["selectivity"] is None) == is_dense
        assert is_dense or (0 < row["sparsity"] < 1 and 0 < row["selectivity"] < 1), (
            "prompts and new tokens are sparse"
        )
        same = {
            each["method"]: each["score"]
            for each in rows
            if each["extra"]["batch"] == extra["batch"]
        }
        assert row["ratio_to_dense"] == pytest.approx(
            min(extra["times_transformers"], extra["times_same engine"])
        )
        assert extra["times_same engine"] == pytest.approx(
            row["score"] / same["dense, same engine"]
        )
    out, err = capfd.readouterr()
    assert "Requests served together: 1 to 3 requests per row" in out
    assert "ContinuousBatchingLogger" not in out + err


@pytest.mark.slow
def test_requests_wait_for_pages(tmp_path: Path) -> None:
    model = models.load(timed_config(tmp_path).model, device="cpu").model
    prompts = throughput.random_prompts(model, 4, 96, seed=0)
    done = measure(model, nullcontext, prompts, replace(SETTINGS, pages=6))
    assert sum(map(len, done.answers)) == 4 * 5
    assert done.first_tokens == sorted(done.first_tokens)
    with pytest.raises(UserError, match=r"eval\.throughput: the engine refused a request"):
        measure(model, nullcontext, prompts, replace(SETTINGS, pages=2))


def test_percentiles() -> None:
    run = ThroughputRun(
        seconds=2.0,
        answers=[[1] * 4, [2] * 6],
        first_tokens=[1.0, 2.0, 3.0, 4.0],
        peak_mb=0.0,
        stats={},
    )
    assert run.rate == 5
    assert [run.first_token(share) for share in (0.01, 0.5, 0.51, 0.99, 1.0)] == [
        1.0,
        2.0,
        3.0,
        4.0,
        4.0,
    ]

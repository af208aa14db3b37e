"""The comparison of speed: ``python -m msattn.trainer.serving.vllm.speed``."""

import json
from pathlib import Path

import pytest

from msattn.trainer.serving.vllm import speed
from tests.vllm.engines import EVERY_KEY, MODEL

OPTIONS = ("--length", "300", "--requests", "2", "--new", "4")


def test_both_engines_answer_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"enforce_eager": True, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.3}
    file = tmp_path / "figures.json"
    arguments = (str(MODEL), "--msattn", json.dumps(EVERY_KEY), "--engine", json.dumps(engine))
    speed.main([*arguments, *OPTIONS, "--json", str(file)])
    written = json.loads(file.read_text())
    assert (written["length"], written["requests"], written["new"]) == (300, 2, 4)
    dense, sparse = written["figures"]["vLLM"], written["figures"]["msattn"]
    assert dense.keys() == sparse.keys() == speed.FIGURES.keys()
    assert (sparse.pop("sparsity"), sparse.pop("selectivity")) == (0, 1)  # of all requests of both kinds alone
    assert dense.pop("sparsity") is dense.pop("selectivity") is None
    assert all(value > 0 for value in (*dense.values(), *sparse.values()))
    assert dense["first_token_p50_s"] <= dense["first_token_p99_s"]
    assert "2 requests of 300 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--msattn", "{"], "--msattn {: no JSON"),
        (["--msattn", "[1]"], "--msattn [1]: accepted is a JSON object"),
        (["--msattn", "{}", "--new", "1"], "--new=1: accepted are at least 2"),
        (["--msattn", "{}", "--length", "0"], "--length=0: accepted are at least 1"),
        (["--msattn", "{}", "--json", "/nowhere/figures.json"], "/nowhere/figures.json cannot be written"),
        (["--msattn", "{}", "--length", "5000"], "vLLM: "),  # the model has 4096 positions
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        speed.main([str(MODEL), *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

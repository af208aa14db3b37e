"""The comparison of next tokens: ``python docs/experiments/vllm_divergence.py``."""

import json
import re
from pathlib import Path

import pytest
import vllm_divergence as divergence

from msattn.trainer.errors import run_program
from tests.house.modules import ROOT
from tests.vllm.engines import MODEL

TEXT = str(ROOT / "kernels/types.py")
SPARSE = {"gate": "embedded", "qmodel": "embedded", "recent": 64, "dense_below": 0}
ENGINE = {"enforce_eager": True, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.3}
OPTIONS = ("--length", "1500", "--places", "5", "--msattn", json.dumps(SPARSE))


def test_divergence_of_a_cache_in_fp8(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "base.pt")

    def rows(*arguments: str, **engine: str) -> list[list[float]]:
        given = ("--engine", json.dumps(ENGINE | engine))
        divergence.main([str(MODEL), TEXT, *OPTIONS, *given, *arguments])
        # vLLM asks stdout for its descriptor, which capsys does not have
        lines = capfd.readouterr().out.splitlines()
        found = [line for line in lines if re.search("prompts|new tokens", line)]
        return [[float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?", line)] for line in found]

    assert rows("--save", file) == []
    for mean, largest, same, share in rows("--against", file):
        assert (mean, largest, same) == (0, 0, 1)
        assert 0 < share < 1
    for mean, largest, same, share in rows("--against", file, kv_cache_dtype="fp8"):
        assert 0 < mean < largest < 1
        assert same >= 0.8
        assert 0.1 < share < 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--places", "0"), "--places=0: expected at least 1"),
        (("--length", "320"), "--length=320: expected more than 64 tokens for each of the 5"),
        (("--length", "9000000"), f"text={TEXT}: it has "),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_program(lambda: divergence.main([str(MODEL), TEXT, *OPTIONS, *arguments]))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

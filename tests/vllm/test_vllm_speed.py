"""The comparison of speed: ``python docs/experiments/vllm_speed.py``."""

import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_speed as speed

from msattn.trainer.errors import Fault, UserError, run_program
from tests.house.modules import ROOT
from tests.vllm.engines import EVERY_KEY, MODEL, NO_DRAFTS

OPTIONS = ("--length", "300", "--requests", "3", "--new", "4", "--shared", "200")


def test_both_engines_answer_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {
        "enforce_eager": True,
        "max_num_batched_tokens": 256,
        "block_size": 64,
        "gpu_memory_utilization": 0.3,
        "skip_tokenizer_init": True,  # as it is by default
    }
    file = tmp_path / "figures.json"
    arguments = (str(MODEL), "--msattn", json.dumps(EVERY_KEY), "--engine", json.dumps(engine))
    speed.main([*arguments, *OPTIONS, "--json", str(file)])
    assert list(tmp_path.iterdir()) == [file]
    written = json.loads(file.read_text())
    assert (written["length"], written["requests"], written["new"], written["shared"]) == (
        300,
        3,
        4,
        200,
    )
    dense, sparse = written["figures"]["vLLM"], written["figures"]["msattn"]
    assert dense.keys() == sparse.keys() == speed.FIGURES.keys()
    # of all requests of both kinds alone
    assert (sparse.pop("sparsity"), sparse.pop("selectivity")) == (0, 1)
    assert dense.pop("sparsity") is dense.pop("selectivity") is dense.pop("shared_sparsity") is None
    assert sparse.pop("shared_sparsity") == 0
    assert dense.pop("accepted") is sparse.pop("accepted") is None  # there are no drafts
    # whole pages of the prefix alone
    assert dense["shared_cached"] == sparse["shared_cached"] == 192 / 300
    assert all(value > 0 for value in (*dense.values(), *sparse.values()))
    assert dense["first_token_p50_s"] <= dense["first_token_p99_s"]
    assert "3 requests of 300 tokens" in " ".join(capsys.readouterr().out.split())


@NO_DRAFTS
def test_drafts_of_a_text_are_counted(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.3, "speculative_config": drafts}
    file, text = tmp_path / "figures.json", ROOT / "kernels/types.py"
    given = {"msattn": EVERY_KEY, "engine": engine}
    arguments = [each for name, value in given.items() for each in (f"--{name}", json.dumps(value))]
    sizes = ("--length", "300", "--requests", "2", "--new", "16", "--text", str(text))
    speed.main([str(MODEL), *arguments, *sizes, "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert 0 < figures["vLLM"]["accepted"] == figures["msattn"]["accepted"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--msattn", "{"], "--msattn {: no JSON"),
        (["--msattn", "[1]"], "--msattn [1]: expected a JSON object"),
        (["--msattn", "{}", "--text", __file__], f"--text={__file__}: it has "),
        (["--msattn", "{}", "--new", "1"], "--new=1: expected at least 2"),
        (["--msattn", "{}", "--length", "0"], "--length=0: expected at least 1"),
        (
            ["--msattn", "{}", "--length", "64", "--shared", "64"],
            "--shared=64: expected 0 or, with at least 2 --requests",
        ),
        (
            ["--msattn", "{}", "--json", "/nowhere/figures.json"],
            "--json=/nowhere/figures.json: expected a file in a folder",
        ),
        (["--msattn", "{}", "--json", "/tmp"], "--json=/tmp: expected a file"),
        (["--msattn", "{}", "--length", "5000"], "vLLM: "),  # the model has 4096 positions
        (
            ["--msattn", "{}", "--engine", '{"enforce_eagre": true}'],
            "--engine=enforce_eagre: vLLM has no such parameter (did",
        ),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_program(lambda: speed.main([str(MODEL), *arguments]))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failed_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_measured", killed)
    arguments = [str(MODEL), "--msattn", "{}", "--json", str(tmp_path / "figures.json")]
    with pytest.raises(
        UserError,
        match=r"^vLLM: the engine's process ended, probably for lack of memory; a smaller --length",
    ):
        speed.main(arguments)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "figures.json").write_text("earlier")
    with pytest.raises(UserError):
        speed.main(arguments)
    assert (tmp_path / "figures.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("first\nsecond"), UserError, "first"),
        (OSError("no such model"), UserError, "no such model"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            UserError,
            "too little memory (CUDA out of memory); a smaller --length",
        ),
        (KeyError("tokens"), Fault, "KeyError: 'tokens'"),
    ],
)
def test_errors_of_the_engine(
    error: Exception, kind: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(speed, "measure", fail)
    found = pickle.loads(pickle.dumps(speed._measured()))
    assert type(found) is kind
    assert str(found).startswith(message)
    notes = getattr(found, "__notes__", [])
    assert ["in fail" in note and "raise error" in note for note in notes] == [True] * (
        kind is Fault
    )

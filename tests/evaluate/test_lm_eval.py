"""The model ``msattn`` of lm_eval's own command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import msattn
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import lm_eval
from msattn.trainer.models.loading import Loaded
from tests.evaluate.harness_tasks import log_likelihood, write_task
from tests.running import exit_code_of

TEXT = " ".join(["the river ran past an old mill and nobody knew where it came from"] * 40)
SERVED: dict[str, Any] = {"gate": "embedded", "select": "topk", "sparsity": 0.8, "dense_below": 0}


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a task of one request; returns its log-likelihood, and the results' record of the
    model.
    """
    write_task(folder, "river", [{"text": TEXT, "target": " whence"}], output_type="loglikelihood")

    def run(**arguments: Any) -> tuple[float, dict[str, Any]]:
        model = ",".join(
            f"{name}={value}"
            for name, value in ({"pretrained": EMBEDDED_MODEL} | arguments).items()
        )
        out = folder.parent / "out"
        words = [
            "--model",
            "msattn",
            "--model_args",
            model,
            "--tasks",
            "river",
            "--include_path",
            str(folder),
        ]
        words += ["--device", "cpu", "--output_path", str(out), "--log_samples"]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        lm_eval.main()
        (samples,), (results,) = out.rglob("samples_*.jsonl"), out.rglob("results_*.json")
        return float(json.loads(samples.read_text())["filtered_resps"][0][0]), json.loads(
            results.read_text()
        )["config"]

    return run


@pytest.mark.slow
def test_a_task_is_answered_as_by_attach(run) -> None:
    found, record = run(**SERVED)
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL)
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    prompt = tokenizer(TEXT).input_ids
    tokens = tokenizer(f"{TEXT} whence").input_ids
    with msattn.attach(model, **SERVED) as sparse:
        expected = log_likelihood(Loaded(model, tokenizer, {}), tokens, len(prompt))
    assert found == pytest.approx(expected, abs=1e-3)
    assert found != pytest.approx(
        log_likelihood(Loaded(model, tokenizer, {}), tokens, len(prompt)), abs=1e-3
    )
    assert record["msattn"]["sparsity"] == pytest.approx(sparse.stats()["sparsity"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gate": "nowhere"}, "artifact nowhere: no such folder"),
        ({"gate": "embedded", "sparsity": 2}, r"sparsity=2: expected a number in \[0, 1\)"),
        ({"gate": "embedded", "batch_size": "auto"}, "--batch_size=auto: expected 1"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], says: str) -> None:
    from lm_eval.api.registry import get_model

    lm_eval.register()
    with pytest.raises(UserError, match=says):
        get_model("msattn").create_from_arg_obj(
            {"pretrained": str(EMBEDDED_MODEL), "device": "cpu"} | arguments
        )


def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    monkeypatch.setattr(lm_eval, "register", lm_eval.register.__wrapped__)
    assert exit_code_of(lm_eval.main) == 2
    assert capsys.readouterr().err.startswith(
        "msattn: lm_eval is not installed; pip install 'msattn[harness]'"
    )

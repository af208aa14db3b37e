"""``msattn demo`` end to end on a random model, and ``msattn generate`` with its artifacts."""

import json
from pathlib import Path

import pytest

from tests.running import TEXTS, exit_code, write_texts

SMALL = [
    "model.init=random",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.head_dim=16",
    "data.seq_len=512",
    "model.presets.num_buckets=4",
    "model.presets.long_range=16",
    "model.presets.qmodel_hidden=16",
    "model.presets.qmodel_steps=4",
    "model.presets.gate_steps=2",
    "model.presets.gate_batch=1",
    "model.presets.kmeans_prompts=2",
    "model.presets.qmodel_prompts=2",
    "model.presets.recent=32",
    "model.presets.eval_chunks=1",
    "model.presets.needle_samples=1",
    "model.presets.eval_probes=[0,1]",
    "device=cpu",
    *TEXTS,
]


@pytest.mark.slow
def test_demo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts()
    assert exit_code("demo", *SMALL) == 0
    out = capsys.readouterr().out
    folder = Path("outputs/tiny/demo")
    assert str(folder / "eval/report.html") in out
    assert "<svg" in (folder / "eval/report.html").read_text(encoding="utf-8")
    rows = json.loads((folder / "eval/results.json").read_text())["rows"]
    assert {row["task"] for row in rows} == {"perplexity", "recall", "needle"}
    assert {"dense", "gate_question", "gate", "quest", "vertical_slash", "mean_pool"} <= {row["method"] for row in rows}
    assert "One of the needle prompts" in out
    answers = out.partition("One of the needle prompts")[2].splitlines()
    assert {"dense", "gate_question", "quest"} <= {line.partition(" ")[0] for line in answers}
    assert not any(line.startswith("gate ") for line in answers), "another way to use the gate is no method of its own"
    assert "The hidden token for" in out
    made = (folder / "kmeans/manifest.json").read_bytes()

    assert exit_code("generate", "name=demo", *SMALL, "--prompt", "def main():\n    return 1\n" * 40, "max_new_tokens=4") == 0
    out = capsys.readouterr().out
    assert "tokens are equal" in out
    assert "selectivity" in out

    fit_again = ("fit-kmeans", "experiment=demo", *SMALL, "data.seq_len=256")
    assert exit_code(*fit_again) == 0, "the commands of a second demo replace the artifacts of the first"
    assert (folder / "kmeans/manifest.json").read_bytes() != made

"""``msattn demo`` end to end on a random model, and ``msattn generate`` with its artifacts."""

import json
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands import demo
from tests.commands.conftest import Refused, Run
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
    assert {"dense", "gate_question", "gate", "quest", "vertical_slash", "mean_pool"} <= {
        row["method"] for row in rows
    }
    assert "One of the needle prompts" in out
    answers = out.partition("One of the needle prompts")[2].splitlines()
    assert {"dense", "gate_question", "quest"} <= {line.partition(" ")[0] for line in answers}
    assert not any(line.startswith("gate ") for line in answers), (
        "another way to use the gate is no method of its own"
    )
    assert "The hidden token for" in out
    made = (folder / "kmeans/manifest.json").read_bytes()

    assert (
        exit_code(
            "generate",
            "name=demo",
            *SMALL,
            "--prompt",
            "def main():\n    return 1\n" * 40,
            "max_new_tokens=4",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "tokens are equal" in out
    assert "selectivity" in out

    fit_again = ("fit-kmeans", "experiment=demo", *SMALL, "data.seq_len=256")
    assert exit_code(*fit_again) == 0, (
        "the commands of a second demo replace the artifacts of the first"
    )
    assert (folder / "kmeans/manifest.json").read_bytes() != made


@pytest.fixture
def launched(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The steps that a demo starts, which do nothing, with their last override."""
    steps: list[tuple[str, str]] = []

    def launch(command: str, overrides: list[str]) -> list[Path]:
        steps.append((command, overrides[-1]))
        if interrupts and command == interrupts[-1]:
            interrupts.pop()
            raise KeyboardInterrupt("stopped after step 2; resume=true continues from there")
        return [Path(command)]

    interrupts = ["fit-kmeans"]
    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setattr(demo, "_speed", lambda cfg: 0.5)
    return steps


def test_a_demo_says_what_it_will_do_and_continues_after_an_interruption(
    launched: list[Any], msattn: Run
) -> None:
    steps = "steps=train-gate,train-qmodel,fit-kmeans"
    code, out, err = msattn("demo", steps)
    whole = sum(demo.PASSES[name] for name in ("train-gate", "fit-kmeans", "train-qmodel")) // 2
    assert out.startswith(
        f"msattn demo: 3 steps on tiny, about {whole // 60}:{whole % 60:02} on this machine\n"
    )
    assert [line.split()[0] for line in out.splitlines()[1:] if " about " in line] == [
        "train-gate",
        "fit-kmeans",
        "train-qmodel",
    ]
    assert code == 130
    assert (
        err
        == "msattn: interrupted: stopped after step 2; the same command with resume=true continues "
        "the demo\n"
    )
    code, out, err = msattn("demo", steps, "resume=true")
    assert (code, err) == (0, "")
    assert out.startswith("msattn demo: 2 steps on tiny, about ")
    assert [name for name, _ in launched] == [
        "train-gate",
        "fit-kmeans",
        "fit-kmeans",
        "train-qmodel",
    ]
    assert launched[2:] == [("fit-kmeans", "resume=true"), ("train-qmodel", "experiment=demo")]
    assert msattn("demo", steps, "resume=true", "seed=1")[0] == 2
    assert msattn("demo", steps)[0] == 0
    assert [name for name, _ in launched[4:]] == ["train-gate", "fit-kmeans", "train-qmodel"], (
        "without resume=true, all again"
    )


def test_steps_of_a_demo_can_be_left_out(
    launched: list[Any], msattn: Run, refused: Refused
) -> None:
    assert msattn("demo", "steps=[train-gate]", "train.steps=3")[0] == 0
    assert [name for name, _ in launched] == ["train-gate"]
    for steps, message in {
        "train": "steps=train: expected train-gate, fit-kmeans, train-qmodel, eval",
        "[]": "steps=[]: expected one or more of train-gate",
        "[train-qmodel]": "steps=train-qmodel: train-qmodel needs fit-kmeans, as "
        "outputs/tiny/demo has no k-means",
    }.items():
        refused(message, "demo", f"steps={steps}")

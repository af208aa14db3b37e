"""Whatever configuration, tokenizer and files decide is refused before a command reads weights,
which may take minutes.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.models import EMBEDDED, loading
from msattn.trainer.mta import train_mta
from msattn.trainer.storage.parts import FinishedParts
from msattn.trainer.training.checkpoints import TrainingResult, mark_complete
from tests.commands.conftest import Run

# an artifact of the embedded model does not fit it
OTHER = ["--model", "wide", "device=cpu", "tracker=none"]
OWN = ["--model", "own", "device=cpu", "tracker=none"]
LONG = "a b c d e f g h " * 1000
TEXT = ["--data", "short.txt"]
GATE, KMEANS = f"artifacts.gate={SHIPPED / 'gate'}", f"artifacts.kmeans={SHIPPED / 'kmeans'}"
RECALL = [
    "eval=recall",
    "eval.recall.length=512",
    "data.heldout_path=long.txt",
    "select=calibrated",
]
WIDE = "artifact made for .*: its num_heads is 4, this model's is 8"
SHORT = "documents of data.path=short.txt hold only"
CASES = {
    "a prompt": (["generate", *OWN, "select=quest", "--prompt", LONG], "the prompt's 8.* tokens "
    "and max_new_tokens=64"),
    "a first message": (["generate", *OWN, "select=quest", "--chat", "--prompt", LONG],
        "the conversation's 8.* tokens"),
    "a gate": (["generate", *OTHER, GATE, "--prompt", "a"], f"gate {WIDE}"),
    "a budget": (["generate", *OWN, "artifacts.qmodel=quest", "select=quest", "probes=9999",
        "--prompt", "a"], "probes=9999"),
    "a chat template": (["generate", *OWN, "select=quest", "chat=true", "--prompt", "a"],
        "the tokenizer has no chat template"),
    "requests": (["serve", *OWN, "dense=true", "server.max_length=99999"],
        "server.max_length=99999: the model has positions"),
    "pages": (["serve", *OWN, "select=quest", "server.pages=2"], "server.pages=2: a request of "
    "4096 tokens takes"),
    "a gate to serve": (["serve", *OTHER, GATE], f"gate {WIDE}"),
    "positions": (["train-gate", *OWN, *TEXT, "data.seq_len=5000"], "seq_len=5000: the model has "
    "positions for 4096"),
    "text": (["train-gate", *OWN, *TEXT], f"data.seq_len=2048: the {SHORT}"),
    "a schedule": (["train-gate", *OWN, *TEXT, "train.schedule=sometimes"],
        "train.schedule=sometimes: expected linear"),
    "warmup": (["train-gate", *OWN, *TEXT, "train.warmup_steps=101", "train.steps=9"],
        "train.warmup_steps=101: expected"),
    "buckets": (["fit-kmeans", *OWN, *TEXT, "data.seq_len=16", "kmeans.num_buckets=9999"],
        "num_buckets=9999: expected at"),
    "a k-means": (["train-qmodel", *OTHER, *TEXT, KMEANS], f"kmeans {WIDE}"),
    "queries": (["train-qmodel", *OWN, *TEXT, KMEANS], SHORT),
    "a gate to train": (["finetune", *OTHER, *TEXT, GATE], f"gate {WIDE}"),
    "a length": (["finetune", *OWN, *TEXT, "select.sparsity=0", "data.seq_len=5000"],
        "seq_len=5000: the model has positions"),
    "perplexity": (["eval", *OWN, *TEXT, "eval=perplexity"], f"the held-out {SHORT}"),
    "recall": (["eval", *OWN, *TEXT, "eval=recall"], f"the held-out {SHORT}"),
    "needles": (["eval", *OWN, *TEXT, "eval=needle", "eval.needle.lengths=[24]"],
        r"eval.needle.lengths=24: "),
    "prompts": (["eval", *OWN, "eval=prompts", "eval.prompts.path=long.jsonl"], "prompt 1 of "
    "long.jsonl, with 8.* tokens"),
    "calibration": (["eval", *OWN, *TEXT, *RECALL], f"the {SHORT}"),
    "artifacts": (["eval", *OTHER, *TEXT, "eval=needle", GATE], f"gate {WIDE}"),
}  # fmt: skip


SMALL = [*OWN, "--data", "long.txt", "data.heldout_path=held.txt", "data.seq_len=64"]
# commands, and the folder of their checkpoints
TRAININGS = {
    "train-gate": (["train-gate", *SMALL], "own/base/runs/gate"),
    "train-gate gate=decode": (["train-gate", *SMALL, "gate=decode"], "own/base/runs/decode_gate"),
    "train-qmodel": (["train-qmodel", *SMALL, KMEANS], "own/base/runs/qmodel/layers_0"),
    "finetune": (["finetune", *SMALL, "select.sparsity=0"], "own/finetuned/runs/finetune"),
    "train-mta": (["train-mta", "device=cpu", "tracker=none"], "mta/base/runs/solver"),
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights fails."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(loading, "_pretrained", refuse)
    monkeypatch.setattr(train_mta, "_train", refuse)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.usefixtures("no_weights")
def test_checkpoints_are_kept_or_continued(
    name: str, here: Path, msattn: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, folder = TRAININGS[name]
    shutil.copytree(EMBEDDED, here / "own")
    (here / "long.txt").write_text(LONG)
    (here / "held.txt").write_text("held out text " * 1000)
    checkpoints = here / "outputs" / folder / "checkpoints"
    (checkpoints / "checkpoint-7").mkdir(parents=True)
    result = TrainingResult(7, 0.0, {}, {})
    mark_complete(checkpoints / "checkpoint-7", {"train.lr": 99, "seed": 0}, result)
    code, _, err = msattn(*arguments)
    assert (code, err.splitlines()[-1].endswith(
        f"{folder}/checkpoints: an earlier run was trained to step 7; resume=true continues it, "
        f"overwrite=true starts again, another name= keeps both"
    )) == (2, True), err  # fmt: skip
    if name != "train-qmodel":  # its settings are those of finished layers
        code, _, err = msattn(*arguments, "resume=true", "train.lr=0.5")
        assert code == 2
        assert f"resume=true: the run in outputs/{folder}/checkpoints has train.lr=99, not" in err
    with pytest.raises(AssertionError, match="the weights are read"):
        msattn(*arguments, "overwrite=true")
    assert "starts again; outputs" in capsys.readouterr().err
    assert (checkpoints / "checkpoint-7" / "complete.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["fit-kmeans", "kmeans.num_buckets=8"], "kmeans/layers"),
        (["train-qmodel", KMEANS], "qmodel/layers"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_finished_parts_are_kept(
    arguments: list[str], folder: str, here: Path, msattn: Run
) -> None:
    shutil.copytree(EMBEDDED, here / "own")
    (here / "long.txt").write_text(LONG)
    (here / "held.txt").write_text("held out text " * 1000)
    parts = FinishedParts(here / "outputs/own/base/runs" / folder, {"seed": 3}, replace=False)
    parts.save("layer_000", {})
    for resume in ([], ["resume=true"], ["resume=true", "overwrite=true"]):
        code, _, err = msattn(*arguments, *SMALL, *resume)
        assert code == 2
        assert "use the same settings, or overwrite=true without resume=true to start again" in err
    with pytest.raises(AssertionError, match="the weights are read"):
        msattn(*arguments, *SMALL, "overwrite=true")
    assert "layer_000" in parts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("no_weights")
def test_is_refused_before_weights_are_read(name: str, here: Path, msattn: Run) -> None:
    shutil.copytree(EMBEDDED, here / "own")
    shutil.copytree(EMBEDDED, here / "wide")
    config = json.loads((here / "wide" / "config.json").read_text())
    (here / "wide" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    (here / "short.txt").write_text("word " * 99)
    (here / "long.txt").write_text(LONG)
    (here / "long.jsonl").write_text(json.dumps({"prompt": LONG, "answer": "a"}))
    arguments, message = CASES[name]
    code, _, err = msattn(*arguments)
    assert code == 2
    assert re.search(message, err.splitlines()[-1])

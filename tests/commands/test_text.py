"""Text of training commands: it is chosen, it is apart from held-out text, and repeats are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.config import RunConfig
from msattn.trainer.data import cache
from tests.commands.conftest import Run
from tests.running import SMALL, write_texts

TRAINING = [
    name
    for name, command in COMMANDS.items()
    if command.trains and issubclass(command.schema, RunConfig)
]
SHORT = [*SMALL, "name=new", "train.batch_size=1"]
DENSE = {"finetune": ["select.sparsity=0"]}
Told = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def told(here: Path, msattn: Run) -> Told:
    """Runs a command in a folder with texts; returns its exit code and its own lines of stderr."""
    write_texts()
    Path("overlap.txt").write_text(Path("heldout.txt").read_text() + Path("text.txt").read_text())

    def run(*arguments: str) -> tuple[int, list[str]]:
        code, _, error = msattn(*arguments)
        assert "Traceback" not in error
        return code, [line for line in error.splitlines() if line.startswith("msattn: ")]

    return run


@pytest.mark.parametrize("command", TRAINING)
def test_a_large_model_has_no_default_text(command: str, told: Told) -> None:
    code, lines = told(command, "model=llama3", *DENSE.get(command, []))
    ways = (
        "--data FILE, data=text data.path=FILES, data=hub data.path=OWNER/NAME, or data=stdlib "
        "(Python's library)"
    )
    assert (code, lines[-1]) == (
        2,
        f"msattn: data=by_model: choose the text on which model=llama3 trains: {ways}",
    )
    assert list(Path().glob("outputs")) == []


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_suggested_commands_leave_room_for_a_text(command: str) -> None:
    cfg: Any = compose(command, ["model=llama3"])
    assert cfg.arguments("base") == "model=llama3 --data FILE"
    cfg = compose(command, ["model=llama3", "model.init=random"])
    assert cfg.arguments("base") == "model=llama3"


@pytest.mark.parametrize(
    "choice",
    [
        ["data=stdlib"],
        ["data=text", "data.path=a.txt"],
        ["data=hub", "data.path=a/b"],
        ["model.init=random"],
    ],
)
def test_a_choice_is_enough(choice: list[str]) -> None:
    compose("train-gate", ["model=llama3", *choice]).check_text()


def test_commands_that_do_not_train_need_no_choice() -> None:
    assert compose("eval", ["model=llama3"]).data.is_library
    assert compose("generate", ["model=llama3"]).data.is_library


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["train-gate"],
        ["finetune", *DENSE["finetune"]],
        *(["eval", f"eval.tasks=[{task}]"] for task in ("perplexity", "documents")),
    ],
)
def test_overlapping_held_out_text_is_refused(command: list[str], told: Told) -> None:
    code, lines = told(*command, *SMALL, "data.heldout_path=overlap.txt")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("msattn: data.heldout_path=overlap.txt: ")
    assert "compared passages of 200 characters are also in data.path=text.txt" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["needle", "ruler"])
def test_evaluation_refuses_a_haystack_of_training_text(task: str, told: Told) -> None:
    given = [*SMALL, f"eval.tasks=[{task}]", "eval.baselines=[]", "data.heldout_path=heldout.txt"]
    code, lines = told("eval", *given, f"eval.{task}.haystack=overlap.txt")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"msattn: eval.{task}.haystack=overlap.txt: ")
    assert "compared passages of 200 characters are also in data.path=text.txt" in lines[0]
    # Held-out text that no task reads does not count.
    code, lines = told(
        "eval", *given[:-1], f"eval.{task}.haystack=text.txt", "data.heldout_path=overlap.txt"
    )
    assert lines[0].startswith(f"msattn: eval.{task}.haystack=text.txt: ")


def test_ignored_held_out_text_is_refused(told: Told) -> None:
    code, lines = told("train-gate", "data.heldout_path=heldout.txt")
    assert (code, lines) == (
        2,
        ["msattn: data.heldout_path=heldout.txt: only data=text reads it; this is data=stdlib"],
    )


@pytest.mark.slow
def test_more_than_three_passes_and_cached_tokens_are_told(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_SECONDS", 0.0)
    few = [
        *SHORT,
        "data.heldout_path=heldout.txt",
        "data.num_chunks=2",
        "gate.target=mass",
        "gate.mean_weight=0",
    ]
    code, lines = told("train-gate", *few, "train.steps=7")
    warning = (
        "msattn: warning: training reads the 2 chunks of the documents of "
        "data.path=text.txt 3.5 times; beyond 3 times, "
    )
    assert code == 0
    assert sum(line.startswith(warning) for line in lines) == 1
    assert sum(" are kept in outputs/tokens/" in line for line in lines) == 2
    code, lines = told("train-gate", *few, "train.steps=6", "overwrite=true")
    assert (code, lines) == (0, [])

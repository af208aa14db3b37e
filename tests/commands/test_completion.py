"""Completion of groups, keys and values; tests/commands/test_cli.py runs it through a shell's
interface.
"""

from pathlib import Path

import pytest

from msattn.trainer.commands.completion import complete, complete_model
from msattn.trainer.config import POLICIES, TASKS
from msattn.trainer.config.values import DTYPES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "incomplete", "expected"),
    [
        ("train-gate", "gate.loss=", ["gate.loss=mse", "gate.loss=kl", "gate.loss=smooth_l1"]),
        ("train-gate", "gate.loss=mse,k", ["gate.loss=mse,kl"]),
        ("train-gate", "gate.q_pool=[avg,m", ["gate.q_pool=[avg,max", "gate.q_pool=[avg,min"]),
        ("train-gate", "overwrite=t", ["overwrite=true"]),
        ("train-gate", "dtype=", [f"dtype={each}" for each in DTYPES]),
        ("train-gate", "trai", ["train.", "train="]),
        ("train-gate", "train.st", ["train.steps="]),
        ("train-gate", "train.lr=", []),
        ("train-gate", "nothing=", []),
        ("eval", "select.policy=", [f"select.policy={each}" for each in POLICIES]),
        ("eval", "eval.tasks=", [f"eval.tasks=[{each}" for each in TASKS]),
        ("bench", "op=conv", ["op=conv_attention", "op=conv_decode"]),
    ],
)
def test_values_and_names(command: str, incomplete: str, expected: list[str]) -> None:
    assert complete(command, [], incomplete) == expected


@pytest.mark.slow
def test_words_before_decide_which_keys_there_are() -> None:
    assert complete("eval", ["select=nucleus"], "select.ma") == ["select.mass="]
    assert complete("eval", [], "select.ma") == []
    assert complete("eval", ["selct=nucleus"], "select.sp") == ["select.sparsity="], (
        "a mistake before is ignored"
    )


def test_the_only_section_is_opened() -> None:
    assert "model.presets.recent=" in complete("eval", [], "model.pr")


def test_models_and_folders(here: Path) -> None:
    (here / "llama-own").mkdir()
    (here / "llama.txt").touch()
    assert complete_model("llama") == ["llama3", "llama31_8b_instruct", "llama3_8b", "llama-own/"]
    assert complete_model("./") == ["./llama-own/"]

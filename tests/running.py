"""Commands that run in the process of the tests: what they read, and what they log."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msattn import cli

SHAPE = [  # of a model that trains and answers in seconds
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=8",
]
TEXTS = ["data=text", "data.path=text.txt", "data.heldout_path=heldout.txt"]  # those of write_texts
# enough that RULER can draw its 500
WORDS = " ".join(map("".join, itertools.product("aeiou", "lmnrst", "aeiou", "lmnrst")))


def exit_code_of(program: Callable[[], object]) -> int:
    """Returns the exit code with which a program ends this process."""
    with pytest.raises(SystemExit) as ended:
        program()
    return int(ended.value.code or 0)


def exit_code(*arguments: str) -> int:
    """Runs ``msattn *arguments`` and returns its exit code."""
    return exit_code_of(lambda: cli.main(list(arguments)))


def succeed(*arguments: str) -> None:
    """Runs ``msattn *arguments``, which ends with exit code 0."""
    assert exit_code(*arguments) == 0


def write_texts(functions: int = 1000) -> None:
    """Writes ``text.txt`` and ``heldout.txt``, different code of that many functions, into the
    working directory.
    """
    Path("text.txt").write_text(
        "\n".join(f"def function_{i}(x):\n    return x + {i}" for i in range(functions))
    )
    Path("heldout.txt").write_text(
        "\n".join(f"def method_{i}(y):\n    return y - {i}" for i in range(functions))
    )


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of ``metrics.jsonl``, which are JSON without its extensions NaN and
    Infinity.
    """

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


SMALL = [
    "model.init=random",
    "model.architecture.num_hidden_layers=2",
    "tracker=none",
    "device=cpu",
    "data=text",
    "data.path=text.txt",
    "data.seq_len=128",
]
SMALL_EVAL = [
    *SMALL,
    "eval=recall",
    "eval.baselines=[random]",
    "eval.recall.num_chunks=1",
    "eval.recall.num_queries=4",
]
SMALL_EVAL += ["eval.recall.length=128", "recent=16", "eval.recall.probes=[1]"]


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Returns True as soon as ``condition()`` is true, or False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True

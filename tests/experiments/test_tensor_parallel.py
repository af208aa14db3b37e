"""The recipe that measures tensor parallelism, on four ranks: the answers of one process, whole or
sparse, by both engines.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel

from tests.factory import tiny_model
from tests.jobs import Job, prepare

SCRIPT = """
from msattn.trainer.errors import run_program
from tensor_parallel import main
run_program(main)
"""
NEW = 8
SIZES = [
    *(
        "device=cpu",
        "tracker=none",
        "select.sparsity=0.5",
        "probes=1",
        "model.presets.num_buckets=8",
    ),
    *("model.presets.qmodel_hidden=16", "model.presets.recent=31", "eval.throughput.lengths=[200]"),
    *(
        "eval.throughput.requests=[2]",
        f"eval.throughput.tokens={NEW}",
        "eval.throughput.batch_tokens=160",
    ),
]


def arguments(folder: Path, engine: str, **shape: int) -> list[str]:
    """Saves a small model of 8 query heads in ``folder`` and returns the recipe's arguments."""
    tiny_model(num_attention_heads=8, **shape).save_pretrained(folder / "weights")
    paths = ["model=llama3", f"model.path={folder / 'weights'}", f"outputs={folder / 'outputs'}"]
    return ["--engine", engine, *paths, *SIZES]


@pytest.mark.slow
@pytest.mark.parametrize("engine", tensor_parallel.ENGINES)
def test_four_ranks_answer_as_one_process(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()
    called = arguments(tmp_path, engine, num_key_value_heads=4)
    monkeypatch.setattr("sys.argv", ["tensor_parallel", *called])
    tensor_parallel.main()
    printed = Job(SCRIPT, tmp_path, *called, processes=4).output()
    lines = [line for line in printed.splitlines() if line.startswith("attention ")]
    assert [line.split("  ")[0] for line in lines] == [
        "attention dense",
        "attention sparse",
        "attention every key",
    ]
    whole, divided = (_rows(tmp_path, engine, ranks) for ranks in (1, 4))
    assert [row["tokens"] for row in divided] == [row["tokens"] for row in whole]
    answers = 1 if engine == "generate" else 2
    assert divided[2]["equal"] == [NEW] * answers
    assert sum(divided[1]["equal"]) < NEW * answers, "the sparse answers are dense attention's"


def _rows(folder: Path, engine: str, ranks: int) -> list[dict[str, Any]]:
    return json.loads(
        (folder / f"outputs/llama3/base/tensor_parallel/{engine}-{ranks}.json").read_text()
    )


@pytest.mark.slow
def test_more_ranks_than_key_heads_are_refused_in_one_line(tmp_path: Path) -> None:
    job = Job(
        SCRIPT, tmp_path, *arguments(tmp_path, "generate", num_key_value_heads=2), processes=4
    )
    assert job.wait() == 2
    lines = {
        line
        for line in job.err.read_text().splitlines()
        if line.startswith(("msattn:", "Traceback"))
    }
    assert lines == {
        "msattn: model: divided among 4 ranks; expected a number that divides its 2 key/value heads"
    }

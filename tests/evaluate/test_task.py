"""The records of tasks, and the names of results that depend on them."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

from msattn.trainer.config import TASKS, EvalConfig
from msattn.trainer.evaluate import tasks
from msattn.trainer.evaluate.report.tables import COMMON_COLUMNS
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.run import summary
from msattn.trainer.evaluate.task import lengths_of, task_of
from msattn.trainer.methods.base import DENSE


def test_every_module_with_a_record_has_a_section() -> None:
    modules = {
        each.name: import_module(f"{tasks.__name__}.{each.name}")
        for each in iter_modules(tasks.__path__)
    }
    assert {name for name, module in modules.items() if hasattr(module, "TASK")} == {*TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_a_record_fits_its_section(name: str) -> None:
    """The evaluation reads these keys of a task whose record says that it has them."""
    task, section = task_of(name), getattr(EvalConfig(), name)
    assert (task.text == "haystack") == hasattr(section, "haystack")
    if task.text:
        assert lengths_of(section)
        assert "blocks" not in task.reads or section.sparsities
    assert {*task.hidden} <= {*COMMON_COLUMNS}
    # a perplexity is no share
    assert task.quality is None or ("%" in task.form) == (task.quality.better == 1)


def test_a_summary_keeps_lengths_batches_and_benchmarks_apart() -> None:
    sizes = [
        ("perplexity", {"length": 64}, "perplexity/dense"),
        ("needle", {"length": 64}, "needle/64/dense"),
        ("decoding", {"length": 64, "batch": 1}, "decoding/64/dense"),
        ("decoding", {"length": 64, "batch": 2}, "decoding/64x2/dense"),
        ("harness", {"benchmark": "a"}, "harness/a/dense"),
        ("harness", {"benchmark": "a", "length": 64}, "harness/a/64/dense"),
    ]
    rows = [EvalRow(task, DENSE, Setting(), 0.5, "score", extra=extra) for task, extra, _ in sizes]
    assert summary(rows, EvalConfig()) == {name: 0.5 for _, _, name in sizes}

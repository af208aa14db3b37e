"""The record of a task: its inputs, and how its rows are shown and judged. Each module of ``tasks``
has one, ``TASK``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.intervals import Interval
from msattn.trainer.evaluate.row import EvalRow

Column = tuple[str, str]  # a field of a row or of its ``extra``, and its format
# difference of two rows, and its interval; None for a single sample
Difference = tuple[float, Interval | None]

SECONDS = "seconds"  # a format: milliseconds below one second
SPEEDUP = "x "  # start of the columns of speed-ups
# Columns of several tasks.
SHARE, BOUNDS, RATIO = ("score", "{:.1%}"), ("interval", "{:.0%}"), ("ratio_to_dense", "{:.3f}")
LENGTH = ("length", "{:,}")
BATCH = ("batch", "{}")
RATE = ("score", "{:.4g}")
NAME = ("score_name", "{}")
TOKENS, ERROR = {"tokens": LENGTH}, {"output error": ("output_error", "{:.4f}")}
SPEEDUPS = {SPEEDUP: ("times_", "{:.2f}")}  # a column for each dense method


class Quality(NamedTuple):
    """A measure by which the verdict judges methods; by default the score, a share where larger is
    better.
    """

    name: str
    # between two rows of the same samples, absolute or relative
    difference: Callable[[EvalRow, EvalRow], Difference]
    better: int = 1  # 1 if larger values are better, else -1
    value: Callable[[EvalRow], float] = lambda row: row.score
    form: str = ".1%"  # format of the value


@dataclass(frozen=True, kw_only=True)
class Task:
    """Facts of a task for the evaluation and its report. Its settings are the section
    ``eval.<name>`` of the configuration.

    Attributes
    ----------
    heading, unit : title of its table, and what a row averages over; in braces a key of the first
        row's ``extra``.
    columns : columns of its table between ``setting`` and those that all tasks have.
    reads : ``blocks`` if it measures block selections, ``routings`` if it measures bucket routings;
        artifacts that no task reads are not looked for.
    text : ``heldout``: it always reads the held-out documents. ``haystack``: it reads the text of
        its key ``haystack``, or else the held-out documents. ``pretrained``: it reads the held-out
        documents if ``model.init=pretrained``. None: it reads no text of ``data``.
    files : keys of its section that name files of questions.
    form : format of a score beside that of another evaluation.
    hidden : columns of all tasks that its table leaves out, as its own columns have them.
    timed : whether its score is a time or a rate, which says nothing about other machines.
    fits_positions : whether its lengths, with the new tokens of its key ``tokens``, may not exceed
        the model's positions.
    samples : returns the prompts or chunks of each length, given its section, if each takes about
        a pass of a method over it; None: the time of the task is not estimated.
    scored : whether, besides, the predictions of all tokens are compared with dense ones, after
        another pass, which measures the recall.
    quality : how the verdict judges it; None: not at all.
    """

    heading: str
    unit: str
    columns: Mapping[str, Column]
    reads: tuple[Literal["blocks", "routings"], ...] = ("blocks", "routings")
    text: Literal["heldout", "haystack", "pretrained"] | None = None
    files: tuple[str, ...] = ()
    form: str = "{:.1%}"
    hidden: tuple[str, ...] = ()
    timed: bool = False
    fits_positions: bool = True
    samples: Callable[[Any], int] | None = None
    scored: bool = False
    quality: Quality | None = None


def task_module(name: str) -> Any:
    """Returns the module of a task; :mod:`msattn.trainer.evaluate.tasks` says what it has."""
    return import_module(f"msattn.trainer.evaluate.tasks.{name}")


def task_of(name: str) -> Task:
    """Returns the record of a task."""
    return task_module(name).TASK


def prepare(cfg: EvalRunConfig, model: Any) -> dict[str, Any]:
    """Returns what the tasks of ``cfg`` read before the weights of ``model``, described or loaded,
    by task.
    """
    modules = {task: task_module(task) for task in cfg.eval.tasks}
    return {
        task: module.prepare(cfg, model)
        for task, module in modules.items()
        if hasattr(module, "prepare")
    }


def lengths_of(section: Any) -> list[int]:
    """Returns the lengths of the prompts or chunks of a task with this section of ``eval``; none if
    it has no such key.
    """
    one = [section.length] if hasattr(section, "length") else []
    return getattr(section, "lengths", one)

"""Finds and loads tasks of EleutherAI's lm_eval, and refuses those that cannot be measured before
anything is measured.
"""

import logging
import random
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.config.values import nearest, shown
from msattn.trainer.data.chunking import end_of_text
from msattn.trainer.data.hub import PARQUET_BRANCH, load_failures
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.chat import around_prompt
from msattn.trainer.models.families import check_length
from msattn.trainer.models.loading import Described, Loaded

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

INSTALL = "pip install 'msattn[harness]'"
PARQUET = (
    "a task in eval.harness.include_path can read its parquet files (dataset_path: parquet), or "
    f"the Hub's parquet copy, if there is one (revision: {PARQUET_BRANCH} in dataset_kwargs)"
)
BABILONG = "babilong"  # start of the names of tasks that take one length, as text


class TaskSamples(NamedTuple):
    """The numbers of the ``samples`` of a task that are measured: all have ``length`` tokens if the
    task makes such prompts.

    ``benchmark`` is the name of the task, and of their bin if there are bins.
    """

    name: str
    task: Any
    samples: list[int]
    length: int | None
    benchmark: str


def load_samples(cfg: EvalRunConfig, model: Described | Loaded) -> list[TaskSamples]:
    """Returns the samples of ``eval.harness.tasks``, by task and length, with their data.

    Raises UserError if lm_eval is not installed, a length exceeds the model's positions, a task is
    unknown or damaged, its data are not available or need their own code, it runs code written by
    the model, it needs images, or the tokenizer lacks an end-of-text token or a requested chat
    template.
    """
    settings = cfg.eval.harness
    for length in settings.lengths:
        check_length(model.config, length, f"eval.harness.lengths={length}")
    around_prompt(model.tokenizer, cfg.chat)
    end_of_text(model.tokenizer, "eval.harness")
    try:
        import lm_eval.tasks  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"eval=harness: needs lm_eval; {INSTALL} ({error})") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(cfg.seed)  # tasks that make their prompts draw from the global generators
    np.random.seed(cfg.seed)
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        model.tokenizer.save_pretrained(folder)
        for names, lengths, metadata in _metadata(cfg, folder):
            with load_failures(f"eval.harness.tasks={','.join(names)}", PARQUET):
                tasks = _manager(cfg, names, metadata).load(names)["tasks"]
            for name, task in tasks.items():
                samples += _by_length(cfg, name, task, lengths)
    return samples


def _manager(cfg: EvalRunConfig, names: list[str], metadata: dict[str, Any]) -> "TaskManager":
    """Returns the index of the user's folder, and of lm_eval's own tasks, which take seconds, if a
    name is not in it.
    """
    from lm_eval.tasks import TaskManager

    folder = cfg.eval.harness.include_path
    path = folder and Path(folder).expanduser()
    manager = TaskManager(include_path=path, include_defaults=False, metadata=metadata)
    if set(names) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=path, metadata=metadata)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            where = "no such task of lm_eval, and none in eval.harness.include_path"
            raise UserError(
                f"eval.harness.tasks={shown(name)}: {where}{nearest(name, known)}{_damaged(folder)}"
            )
    return manager


def _damaged(folder: str | None) -> str:
    """Returns a clause that names the first malformed file of the user's folder, which lm_eval
    skips in silence.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    for path in sorted(Path(folder).expanduser().rglob("*.yaml")) if folder else []:
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # from the YAML library, an included file, or lm_eval
            mark = getattr(error, "problem_mark", None)
            place = f", line {mark.line + 1}" if mark else ""
            return f"; {path}{place}: {getattr(error, 'problem', None) or first_line(error)}"
    return ""


def _metadata(
    cfg: EvalRunConfig, tokenizer: str
) -> Iterator[tuple[list[str], list[int], dict[str, Any]]]:
    """Yields names of tasks, their lengths, and what lm_eval passes to the functions that make
    their prompts.
    """
    settings = cfg.eval.harness
    shared = {"tokenizer": tokenizer, "pretrained": tokenizer}
    one_length = [name for name in settings.tasks if name.startswith(BABILONG) and settings.lengths]
    others = [name for name in settings.tasks if name not in one_length]
    if others:
        yield (
            others,
            settings.lengths,
            shared | ({"max_seq_lengths": settings.lengths} if settings.lengths else {}),
        )
    for length in settings.lengths if one_length else []:
        if length % 1024:
            raise UserError(
                f"eval.harness.lengths={length}: {one_length[0]} accepts multiples of 1024"
            )
        yield one_length, [length], shared | {"max_seq_lengths": f"{length // 1024}k"}


def _without_progress_bar(build: Callable[..., None]) -> Callable[..., None]:
    """Returns lm_eval's function that makes the prompts of a task with stderr silent: no argument
    turns its bar off.
    """

    def quiet(**options: Any) -> None:
        with redirect_stderr(StringIO()):
            build(**options)

    return quiet


def _by_length(cfg: EvalRunConfig, name: str, task: Any, lengths: list[int]) -> list[TaskSamples]:
    """Returns the first ``eval.harness.limit`` samples of each length."""
    given = f"eval.harness.tasks={name}"
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"{given}: the task runs code that the model writes; only lm_eval's own command does "
            f"that"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{given}: the task has images or sound; expected a text task")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.build_all_requests = _without_progress_bar(task.build_all_requests)
    bounds = cfg.eval.harness.bins
    groups: dict[tuple[int | None, int | None], list[int]] = {}
    with load_failures(given, PARQUET):
        makes_prompts = callable(task.config.custom_dataset)
        for number, sample in enumerate(task.eval_docs):
            length = sample.get("max_length") if makes_prompts else None  # RULER's samples have it
            recorded = sample.get("length") if bounds else None  # LongBench's samples have it
            of_bin = bisect_right(bounds, recorded) if isinstance(recorded, int) else None
            groups.setdefault((length if isinstance(length, int) else None, of_bin), []).append(
                number
            )
    if not groups:
        raise UserError(f"{given}: the task has no samples")
    only = lengths[0] if makes_prompts and len(lengths) == 1 else None
    limit = cfg.eval.harness.limit
    labels = [f", {low} to {high}" for low, high in pairwise([0, *bounds])] + [
        f", {max(bounds, default=0)} and more"
    ]
    return [
        TaskSamples(
            name, task, numbers[:limit], length or only, name if at is None else name + labels[at]
        )
        for (length, at), numbers in sorted(groups.items(), key=lambda group: group[0][1] or 0)
    ]

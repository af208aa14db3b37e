"""Runs the job of a command, once or for each point of a sweep.

Each run keeps its composed configuration in its own folder, in ``.hydra``, as Hydra does. Mistakes
of the user are raised as a :class:`~msattn.trainer.errors.UserError` of one line.
"""

import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from msattn.trainer import config as schemas
from msattn.trainer.commands.compose import (
    compose_raw,
    initialized_hydra,
    typed_config,
    with_search_path,
    without_hydra,
)
from msattn.trainer.commands.jobs import COMMANDS, config_name, imported
from msattn.trainer.config import JobConfig, typed
from msattn.trainer.config.values import shown
from msattn.trainer.errors import (
    Fault,
    OutputClosed,
    TrainingDiverged,
    UserError,
    disk_error,
    first_line,
    free_space,
)
from msattn.trainer.ranks import is_main_rank
from msattn.trainer.signals import raised

MOST_JOBS = 10_000  # jobs of a sweep


def launch(
    command: str,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    multirun: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Runs the job of ``command``, once or for each point of a sweep, with ``arguments``; returns
    what each job returned.

    A sweep (``multirun``) goes over comma-separated values, and over ``hydra.sweeper.params`` of an
    experiment. The ``name`` of a training job is then its number, unless ``name`` is given or
    interpolates other values. ``config_dir`` has further groups. Raises UserError if the
    configuration is refused, and the UserError or Fault of a job.
    """
    name = config_name(command)
    overrides = with_search_path(overrides, config_dir)
    started: list[str] = []
    outputs: list[str] = []  # of the composed configuration
    task = functools.partial(_run_job, command=command, arguments=arguments, started=started)
    with initialized_hydra(command) as hydra, _errors_in_one_line(command, started, outputs):
        if multirun:
            sweep = compose_raw(hydra, command, overrides, "MULTIRUN")
            _check_points(hydra, sweep, command)
            outputs.append(sweep.outputs)
            # A training job writes artifacts under its own name; other jobs read the artifacts
            # under the given name.
            if COMMANDS[command].trains and not _is_given("name", sweep, overrides):
                overrides = [*overrides, "name=${hydra:job.num}"]
            overrides = _with_group(sweep, overrides, f"{command}-{datetime.now():%Y%m%d-%H%M%S}")
            batches = hydra.multirun(config_name=name, task_function=task, overrides=overrides)
            results = [job.return_value for batch in batches for job in batch]
        else:
            # Checked before Hydra creates the run's folder, so that a mistake leaves no files, and
            # before the job's imports.
            composed = compose_raw(hydra, command, overrides)
            cfg = typed_config(composed, command)
            _check_text(cfg, command)
            _check_outputs(cfg)
            outputs.append(cfg.outputs)
            overrides = _with_group(composed, overrides)
            if is_main_rank():  # under torchrun one process writes the run's folder
                results = [
                    hydra.run(
                        config_name=name, task_function=task, overrides=overrides
                    ).return_value
                ]
            else:
                results = [task(without_hydra(composed))]
    for number, result in enumerate(results):
        if isinstance(result, UserError | Fault):
            if multirun and not isinstance(result, OutputClosed):  # which has no line
                result.args = (f"job {number}: {result}",)
            raise result
    if multirun and (finish := COMMANDS[command].after_sweep):
        imported(finish)(results)
    return results


@contextmanager
def _errors_in_one_line(command: str, started: list[str], outputs: list[str]) -> Iterator[None]:
    """Converts errors of Hydra's files, in ``outputs``, to UserError, and errors of keys
    ``hydra.*`` until the first job has ``started``.
    """
    from hydra.errors import HydraException

    try:
        yield
    except (UserError, HydraException):
        raise
    except (OSError, ValueError, AssertionError) as error:
        failure = disk_error(error, Path(*outputs), resumes=COMMANDS[command].resumes)
        if failure is None and started:
            raise
        raise failure or UserError(
            f"hydra.*: a setting of Hydra's own is refused ({first_line(error)})"
        ) from error


def _is_given(key: str, composed: Any, overrides: Sequence[str]) -> bool:
    """Returns True if ``key`` is given, swept, or an interpolation such as
    ``yarn-${select.sparsity}``.
    """
    from omegaconf import OmegaConf

    given = any(override.startswith(f"{key}=") for override in overrides)
    section, _, leaf = key.rpartition(".")
    parent = composed[section] if section else composed
    return (
        given
        or key in (composed.hydra.sweeper.params or {})
        or OmegaConf.is_interpolation(parent, leaf)
    )


def _with_group(composed: Any, overrides: Sequence[str], sweep: str | None = None) -> list[str]:
    """Returns ``overrides`` with the tracker's group: the experiment, or else the name of the
    ``sweep``, if there is one.
    """
    from omegaconf import OmegaConf

    group = composed.hydra.runtime.choices.get("experiment") or sweep
    if group is None or OmegaConf.select(composed, "tracker.kind") == "none":
        return list(overrides)
    chosen = composed.tracker.group is not None or _is_given("tracker.group", composed, overrides)
    return list(overrides) if chosen else [*overrides, f"tracker.group={group}"]


def _check_points(hydra: Any, sweep: Any, command: str) -> None:
    """Composes and types every point of ``sweep``, so that a mistake in a later point stops the
    sweep before its first job.

    Applies only to Hydra's basic sweeper, because other sweepers choose points while they run.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.utils import get_class

    split = getattr(get_class(sweep.hydra.sweeper._target_), "split_arguments", None)
    if split is None:
        return
    swept = [f"{key}={values}" for key, values in (sweep.hydra.sweeper.params or {}).items()]
    given = sweep.hydra.overrides
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(
        [*swept, *given.task]
    )
    if not math.prod(map(_number_of_values, parsed)) <= MOST_JOBS:
        raise UserError(f"--multirun: expected at most {MOST_JOBS:,} jobs")
    points = split(parsed, max_batch_size=None)[0]
    if not points:
        empty = next(
            override
            for override in parsed
            if override.is_sweep_override() and not any(override.sweep_string_iterator())
        )
        raise UserError(
            f"--multirun: {shown(empty.input_line)}: no value; glob() is for the options of a group"
        )
    for number, point in enumerate(points):
        try:
            _check_text(
                typed_config(compose_raw(hydra, command, [*given.hydra, *point]), command), command
            )
        except UserError as error:
            raise UserError(f"job {number}: {error}") from error


def _number_of_values(override: Any) -> float:
    """Returns the number of values of a swept override, which may be infinite or not a number; 1
    for others.
    """
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop = value.start or 0, value.stop or 0
        return abs((stop - start) / value.step) if value.step else math.inf
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def _run_job(config: Any, *, command: str, arguments: dict[str, Any], started: list[str]) -> Any:
    """Runs a job as Hydra's task function. One-line errors are returned, because Hydra would add
    lines to raised ones.
    """
    from msattn.trainer.progress import activity
    from msattn.trainer.storage.lock import locked
    from msattn.trainer.training.distributed import fail_together

    started.append(command)
    called = COMMANDS[command]
    cfg = typed(config, called.schema)
    try:
        with activity(command), fail_together(), raised(), ExitStack() as stack:
            for name in called.written(cfg):
                stack.enter_context(locked(cfg.folder / name))
            return called.run(cfg, arguments)
    except (UserError, Fault) as error:
        return error
    except TrainingDiverged as error:
        return UserError(str(error))
    except (MemoryError, RuntimeError, OSError) as error:
        failure = disk_error(error, cfg.folder, resumes=called.resumes) or _shortage(
            error, called.sizes
        )
        if failure is None:
            raise
        return failure


def _shortage(error: Exception, sizes: str) -> UserError | None:
    import torch

    reason = first_line(error).partition(". ")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"device=cuda: the GPU has too little memory ({reason}); reduce {sizes}")
    if isinstance(error, MemoryError) or re.search(
        "can't allocate memory|Storage size calculation overflowed", str(error)
    ):
        return UserError(f"this machine has too little memory ({reason}); reduce {sizes}")
    if "Too many open files" in str(error):
        return UserError(
            f"{reason}; train.num_workers=0 needs none, and ulimit -n raises the limit"
        )
    return None


def _check_text(cfg: JobConfig, command: str) -> None:
    """Raises UserError for text that was not chosen or does not exist, before a job imports heavy
    libraries.
    """
    if isinstance(cfg, schemas.RunConfig):
        if COMMANDS[command].trains:
            cfg.check_text()
        cfg.data.check_files()


def _check_outputs(cfg: JobConfig) -> None:
    """Raises UserError if the folder of runs is not writable; Hydra would raise its own error
    before the job starts.
    """
    folder = cfg.folder / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; {free_space(folder)}"
        raise UserError(f"outputs={cfg.outputs}: {folder} cannot be created ({reason})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"outputs={cfg.outputs}: {folder} is not writable")

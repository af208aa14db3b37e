"""Composes the configuration of a command from Hydra overrides and runs the command's job.

Each run keeps its composed configuration in ``.hydra`` of its own folder, as Hydra does. Mistakes of the user are raised as a
:class:`~msattn.trainer.errors.UserError` of one line.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from msattn.trainer import config as schemas
from msattn.trainer.commands.jobs import COMMANDS, imported
from msattn.trainer.config import BASELINES, POLICIES, JobConfig, known_keys, nearest, typed
from msattn.trainer.config.select import foreign_key, keys_of
from msattn.trainer.config.text_files import refused
from msattn.trainer.config.values import shown
from msattn.trainer.errors import Fault, TrainingDiverged, UserError, disk_error, first_line, free_space
from msattn.trainer.signals import raised

MAIN_RANK = "0"
MOST_JOBS = 10_000  # of a sweep
UNDERSCORED = re.compile(  # a number with underscores that is a whole value or item; quoted text is matched without a number
    r"""(['"]).*?(?<!\\)\1|[=\[{,:(] *(?P<number>[+-]?\d[\d.]*_[\d_.]*) *(?=$|[]},):])"""
)
QUOTING = """and quote a value that holds spaces, commas or quotes twice, 'data.path="my file.txt"'"""


def compose(command: str, overrides: Sequence[str] = ()) -> Any:
    """Returns the typed configuration of ``command`` with ``overrides``, without running or writing anything.

    Raises
    ------
    UserError : Hydra or the schema refuses an override.
    """
    with initialized_hydra(command) as hydra:
        return _typed(compose_raw(hydra, command, overrides), command)


def launch(
    command: str, overrides: Sequence[str], *, config_dir: Path | None = None, multirun: bool = False, **arguments: Any
) -> list[Any]:
    """Runs the job of ``command`` once, or once for each point of a sweep.

    Parameters
    ----------
    command : a key of :data:`COMMANDS`.
    overrides : Hydra overrides.
    config_dir : an additional folder of configuration groups.
    multirun : sweeps over comma-separated values, and over ``hydra.sweeper.params`` of an experiment. The ``name`` of a
        training job is its number, unless ``name`` is given or interpolates other values.
    **arguments : passed to the job with its configuration.

    Returns
    -------
    list
        The return value of each job.

    Raises
    ------
    UserError : the configuration is refused, or the job raised it.
    Fault : the job raised it.
    """
    name = COMMANDS[command].config
    overrides = _with_search_path(overrides, config_dir)
    started: list[str] = []
    task = functools.partial(_run_job, command=command, arguments=arguments, started=started)
    with initialized_hydra(command) as hydra, _settings_of_hydra(started), _named_disk_errors(command):
        if multirun:
            sweep = compose_raw(hydra, command, overrides, "MULTIRUN")
            _check_points(hydra, sweep, command)
            # Each training job writes artifacts of its own name; other jobs read those of the name they are given.
            if COMMANDS[command].trains and not _is_given("name", sweep, overrides):
                overrides = [*overrides, "name=${hydra:job.num}"]
            overrides = _with_group(sweep, overrides, f"{command}-{datetime.now():%Y%m%d-%H%M%S}")
            batches = hydra.multirun(config_name=name, task_function=task, overrides=overrides)
            results = [job.return_value for batch in batches for job in batch]
        else:
            # Checked before Hydra creates the run's folder, so that a mistake leaves no files, and before the job's imports.
            composed = compose_raw(hydra, command, overrides)
            cfg = _typed(composed, command)
            _check_text(cfg, command)
            _check_outputs(cfg)
            overrides = _with_group(composed, overrides)
            if os.environ.get("RANK", MAIN_RANK) == MAIN_RANK:  # under torchrun one process writes the run's folder
                results = [hydra.run(config_name=name, task_function=task, overrides=overrides).return_value]
            else:
                results = [task(without_hydra(composed))]
    for number, result in enumerate(results):
        if isinstance(result, UserError | Fault):
            raise type(result)(f"job {number}: {result}") if multirun else result
    if multirun and (finish := COMMANDS[command].after_sweep):
        imported(finish)(results)
    return results


@contextmanager
def _settings_of_hydra(started: list[str]) -> Iterator[None]:
    """Raises what Hydra raises for bad values of its own keys, ``hydra.*``, as a UserError, until the first job has started."""
    from hydra.errors import HydraException

    try:
        yield
    except (UserError, HydraException):
        raise
    except (OSError, ValueError, AssertionError) as error:
        if started:
            raise
        raise UserError(f"hydra.*: a setting of Hydra's own is refused ({first_line(error)})") from error


@contextmanager
def _named_disk_errors(command: str) -> Iterator[None]:
    """Raises an OSError of a full or failing disk, as of the files that Hydra writes, as a UserError of one line."""
    try:
        yield
    except OSError as error:
        found = disk_error(error, Path(COMMANDS[command].schema.outputs), resumes=COMMANDS[command].resumes)
        if found is None:
            raise
        raise found from error


def _is_given(key: str, composed: Any, overrides: Sequence[str]) -> bool:
    """Returns True if ``key`` is given, swept, or an interpolation such as ``yarn-${select.sparsity}``."""
    from omegaconf import OmegaConf

    given = any(override.startswith(f"{key}=") for override in overrides)
    section, _, leaf = key.rpartition(".")
    parent = composed[section] if section else composed
    return given or key in (composed.hydra.sweeper.params or {}) or OmegaConf.is_interpolation(parent, leaf)


def _with_group(composed: Any, overrides: Sequence[str], sweep: str | None = None) -> list[str]:
    """Returns ``overrides`` with the tracker's group: the experiment, or else the name of the ``sweep``, if there is one."""
    from omegaconf import OmegaConf

    group = composed.hydra.runtime.choices.get("experiment") or sweep
    if group is None or OmegaConf.select(composed, "tracker.kind") == "none":
        return list(overrides)
    chosen = composed.tracker.group is not None or _is_given("tracker.group", composed, overrides)
    return list(overrides) if chosen else [*overrides, f"tracker.group={group}"]


def _check_points(hydra: Any, sweep: Any, command: str) -> None:
    """Composes and types every point of ``sweep``, so that a mistake in a later point stops the sweep before its first job.

    Applies only to Hydra's basic sweeper, because other sweepers choose points while they run.

    Raises
    ------
    UserError : a point is refused; the message names its number.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.utils import get_class

    split = getattr(get_class(sweep.hydra.sweeper._target_), "split_arguments", None)
    if split is None:
        return
    swept = [f"{key}={values}" for key, values in (sweep.hydra.sweeper.params or {}).items()]
    given = sweep.hydra.overrides
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides([*swept, *given.task])
    if not math.prod(map(_number_of_values, parsed)) <= MOST_JOBS:
        raise UserError(f"--multirun: accepted are at most {MOST_JOBS:,} jobs")
    for number, point in enumerate(split(parsed, max_batch_size=None)[0]):
        try:
            _check_text(_typed(compose_raw(hydra, command, [*given.hydra, *point]), command), command)
        except UserError as error:
            raise UserError(f"job {number}: {error}") from error


def _number_of_values(override: Any) -> float:
    """Returns the number of values of a swept override, which may be infinite or not a number; 1 for others."""
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop = value.start or 0, value.stop or 0
        return abs((stop - start) / value.step) if value.step else math.inf
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def show(command: str, overrides: Sequence[str], *, kind: str, config_dir: Path | None = None) -> None:
    """Prints the composed YAML; ``kind`` is ``job``, ``hydra`` or ``all``."""
    overrides = _with_search_path(overrides, config_dir)
    with initialized_hydra(command) as hydra:
        _typed(compose_raw(hydra, command, overrides), command)
        hydra.show_cfg(COMMANDS[command].config, overrides, cfg_type=kind, package=None)


def _run_job(config: Any, *, command: str, arguments: dict[str, Any], started: list[str]) -> Any:
    """Runs a job as Hydra's task function. One-line errors are returned, because Hydra would add lines to raised ones."""
    from msattn.trainer.progress import activity

    started.append(command)
    with activity(command):
        return _guarded_job(config, command, arguments)


def _guarded_job(config: Any, command: str, arguments: dict[str, Any]) -> Any:
    from msattn.trainer.storage.lock import locked
    from msattn.trainer.training.distributed import fail_together

    cfg = typed(config, COMMANDS[command].schema)
    try:
        with fail_together(), raised(), ExitStack() as stack:
            for name in COMMANDS[command].written(cfg):
                stack.enter_context(locked(cfg.folder / name))
            return COMMANDS[command].run(cfg, arguments)
    except (UserError, Fault) as error:
        return error
    except TrainingDiverged as error:
        return UserError(str(error))
    except (MemoryError, RuntimeError, OSError) as error:
        disk = disk_error(error, cfg.folder, resumes=COMMANDS[command].resumes) if isinstance(error, OSError) else None
        shortage = _shortage(error, COMMANDS[command].sizes)
        if disk is None and shortage is None:
            raise
        return disk or UserError(shortage)


def _shortage(error: Exception, sizes: str) -> str | None:
    """Returns one line for an error that means that the machine is too small for the job; None for other errors."""
    import torch

    reason = first_line(error).partition(". ")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"device=cuda: the GPU has too little memory ({reason}); reduce {sizes}"
    if isinstance(error, MemoryError) or re.search("can't allocate memory|Storage size calculation overflowed", str(error)):
        return f"this machine has too little memory ({reason}); reduce {sizes}"
    if "Too many open files" in str(error):
        return f"{reason}; train.num_workers=0 needs none, and ulimit -n raises the limit"
    return None


def _typed(composed: Any, command: str) -> JobConfig:
    return typed(without_hydra(composed), COMMANDS[command].schema)


def without_hydra(composed: Any) -> Any:
    """Returns a composed configuration without Hydra's own keys."""
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])


def compose_raw(hydra: Any, command: str, overrides: Sequence[str] = (), mode: str = "RUN") -> Any:
    """Returns the configuration of ``command`` with Hydra's own keys; ``mode`` is ``RUN`` or ``MULTIRUN``."""
    from hydra.types import RunMode

    _check_numbers(overrides)
    try:
        return hydra.compose_config(COMMANDS[command].config, list(overrides), RunMode[mode])
    except ValueError as error:  # not a HydraException: a group is null
        raise UserError(f"{first_line(error)}; a group takes one of its options, as in select=topk") from error


def _check_numbers(overrides: Sequence[str]) -> None:
    """Raises UserError for numbers that Hydra would read differently from how they are written.

    Hydra takes ``1_000`` for 1000, so that ``name=1_000`` would be called 1000, and cannot read thousands of digits.
    """
    for override in overrides:
        for match in UNDERSCORED.finditer(override):
            if number := match["number"]:
                raise UserError(f"{shown(override)}: write {number.replace('_', '')} for a number, and '\"{number}\"' for text")
        if re.search(r"\d{400}", override):
            raise UserError(f"{shown(override)}: accepted are numbers of fewer than 400 digits")


def _with_search_path(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    if config_dir is None:
        return list(overrides)
    with refused(f"--config-dir {shown(config_dir)}"):
        if not os.path.isdir(config_dir):
            raise UserError(f"--config-dir {shown(config_dir)}: no such folder")
    path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [*overrides, f"hydra.searchpath=['file://{path}']"]


def _check_text(cfg: JobConfig, command: str) -> None:
    """Raises UserError for text that is not chosen or does not exist, before a job imports what it needs."""
    if isinstance(cfg, schemas.RunConfig):
        if COMMANDS[command].trains:
            cfg.check_text()
        cfg.data.check_files()


def _check_outputs(cfg: JobConfig) -> None:
    """Raises UserError if the folder of runs is not writable; Hydra would raise its own error before the job starts."""
    folder = cfg.folder / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; {free_space(folder)}"
        raise UserError(f"outputs={cfg.outputs}: {folder} cannot be created ({reason})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"outputs={cfg.outputs}: {folder} is not writable")


@contextmanager
def initialized_hydra(command: str) -> Iterator[Any]:
    """Yields Hydra, initialized with ``conf/``; raises its errors as a UserError of one line."""
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # For run names: ${joined:${gate.q_pool}} joins a list, ${parent_name:${artifacts.gate}} is the name of a folder's parent.
    OmegaConf.register_new_resolver("joined", lambda items: "-".join(map(str, items)), replace=True)
    OmegaConf.register_new_resolver("parent_name", lambda path: Path(path).parent.name, replace=True)
    # For lengths: ${up_to:${data.seq_len},4096,16384} has the others that are shorter than the first one, and then this one.
    OmegaConf.register_new_resolver("up_to", lambda end, *sizes: [*(n for n in sizes if n < end), end], replace=True)
    for name in BASELINES:  # a method without training needs no file in conf/select
        node = {"defaults": ["topk", "_self_"], "scores": name}
        ConfigStore.instance().store(group="select", name=name, node=node, provider="msattn")
    with initialize_config_module("msattn.conf", job_name=command, version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        except RecursionError as error:
            raise UserError("an override nests lists or mappings too deeply") from error
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_explain(error, functools.partial(_accepted, hydra, command))) from error


def _accepted(hydra: Any, command: str) -> list[str]:
    """Returns the groups and keys of a command."""
    chosen = compose_raw(hydra, command).hydra.runtime.choices
    return [group for group in chosen if not group.startswith("hydra")] + known_keys(COMMANDS[command].schema)


def _explain(error: Exception, accepted_keys: Callable[[], list[str]]) -> str:
    """Returns one line for an error of Hydra, with the nearest of the accepted groups and keys."""
    from hydra.errors import MissingConfigException, OverrideParseException

    message = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        group, choice = error.missing_cfg_file.rsplit("/", 1)
        options = list(error.options or [])
        return f"{group}={choice}: accepted are {', '.join(options)}{nearest(choice, options)}"
    if isinstance(error, OverrideParseException):
        return f"{shown(error.override)}: not understood; write key=value, {QUOTING}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.+)'", message):
        return f"{ambiguous[1]}: a comma is a sweep: add --multirun, write a list as key=[a,b], {QUOTING}"
    if unfit := re.match(r"Could not (?:override|append to config|delete|append)[^']*'(.+?)'", message):
        group, _, key = unfit[1].rpartition(".")
        accepted = accepted_keys()
        if group == "select" and unfit[1] in accepted:  # a key of another policy than the one composed
            policy = getattr(getattr(error.__cause__, "parent_node", None), "policy", None)
            if policy in POLICIES and key not in keys_of(POLICIES[policy]):
                return foreign_key(POLICIES[policy], key)
        if unfit[1] in accepted:
            return f"+{unfit[1]}: the key exists; leave out the plus sign"
        return f"unknown key {unfit[1]}{nearest(unfit[1], accepted)}"
    return " ".join(message.split())

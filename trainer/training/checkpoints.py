"""Checkpoint bookkeeping: completion markers, resuming, removal of old checkpoints, and write
errors.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from msattn.trainer.config import TrainConfig
from msattn.trainer.config.train import AUTO
from msattn.trainer.errors import UserError, first_line, print_once, write_error
from msattn.trainer.progress import activity
from msattn.trainer.storage.documents import checked, read_json
from msattn.trainer.storage.hashes import first_difference, folder_hashes
from msattn.trainer.storage.replace import replace_file, sync_folder, sync_tree
from msattn.trainer.storage.settings import START_AGAIN, check_settings, flat_settings

WEIGHTS = "model.safetensors"
SHARDS = "pytorch_model_fsdp_0"  # accelerate's folder for sharded weights
MARKER = "complete.json"  # written last: a checkpoint without it is incomplete and ignored
MAX_MARKER_BYTES = 8_000_000
MAX_CHECKPOINTS = 2  # complete checkpoints to keep
MICRO_BATCH = "train.micro_batch_size"
# Settings that a resumed run may change, as they do not affect the result.
_CHANGEABLE = ("log_every", "save_every", "num_workers")


@dataclass(frozen=True)
class TrainingResult:
    """Result of :func:`msattn.trainer.training.loop.fit`, including the runs that it resumed."""

    steps: int  # optimizer steps
    seconds: float  # wall-clock time
    # means over the last logging interval: ``loss`` and one entry per part
    losses: dict[str, float]
    metrics: dict[str, float]  # result of the last evaluation


@dataclass(frozen=True)
class Marker:
    """Content of :data:`MARKER`."""

    settings: dict[str, Any]  # settings of the run, see :func:`resume_settings`
    result: TrainingResult  # at this checkpoint
    files: dict[str, str]  # hashes of all other files of the checkpoint
    checksum: str  # hash of the three


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Returns the complete checkpoint with the most steps in the folder ``checkpoints``, or
    None.
    """
    return next(reversed(_complete_checkpoints(checkpoints)), None)


def describe_last_checkpoint(checkpoints: Path) -> str:
    """Returns a clause for error messages that names the last complete checkpoint."""
    last = newest_checkpoint(checkpoints)
    return (
        f"the last complete checkpoint is {last}"
        if last is not None
        else "there is no complete checkpoint yet"
    )


def _complete_checkpoints(checkpoints: Path) -> list[Path]:
    return [path for path in _all_checkpoints(checkpoints) if os.path.isfile(path / MARKER)]


def _all_checkpoints(checkpoints: Path) -> list[Path]:
    """Returns the checkpoints, complete or not, keyed by step; files and folders with other names
    are not ours.
    """
    folders = [
        path
        for path in checkpoints.glob("checkpoint-*")
        if _steps(path) is not None and os.path.isdir(path)
    ]
    return sorted(folders, key=lambda path: _steps(path) or 0)


def _steps(checkpoint: Path) -> int | None:
    name = re.fullmatch(r"checkpoint-(\d{1,18})", checkpoint.name)
    return int(name[1]) if name else None


def _remove(checkpoint: Path) -> None:
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    if os.path.isfile(checkpoint / MARKER):
        (checkpoint / MARKER).unlink()  # first, so that a partly removed checkpoint is ignored
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint)


def resume_settings(
    train: TrainConfig,
    seed: int,
    optimizer: str,
    world_size: int,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the interrupted one; ``extra`` are
    the job's own settings.
    """
    fixed = {key: value for key, value in asdict(train).items() if key not in _CHANGEABLE}
    return {
        **flat_settings({"train": fixed}),
        "seed": seed,
        "optimizer": optimizer,
        "processes": world_size,
        **flat_settings(extra or {}),
    }


def check_start(
    checkpoints: Path, known: Mapping[str, Any], *, resume: bool, overwrite: bool = False
) -> dict[str, Any]:
    """Checks the checkpoints of an earlier run before a job does long work; returns the settings of
    the run that it resumes, {} if it starts.

    ``known`` are those of :func:`resume_settings` that do not need the model's weights. Raises
    UserError if they differ from the run to resume, and for checkpoints that are neither resumed
    nor to ``overwrite``.
    """
    complete = _complete_checkpoints(checkpoints)
    if not complete:
        return {}
    if resume:
        return _newest_settings(complete, known)
    steps = _steps(complete[-1])
    if not overwrite:
        raise UserError(
            f"{checkpoints}: an earlier run was trained to step {steps}; resume=true continues it, "
            f"overwrite=true starts again, another name= keeps both"
        )
    if not _is_last(complete[-1]):
        print_once(
            f"overwrite=true: training starts again; {checkpoints}, to step {steps}, is removed"
        )
    return {}


def _is_last(checkpoint: Path) -> bool:
    """Returns True if a checkpoint is that of a run's last step."""
    try:
        marker = read_marker(checkpoint)
    except (UserError, OSError):
        return False
    return marker.result.steps == marker.settings.get("train.steps")


def _newest_settings(complete: list[Path], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in the newest of the markers that can be read, which must have the
    ``known`` ones.
    """
    checkpoint, marker, _ = _newest_intact(complete, files=False)
    _check_settings(checkpoint, marker.settings, known, partly=True)
    return marker.settings


def _check_settings(
    checkpoint: Path, before: Mapping[str, Any], current: Mapping[str, Any], *, partly: bool = False
) -> None:
    # The checkpoint holds the number that was chosen automatically.
    chosen = {MICRO_BATCH: before.get(MICRO_BATCH)} if current.get(MICRO_BATCH) == AUTO else {}
    run = f"resume=true: the run in {checkpoint.parent}"
    check_settings(run, before, {**current, **chosen}, partly=partly)


def prepare_resume(
    checkpoints: Path, settings: dict[str, Any], *, resume: bool, writes: bool
) -> Path | None:
    """Returns the newest intact checkpoint, or None, and removes newer and incomplete ones; without
    ``resume``, all of them.

    ``settings`` must equal those of the run that wrote the checkpoint. One process ``writes``; the
    others receive its choice.
    """
    choice: list[Any] = [None]
    if writes:
        try:
            choice = [_intact_checkpoint(checkpoints, settings) if resume else None]
            for path in _all_checkpoints(checkpoints):
                if (
                    choice[0] is None
                    or not os.path.isfile(path / MARKER)
                    or (_steps(path) or 0) > (_steps(choice[0]) or 0)
                ):
                    _remove(path)
        except UserError as error:
            choice = [error]
        except OSError as error:
            choice = [
                UserError(
                    f"{error.filename or checkpoints}: an earlier checkpoint cannot be removed "
                    f"({error.strerror})"
                )
            ]
    broadcast_object_list(choice)
    if isinstance(choice[0], UserError):
        raise choice[0]
    return choice[0]


def _intact_checkpoint(checkpoints: Path, settings: dict[str, Any]) -> Path | None:
    """Returns the newest checkpoint with undamaged files; names damaged checkpoints on stderr."""
    complete = _complete_checkpoints(checkpoints)
    if not complete:
        return None
    checkpoint, marker, damage = _newest_intact(complete, files=True)
    _check_settings(checkpoint, marker.settings, settings)
    for line in damage:
        print_once(f"warning: {line}; the run continues from {checkpoint.name}")
    return checkpoint


def _newest_intact(complete: list[Path], *, files: bool) -> tuple[Path, Marker, list[str]]:
    """Returns the newest intact checkpoint, its marker, and the faults of newer ones.

    With ``files`` all files that the marker lists are checked, too. Raises UserError if none is
    intact.
    """
    damage: list[str] = []
    for checkpoint in reversed(complete):
        try:
            marker = read_marker(checkpoint)
            if files:
                with activity(f"checking {checkpoint}"):
                    different = first_difference(checkpoint, marker.files, MARKER)
                if different is not None:
                    raise UserError(f"{checkpoint}: {different}")
        except (UserError, OSError) as error:
            damage.append(first_line(error))
        else:
            return checkpoint, marker, damage
    raise UserError(
        f"resume=true: no checkpoint is intact ({'; '.join(damage)}); {START_AGAIN} starts again"
    )


@contextmanager
def handle_write_errors(checkpoint: Path) -> Iterator[None]:
    """Turns a failed write of ``checkpoint`` into a one-line error and removes the checkpoint,
    unless it is complete.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        # A collective save fails on every rank; the exception holds the errors of the ranks that
        # could not write.
        cause: Any = (
            next(iter(error.failures.values()))[0]
            if isinstance(error, CheckpointException)
            else error
        )
        # PyTorch's writer raises a RuntimeError without a reason; others, as for a lost connection,
        # are not ours.
        if isinstance(cause, RuntimeError) and not any(
            word in str(cause) for word in ("iostream", "inline_container")
        ):
            raise
        if not os.path.isfile(checkpoint / MARKER):
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise write_error(
            checkpoint, cause, kept=describe_last_checkpoint(checkpoint.parent)
        ) from error


def mark_complete(checkpoint: Path, settings: dict[str, Any], result: TrainingResult) -> None:
    """Syncs ``checkpoint`` to disk and marks it as complete."""
    sync_tree(checkpoint)
    content = {"settings": settings, "result": asdict(result), "files": folder_hashes(checkpoint)}
    with replace_file(checkpoint / MARKER) as new:
        new.write_text(
            json.dumps(content | {"checksum": _checksum(json.loads(json.dumps(content)))})
        )
    sync_folder(checkpoint.parent)


def remove_older(checkpoints: Path) -> None:
    """Removes all but the newest :data:`MAX_CHECKPOINTS` complete checkpoints; warns of one that
    cannot be removed.
    """
    for older in _complete_checkpoints(checkpoints)[:-MAX_CHECKPOINTS]:
        try:
            _remove(older)
        except OSError as error:
            print_once(
                f"warning: {older} cannot be removed ({error.strerror or first_line(error)})"
            )


def read_marker(checkpoint: Path) -> Marker:
    """Returns the marker of a complete checkpoint; refuses a damaged one, and one of an older
    version without hashes.
    """
    content = read_json(checkpoint / MARKER, f"{checkpoint}: {MARKER}", MAX_MARKER_BYTES)
    marker = checked(content, Marker, f"{checkpoint}: {MARKER}")
    if content.pop("checksum") != _checksum(content):
        raise UserError(f"{checkpoint}: {MARKER} is damaged")
    return marker


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """Loads the weights of ``checkpoint`` into ``module``, which they must fit."""
    try:
        if (checkpoint / SHARDS).is_dir():
            weights = module.state_dict()
            load_shards({"model": weights}, checkpoint_id=checkpoint / SHARDS)
            module.load_state_dict(weights)
        else:
            load_model(module, checkpoint / WEIGHTS)
    except RuntimeError as error:
        raise UserError(f"resume=true: {checkpoint} does not fit the module: {error}") from error

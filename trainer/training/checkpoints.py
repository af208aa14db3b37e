"""Checkpoints that count only once they are complete: found, begun from, marked."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import UserError, write_error

WEIGHTS = "model.safetensors"
SHARDS = "pytorch_model_fsdp_0"  # accelerate's folder for weights that processes share
MARKER = "complete.json"  # written last: a checkpoint without it was cut short and does not count
MAX_CHECKPOINTS = 2  # complete checkpoints
# What may differ between a run and its continuation without changing the result.
_FREE_TO_CHANGE = ("log_every", "save_every", "num_workers")


@dataclass(frozen=True)
class TrainingResult:
    """Outcome of :func:`msattn.trainer.training.loop.fit`.

    Attributes
    ----------
    steps : optimizer steps done, over all continuations.
    seconds : wall-clock time, over all continuations.
    losses : means since the line before the last: ``loss`` and one entry a part.
    metrics : of the last evaluation.
    """

    steps: int
    seconds: float
    losses: dict[str, float]
    metrics: dict[str, float]


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the most steps in ``checkpoints``, or None."""
    return next(reversed(_complete(checkpoints)), None)


def describe_last_checkpoint(checkpoints: Path) -> str:
    """What a run that ends early leaves behind, as the end of its last line."""
    last = newest_checkpoint(checkpoints)
    return f"the last good checkpoint is {last}" if last is not None else "there is no checkpoint yet"


def _complete(checkpoints: Path) -> list[Path]:
    found = [marker.parent for marker in checkpoints.glob(f"checkpoint-*/{MARKER}")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _remove(checkpoint: Path) -> None:
    (checkpoint / MARKER).unlink(missing_ok=True)  # first: what is half removed must not count
    shutil.rmtree(checkpoint)


def flatten_settings(**parts: Mapping[str, Any]) -> dict[str, Any]:
    """``{"train.lr": 0.1}`` of ``train={"lr": 0.1}``: settings under the names that the command line has for them."""
    return {f"{part}.{key}": value for part, settings in parts.items() for key, value in settings.items()}


def resume_settings(
    train: TrainConfig, seed: int, optimizer: str, processes: int, job: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a continuation must share with the run it goes on with: the optimizer's run, and what its ``job`` adds."""
    kept = {key: value for key, value in asdict(train).items() if key not in _FREE_TO_CHANGE}
    return {**flatten_settings(train=kept), "seed": seed, "optimizer": optimizer, "processes": processes, **(job or {})}


def prepare_resume(checkpoints: Path, settings: dict[str, Any], *, resume: bool, writes: bool) -> Path | None:
    """The checkpoint to go on from; what is of no more use is removed by the process that ``writes``.

    Raises
    ------
    UserError : the run to be resumed had other settings.
    """
    last = newest_checkpoint(checkpoints) if resume else None
    if last is not None:
        before = json.loads((last / MARKER).read_text())["settings"]
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(
                    f"resume=true: the run in {checkpoints} has {key}={before.get(key)}, not {value}; "
                    "use the same settings, or resume=false to start again"
                )
    if writes:
        for path in checkpoints.glob("checkpoint-*"):
            if not resume or not (path / MARKER).exists():
                _remove(path)
    return last


@contextmanager
def handle_write_errors(checkpoint: Path) -> Iterator[None]:
    """A ``checkpoint`` that cannot be written ends in one line, and gives back the room that it took.

    Raises
    ------
    UserError : the disk is full, or refuses for another reason. It is the user's to mend, hence this class.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        # What processes write together fails in all of them, with the errors of those that could not.
        cause: Any = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        # PyTorch's writer raises a bare RuntimeError that gives no reason; others, as of a broken connection, are not ours.
        if isinstance(cause, RuntimeError) and not any(word in str(cause) for word in ("iostream", "inline_container")):
            raise
        refused = write_error(checkpoint, cause, kept=f"; {describe_last_checkpoint(checkpoint.parent)}")
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise refused from error


def mark_complete(checkpoint: Path, settings: dict[str, Any], outcome: TrainingResult) -> None:
    """Declare that all of ``checkpoint`` is written, then remove what is older than the last :data:`MAX_CHECKPOINTS`.

    The marker appears whole or not at all, and not before the disk has the rest: some full disks say so no earlier.
    """
    unfinished = checkpoint / f"{MARKER}.part"
    unfinished.write_text(json.dumps({"settings": settings, **asdict(outcome)}))
    for path in checkpoint.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    os.replace(unfinished, checkpoint / MARKER)
    for older in _complete(checkpoint.parent)[:-MAX_CHECKPOINTS]:
        _remove(older)


def read_result(checkpoint: Path) -> TrainingResult:
    """What the run had come to at ``checkpoint``."""
    marker = json.loads((checkpoint / MARKER).read_text())
    del marker["settings"]
    return TrainingResult(**marker)


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """Read the weights of ``checkpoint`` into ``module``.

    Raises
    ------
    UserError : they are those of another module.
    """
    try:
        if (checkpoint / SHARDS).is_dir():
            weights = module.state_dict()
            load_shards({"model": weights}, checkpoint_id=checkpoint / SHARDS)
            module.load_state_dict(weights)
        else:
            load_model(module, checkpoint / WEIGHTS)
    except RuntimeError as error:
        raise UserError(f"resume=true: {checkpoint} does not fit the module: {error}") from error

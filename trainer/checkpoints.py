"""Checkpoints that count only once they are complete: found, begun from, marked."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_model
from torch import nn

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import UserError

WEIGHTS = "model.safetensors"
MARKER = "complete.json"  # written last: a checkpoint without it was cut short and does not count
# What may differ between a run and its continuation without changing the result.
_FREE_TO_CHANGE = ("log_every", "save_every", "num_workers")


@dataclass(frozen=True)
class Summary:
    """Outcome of :func:`msattn.trainer.loop.fit`.

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
    complete = [marker.parent for marker in checkpoints.glob(f"checkpoint-*/{MARKER}")]
    return max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def settings_of(train: TrainConfig, seed: int, optimizer: str, processes: int) -> dict[str, Any]:
    """What a continuation must share with the run it goes on with."""
    kept = {key: value for key, value in asdict(train).items() if key not in _FREE_TO_CHANGE}
    return {**kept, "seed": seed, "optimizer": optimizer, "processes": processes}


def starting_point(checkpoints: Path, settings: dict[str, Any], *, resume: bool, writes: bool) -> Path | None:
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
                shutil.rmtree(path)
    return last


def mark_complete(checkpoint: Path, settings: dict[str, Any], outcome: Summary) -> None:
    """Declare that all of ``checkpoint`` is written; the marker appears whole or not at all."""
    unfinished = checkpoint / f"{MARKER}.part"
    unfinished.write_text(json.dumps({"settings": settings, **asdict(outcome)}))
    os.replace(unfinished, checkpoint / MARKER)


def outcome_of(checkpoint: Path) -> Summary:
    """What the run had come to at ``checkpoint``."""
    marker = json.loads((checkpoint / MARKER).read_text())
    del marker["settings"]
    return Summary(**marker)


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """Read the weights of ``checkpoint`` into ``module``.

    Raises
    ------
    UserError : they are those of another module.
    """
    try:
        load_model(module, checkpoint / WEIGHTS)
    except RuntimeError as error:
        raise UserError(f"resume=true: {checkpoint} does not fit the module: {error}") from error

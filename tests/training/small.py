"""Texts and settings of training runs that take seconds."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from msattn.trainer.config import DataConfig, TrackerConfig, TrainConfig
from msattn.trainer.training.checkpoints import TrainingResult
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker


def run(
    module: nn.Module,
    dataset: Any,
    folder: Path,
    train: TrainConfig,
    *,
    resume: bool = False,
    device: str = "cpu",
    **options: Any,
) -> TrainingResult:
    """Trains ``module`` with metrics and checkpoints in ``folder``."""
    with Tracker(TrackerConfig("none"), folder=folder, run_name="test", config={}) as tracker:
        shared: dict[str, Any] = {
            "tracker": tracker,
            "device": torch.device(device),
            "seed": 5,
            "resume": resume,
        }
        return fit(module, dataset, train=train, folder=folder, **shared, **options)


def write_words(folder: Path) -> None:
    """Writes ``train.txt`` and ``heldout.txt``."""
    words = [f"word{i % 97} and number {i}." for i in range(1500)]
    (folder / "train.txt").write_text(" ".join(words))
    (folder / "heldout.txt").write_text(" ".join(words[::-5]))


def small_run(root: Path, name: str) -> dict[str, Any]:
    """Settings for chunks of 96 tokens of the texts in ``root``, where outputs are written, too."""
    return {
        "data": DataConfig(
            source="text",
            path=str(root / "train.txt"),
            heldout_path=str(root / "heldout.txt"),
            seq_len=96,
        ),
        "tracker": TrackerConfig(kind="none"),
        "outputs": str(root / "outputs"),
        "name": name,
        "device": "cpu",
        "seed": 3,
    }


def interrupted_after(times: int, function: Any) -> Any:
    """Returns ``function`` with a KeyboardInterrupt instead of the call after the first
    ``times``.
    """
    remaining = iter([function] * times)

    def call(*args: Any, **named: Any) -> Any:
        try:
            return next(remaining)(*args, **named)
        except StopIteration:
            raise KeyboardInterrupt from None

    return call

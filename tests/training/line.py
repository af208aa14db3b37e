"""A small module that is trained in one dimension, and its checkpoints."""

import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from msattn.trainer.config import TrainConfig
from msattn.trainer.training.checkpoints import WEIGHTS
from tests.training import small

TRAIN = TrainConfig(lr=1e-2, steps=24, batch_size=8, micro_batch_size=1, log_every=2, save_every=3)
ITEMS = 20
BATCH_OF_THREE = 9  # the batch size of runs of three ranks, which cannot share a batch of eight


class Numbers(Dataset[dict[str, Tensor]]):
    """Item ``i`` is the number ``i``."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(float(index))}


class Line(nn.Module):
    """Fits a line with dropout, so that results depend on the random state.

    It appends each number to the file ``seen``. ``pause`` slows steps and, ten times as much,
    saving.
    """

    def __init__(self, seen: Path, pause: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = nn.Linear(1, 1)
        self.seen = seen
        self.pause = pause
        self.stop: tuple[int, int] | None = None  # (micro-batches, the signal to raise after them)
        self.calls = 0
        self.register_state_dict_post_hook(lambda *_: time.sleep(10 * pause))

    def forward(self, number: Tensor) -> dict[str, Any]:
        time.sleep(self.pause)
        self.calls += 1
        if self.stop is not None and self.calls == self.stop[0]:
            signal.raise_signal(self.stop[1])
        with self.seen.open("a") as file:
            file.writelines(f"{int(value)}\n" for value in number)
        x = nn.functional.dropout(number[:, None] / ITEMS, 0.2, self.training)
        return {"loss": (self.line(x) - 1).square().mean()}


def run(
    module: nn.Module,
    folder: Path,
    train: TrainConfig = TRAIN,
    *,
    resume: bool = False,
    device: str = "cpu",
) -> None:
    small.run(module, Numbers(), folder, train, resume=resume, device=device)


def same_weights(a: Path, b: Path, steps: int = TRAIN.steps) -> bool:
    """Returns True if the weights of two runs are equal after ``steps``."""
    left, right = (
        load_file(folder / "checkpoints" / f"checkpoint-{steps}" / WEIGHTS) for folder in (a, b)
    )
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def seen(folder: Path, rank: int = 0) -> list[int]:
    return [int(line) for line in (folder / f"seen-{rank}").read_text().split()]

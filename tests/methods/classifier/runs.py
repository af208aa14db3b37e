"""Configurations of small k-means and classifiers."""

from pathlib import Path
from typing import Any

import torch

from msattn.trainer.config import (
    DataConfig,
    FitKMeansConfig,
    KMeansConfig,
    ModelConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
    TrainQModelConfig,
)
from tests.factory import tiny_architecture

LENGTH, BUCKETS = 128, 8


def configs(text: Path, outputs: Path) -> tuple[FitKMeansConfig, TrainQModelConfig]:
    shared: dict[str, Any] = {
        "model": ModelConfig(
            "toy", "none", init="random", architecture=tiny_architecture(vocab_size=4096)
        ),
        "data": DataConfig("text", path=str(text), seq_len=LENGTH),
        "tracker": TrackerConfig("none"),
        "outputs": str(outputs),
        "device": "cpu",
    }
    settings = QModelConfig(
        hidden=16, num_prompts=4, queries_per_prompt=40, long_range=16, batch_queries=64
    )
    train = TrainConfig(lr=1e-2, steps=30, log_every=10, save_every=10, max_grad_norm=0)
    return (
        FitKMeansConfig(
            kmeans=KMeansConfig(num_buckets=BUCKETS, iterations=4, num_prompts=4), **shared
        ),
        TrainQModelConfig(qmodel=settings, train=train, **shared),
    )


def write_documents(folder: Path) -> Path:
    """Writes documents that repeat words at long distances; returns the folder."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(24):
        words = [f"w{i}" for i in torch.randint(0, 60, (400,), generator=generator).tolist()]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder

"""Texts and settings of training runs that take seconds."""

from pathlib import Path
from typing import Any

from msattn.trainer.config import DataConfig, TrackerConfig


def write_words(folder: Path) -> None:
    """Writes ``train.txt`` and ``heldout.txt``."""
    words = [f"word{i % 97} and number {i}." for i in range(1500)]
    (folder / "train.txt").write_text(" ".join(words))
    (folder / "heldout.txt").write_text(" ".join(words[::-5]))


def small_run(root: Path, name: str) -> dict[str, Any]:
    """Settings for chunks of 96 tokens of the texts in ``root``, where outputs are written, too."""
    return {
        "data": DataConfig(source="text", path=str(root / "train.txt"), heldout_path=str(root / "heldout.txt"), seq_len=96),
        "tracker": TrackerConfig(kind="none"),
        "outputs": str(root / "outputs"),
        "name": name,
        "device": "cpu",
        "seed": 3,
    }

"""The text in which needles are hidden."""

from collections.abc import Iterator

from msattn.trainer import data
from msattn.trainer.config import DataConfig


def documents(cfg: DataConfig, path: str | None) -> Iterator[data.Document]:
    """Yields the documents of ``path``, a text file or folder, or the held-out ones of ``cfg``."""
    source = DataConfig(source="text", path=path, heldout_path=path) if path else cfg
    return data.documents(source, heldout=True)

"""Configuration of the text for training and evaluation."""

from dataclasses import dataclass, field

from msattn.trainer.config.text_files import SUFFIXES, text_files
from msattn.trainer.config.values import check, choices, require, within


@dataclass(frozen=True)
class DataConfig:
    """Text and its division into chunks.

    Attributes
    ----------
    source : ``stdlib`` (the running interpreter's library), ``text`` (local files) or ``hub`` (a streamed Hub dataset).
    path : file, folder or glob of txt, md, jsonl or parquet, also as .gz, .xz or .zst (``text``); dataset id (``hub``);
        pattern of module names, e.g. ``json.*`` (``stdlib``; None: all).
    heldout_path : held-out documents for ``text``; None holds out a tenth of the documents, chosen by a hash of their names, or
        the last tenth of a single document.
    subset, split, column : configuration, split and text column of a Hub dataset; ``column`` also of jsonl and parquet files.
    seq_len : length of a chunk, in tokens.
    num_chunks : at most this many chunks (None: all; a streamed source needs a number).
    needles : insert sentences into training text that state a fact once and repeat it much later. The embedded model was
        trained on such text; plain text seldom needs the retrieval that ``eval=needle`` measures.
    """

    source: str = field(metadata=choices(("stdlib", "text", "hub")))
    path: str | None = None
    heldout_path: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    seq_len: int = field(default=4096, metadata=within("[1, 1e9]"))
    num_chunks: int | None = field(default=None, metadata=within("[1, 1e9]"))
    needles: bool = False

    def __post_init__(self) -> None:
        check(self, "data.")
        require(self.source == "stdlib" or bool(self.path), "data.path", self.path, f"data={self.source} needs a path")
        ok = self.source != "stdlib" or not self.path or ("/" not in self.path and not self.path.endswith(SUFFIXES))
        require(ok, "data.path", self.path, "data=stdlib reads no files, only modules by name; add data=text or data=hub")

    def check_files(self) -> None:
        """Raises UserError if a path to local text names no file."""
        if self.source == "text":
            text_files("data.path", str(self.path))
            if self.heldout_path is not None:
                text_files("data.heldout_path", self.heldout_path)

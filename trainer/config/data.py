"""Configuration of the text for training and evaluation."""

from dataclasses import dataclass, field

from msattn.trainer.config.text_files import SUFFIXES, text_files
from msattn.trainer.config.values import check, choices, require, within


@dataclass(frozen=True)
class DataConfig:
    """Text and its division into chunks.

    Attributes
    ----------
    source : ``stdlib`` (the running interpreter's library), ``text`` (local files) or ``hub`` (a streamed Hub dataset). None:
        none was chosen; evaluation reads the library, and training a pretrained model refuses.
    path : file, folder or glob of txt, md, jsonl or parquet, also as .gz, .xz or .zst (``text``); dataset id (``hub``);
        pattern of module names, e.g. ``json.*`` (``stdlib``; None: all).
    heldout_path : held-out documents for ``text``; None holds out a tenth of the documents, chosen by a hash of their names, or
        the last tenth of a single document. Training and evaluation refuse held-out text that is also training text.
    subset, split, column : configuration, split and text column of a Hub dataset; ``column`` also of jsonl and parquet files.
    heldout_split : split of a Hub dataset with the held-out documents; None holds out a tenth of those of ``split``.
    revision : branch, tag or commit of a Hub dataset; None: the default branch.
    seq_len : length of a chunk, in tokens.
    num_chunks : at most this many chunks (None: all; a streamed source needs a number).
    needles : insert sentences into training text that state a fact once and repeat it much later. The embedded model was
        trained on such text; plain text seldom needs the retrieval that ``eval=needle`` measures.
    bos : begin each document with the BOS token, as in pretraining. A chunk that begins inside a document gets none.
    cache : folder for the tokens of the text, which later runs and other ranks read; None keeps none.
    """

    source: str | None = field(metadata=choices(("stdlib", "text", "hub")))
    path: str | None = None
    heldout_path: str | None = None
    subset: str | None = None
    split: str = "train"
    heldout_split: str | None = None
    revision: str | None = None
    column: str = "text"
    seq_len: int = field(default=4096, metadata=within("[1, 1e9]"))
    num_chunks: int | None = field(default=None, metadata=within("[1, 1e9]"))
    needles: bool = False
    bos: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        check(self, "data.")
        require(self.is_library or bool(self.path), "data.path", self.path, f"data={self.source} needs a path")
        ok = not self.is_library or not self.path or ("/" not in self.path and not self.path.endswith(SUFFIXES))
        require(ok, "data.path", self.path, "data=stdlib reads no files, only modules by name; add data=text or data=hub")
        for key, source in (("heldout_path", "text"), ("heldout_split", "hub"), ("revision", "hub")):
            value = getattr(self, key)
            reads = f"only data={source} reads it; this is data={self.source or 'stdlib'}"
            require(value is None or self.source == source, f"data.{key}", value, reads)
        ok = self.heldout_split is None or self.heldout_split != self.split
        require(ok, "data.heldout_split", self.heldout_split, "another split than data.split")
        require(self.cache is None or bool(self.cache.strip()), "data.cache", repr(self.cache), "null, or a folder")

    @property
    def is_library(self) -> bool:
        """True if the text is the standard library."""
        return self.source in (None, "stdlib")

    def check_files(self) -> None:
        """Raises UserError if a path to local text names no file."""
        if self.source == "text":
            text_files("data.path", str(self.path))
            if self.heldout_path is not None:
                text_files("data.heldout_path", self.heldout_path)

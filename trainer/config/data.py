"""Which text."""

from dataclasses import dataclass

from msattn.trainer.config.values import one_of, require


@dataclass(frozen=True)
class DataConfig:
    """Text, and how it is cut into chunks.

    Attributes
    ----------
    source : ``stdlib`` (the running interpreter's library), ``text`` (local files) or ``hub`` (streamed).
    path : file, folder or glob of txt, jsonl or parquet, .gz and .zst too (``text``); dataset id (``hub``).
    heldout_path : held-out documents for ``text``; None holds out a tenth of the documents, by a hash of their name, or the
        last tenth of a lone document.
    subset, split, column : of a Hub dataset; ``column`` also of jsonl and parquet.
    seq_len : tokens a chunk.
    num_chunks : at most so many chunks (None: all; a streamed source needs a number).
    needles : weave sentences into the text that are said once and again much later, as the embedded model was trained on:
        plain text seldom asks for what ``eval=needle`` asks for.
    """

    source: str
    path: str | None = None
    heldout_path: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    seq_len: int = 4096
    num_chunks: int | None = None
    needles: bool = False

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("stdlib", "text", "hub"))
        require(self.source == "stdlib" or bool(self.path), "data.path", self.path, f"data={self.source} needs a path")
        ok = self.source != "stdlib" or self.path is None
        require(ok, "data.path", self.path, "data=stdlib reads no path; add data=text or data=hub")
        require(self.seq_len > 0, "data.seq_len", self.seq_len, "a positive number of tokens")
        require(self.num_chunks is None or self.num_chunks > 0, "data.num_chunks", self.num_chunks, "null or positive")

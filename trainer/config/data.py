"""Configuration of the text for training and evaluation."""

from typing import Annotated

from msattn.trainer.config.schema import Flag, OneOf, Text, Tokens, key, schema
from msattn.trainer.config.text_files import SUFFIXES, text_files
from msattn.trainer.config.values import require

Source = Annotated[Text, OneOf(("stdlib", "text", "hub"))]


@schema("data.")
class DataConfig:
    """Text and its division into chunks.

    ``source=None``: none was chosen; evaluation reads the standard library, and training a
    pretrained model refuses. Training and evaluation refuse held-out text that is also training
    text. A chunk that begins inside a document gets no BOS token.
    """

    source: Source | None = key(
        "stdlib (Python's library), text (local files) or hub (a dataset of the Hugging Face Hub)"
    )
    path: Text | None = key(
        "text: a file, folder or glob; hub: a dataset id; stdlib: a pattern of module names, null "
        "for all",
        default=None,
    )
    heldout_path: Text | None = key(
        "text: held-out files; null: a tenth of the documents, chosen by a hash of their names",
        default=None,
    )
    subset: Text | None = key("configuration name of a Hub dataset", default=None)
    split: Text = key("split of a Hub dataset", default="train")
    heldout_split: Text | None = key(
        "held-out split of a Hub dataset; null: a tenth of the documents of data.split",
        default=None,
    )
    revision: Text | None = key(
        "branch, tag or commit of a Hub dataset, e.g. refs/convert/parquet; null: the default "
        "branch",
        default=None,
    )
    column: Text = key(
        "column with the text in a Hub dataset, jsonl or parquet files", default="text"
    )
    seq_len: Tokens = key(
        "length of a chunk, in tokens; eval measures at the same length", default=4096
    )
    num_chunks: Tokens | None = key(
        "largest number of chunks; null: all. A streamed dataset needs a number", default=None
    )
    needles: Flag = key(
        "insert sentences into the training text that state a fact and repeat it much later",
        default=False,
    )
    bos: Flag = key("begin each document with the BOS token", default=False)
    cache: Text | None = key(
        "folder where tokenized text is cached for later runs and other ranks; null: no cache",
        default=None,
    )

    def __post_init__(self) -> None:
        require(
            self.is_library or bool(self.path),
            "data.path",
            self.path,
            f"data={self.source} needs a path",
        )
        ok = (
            not self.is_library
            or not self.path
            or ("/" not in self.path and not self.path.lower().endswith(SUFFIXES))
        )
        require(
            ok,
            "data.path",
            self.path,
            "data=stdlib reads no files, only modules by name; add data=text or data=hub",
        )
        for name, source in (
            ("heldout_path", "text"),
            ("heldout_split", "hub"),
            ("revision", "hub"),
        ):
            value = getattr(self, name)
            reads = f"only data={source} reads it; this is data={self.source or 'stdlib'}"
            require(value is None or self.source == source, f"data.{name}", value, reads)
        ok = self.heldout_split is None or self.heldout_split != self.split
        require(
            ok, "data.heldout_split", self.heldout_split, "expected another split than data.split"
        )
        require(
            self.cache is None or bool(self.cache.strip()),
            "data.cache",
            repr(self.cache),
            "expected null, or a folder",
        )

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

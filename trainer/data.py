"""Text to chunks of tokens: the interpreter's own library, local files, or a Hugging Face dataset.

Documents are encoded in a fixed order, joined with the tokenizer's end-of-text token between them, cut into chunks of
``seq_len`` tokens and shuffled by the seed: chunk ``i`` is the same on every machine, in every process, after every resume.
"""

import glob
import hashlib
import io
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from msattn.trainer.config import DataConfig
from msattn.trainer.errors import UserError

HELD_OUT_SHARE = 10  # one document in so many
_SUFFIXES = (".txt", ".jsonl", ".parquet")
_ENCODE_AT_ONCE = 64  # documents


@dataclass(frozen=True)
class Document:
    """One text; ``name`` decides whether it is held out."""

    name: str
    text: str


def documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """The training documents of ``cfg``, or the held-out ones, in a fixed order.

    Raises
    ------
    UserError : a path that does not exist or holds no text file, a file that is not UTF-8 (named with the byte), a missing
        column, a Hub dataset that does not load.
    """
    if cfg.source == "text" and cfg.heldout_path is not None:
        yield from _local(
            "data.heldout_path" if heldout else "data.path", cfg.heldout_path if heldout else cfg.path, cfg.column
        )
        return
    if cfg.source == "stdlib":
        found = _library()
    elif cfg.source == "text":
        found = _local("data.path", cfg.path, cfg.column)
    else:
        found = _hub(cfg)
    yield from (document for document in found if is_held_out(document.name) == heldout)


def is_held_out(name: str) -> bool:
    """Whether the document called ``name`` belongs to the held-out tenth: by a hash, the same everywhere."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _library() -> Iterator[Document]:
    """The modules of the running interpreter's standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}.isdisjoint(parts):
            # Leniently: a module may declare another encoding than UTF-8.
            yield Document(".".join(parts), path.read_text(encoding="utf-8", errors="replace"))


def _local(key: str, path: str | None, column: str) -> Iterator[Document]:
    """Documents of a file, a folder (searched to the bottom) or a glob; a jsonl or parquet row is one document."""
    root = Path(str(path)).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.is_file() and _kind(file) is not None)
    else:
        files = sorted(Path(name) for name in glob.glob(str(root), recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(f"{key}={path}: no such file, or no {', '.join(_SUFFIXES)} (.gz, .zst) file in it")
    for file in files:
        name = str(file.relative_to(root)) if root.is_dir() else file.name
        kind = _kind(file)
        if kind is None:
            raise UserError(f"{key}={file}: accepted are {', '.join(_SUFFIXES)}, also packed as .gz or .zst")
        if kind == ".txt":
            yield Document(name, _text(file))
        else:
            rows = _parquet_rows(file, column) if kind == ".parquet" else _json_rows(file, column)
            yield from (Document(f"{name}:{number}", text) for number, text in enumerate(rows))


def _kind(file: Path) -> str | None:
    """``.txt``, ``.jsonl`` or ``.parquet``, whatever it is packed in; None for other files."""
    suffixes = file.suffixes
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes = suffixes[:-1]
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else None


def _bytes(file: Path) -> bytes:
    import pyarrow

    try:
        with pyarrow.input_stream(str(file), compression="detect") as stream:  # unpacks .gz and .zst
            return stream.read()
    except OSError as error:
        raise UserError(f"data.path={file}: {error}") from error


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path={file}: not UTF-8 at byte {error.start}") from error


def _json_rows(file: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"data.path={file}: line {number} is not JSON ({error.msg})") from error
        yield _column(row, column, f"{file}, line {number}")


def _parquet_rows(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(io.BytesIO(_bytes(file)))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data.path={file}: {error}") from error
    for batch in table.iter_batches():
        for row in batch.to_pylist():
            yield _column(row, column, str(file))


def _column(row: Any, column: str, where: str) -> str:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"data.column={column}: {where} has no such text (there are: {names})")
    return text


def _hub(cfg: DataConfig) -> Iterator[Document]:
    """A streamed Hub dataset, in its own order; a document's number is its name."""
    import datasets

    try:
        rows = datasets.load_dataset(str(cfg.path), cfg.subset, split=cfg.split, streaming=True)
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={cfg.path}: {error}") from error
    for number, row in enumerate(rows):
        yield Document(f"{cfg.path}:{number}", _column(row, cfg.column, str(cfg.path)))


class Chunks(Dataset[dict[str, Tensor]]):
    """Chunks of ``seq_len`` tokens; item ``i`` is ``{"input_ids": int64 [seq_len]}``.

    Attributes
    ----------
    fingerprint : hash of the tokens of all chunks in their order; manifests carry it.
    """

    def __init__(self, tokens: np.ndarray, tokenizer: Any) -> None:
        self._tokens = tokens  # [chunks, seq_len]
        self._tokenizer = tokenizer
        digest = hashlib.sha256(repr(tokens.shape).encode())
        digest.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self._tokens[index].astype(np.int64))}

    def num_bytes(self, index: int) -> int:
        """UTF-8 bytes of chunk ``index`` after its first token: what its next-token losses are spread over."""
        chunk = self._tokens[index].tolist()
        whole, first = self._tokenizer.batch_decode(
            [chunk, chunk[:1]], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return len(whole.encode()) - len(first.encode())


def chunks(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    heldout: bool = False,
    seq_len: int | None = None,
    num_chunks: int | None = None,
) -> Chunks:
    """Cut the documents of ``cfg`` into chunks, in an order drawn from ``seed``.

    Parameters
    ----------
    tokenizer : a Hugging Face tokenizer.
    seq_len, num_chunks : instead of those of ``cfg``; ``num_chunks`` takes that many of the shuffled chunks. A ``hub``
        source is read only as far as they need.

    Raises
    ------
    UserError : as :func:`documents`; fewer tokens than one chunk; a ``hub`` source without ``num_chunks``.
    """
    seq_len, num_chunks = seq_len or cfg.seq_len, num_chunks or cfg.num_chunks
    if cfg.source == "hub" and num_chunks is None:
        raise UserError("data.num_chunks=null: a streamed data set needs a number of chunks")
    needed = num_chunks * seq_len if cfg.source == "hub" and num_chunks else None
    tokens = encode(documents(cfg, heldout=heldout), tokenizer, at_least=needed)
    count = len(tokens) // seq_len
    if count == 0:
        what = "held-out documents" if heldout else "documents"
        hint = "; data.heldout_path names others" if heldout and cfg.source == "text" else ""
        where = f"data.path={cfg.path}" if cfg.path else f"data={cfg.source}"
        raise UserError(f"data.seq_len={seq_len}: the {what} of {where} hold only {len(tokens)} tokens{hint}")
    order = np.random.default_rng(seed).permutation(count)[:num_chunks]
    return Chunks(tokens[: count * seq_len].reshape(count, seq_len)[order], tokenizer)


def encode(found: Iterator[Document], tokenizer: Any, *, at_least: int | None = None) -> np.ndarray:
    """Tokens of the documents, int32 [n], each document followed by the end-of-text token.

    Stops once there are ``at_least`` tokens.
    """
    pieces: list[np.ndarray] = []
    total = 0
    while batch := list(islice(found, _ENCODE_AT_ONCE)):
        encoded = tokenizer([document.text for document in batch], add_special_tokens=False, verbose=False)["input_ids"]
        pieces += [np.asarray([*ids, tokenizer.eos_token_id], np.int32) for ids in encoded]
        total += sum(len(ids) + 1 for ids in encoded)
        if at_least is not None and total >= at_least:
            break
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

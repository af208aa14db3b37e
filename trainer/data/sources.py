"""Documents of a data source: the standard library, local files, or a Hugging Face dataset."""

import glob
import hashlib
import io
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from msattn.trainer.config import DataConfig
from msattn.trainer.data.retrieval import inject_needles
from msattn.trainer.errors import UserError

HELD_OUT_SHARE = 10  # one document in so many, or the last one in so many of a lone document's characters
_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Document:
    """One text; ``name`` decides whether it is held out."""

    name: str
    text: str


def documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """The training documents of ``cfg``, or the held-out ones, in a fixed order.

    ``cfg.heldout_path`` names held-out documents of their own. Without it a tenth of the documents is held out, by a hash of
    their names; where that leaves one side with none (a lone document, or a few), the last tenth of each one's text is.
    ``cfg.needles`` weaves sentences into either side (:func:`msattn.trainer.data.retrieval.inject_needles`).

    Raises
    ------
    UserError : a path that does not exist or holds no text file, a file that is not UTF-8 (named with the byte), damaged
        or of another kind, a missing column, a Hub dataset that does not load.
    """
    for document in _plain(cfg, heldout=heldout):
        yield Document(document.name, inject_needles(document.text, document.name)) if cfg.needles else document


def _plain(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """The documents as they stand."""
    if cfg.source == "text" and cfg.heldout_path is not None:
        key, path = ("data.heldout_path", cfg.heldout_path) if heldout else ("data.path", str(cfg.path))
        yield from _local(key, path, cfg.column)
        return
    if cfg.source == "stdlib":
        found = _library()
    elif cfg.source == "text":
        found = _local("data.path", str(cfg.path), cfg.column)
    else:
        found = _hub(cfg)
    yield from _side(found, heldout=heldout)


def _side(found: Iterator[Document], *, heldout: bool) -> Iterator[Document]:
    """The training or the held-out side of ``found``; both have something."""
    first: list[Document] = []
    for document in found:
        first.append(document)
        if is_held_out(document.name) != is_held_out(first[0].name):
            break
    else:
        for document in first:
            cut = len(document.text) * (HELD_OUT_SHARE - 1) // HELD_OUT_SHARE
            # Names of their own: the needles that are woven in are drawn from them.
            yield (
                Document(f"{document.name}, end", document.text[cut:])
                if heldout
                else Document(document.name, document.text[:cut])
            )
        return
    yield from (document for document in chain(first, found) if is_held_out(document.name) == heldout)


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


def _local(key: str, path: str, column: str) -> Iterator[Document]:
    """Documents of a file, a folder (searched to the bottom) or a glob, without empty ones; a jsonl or parquet row is one."""
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.is_file() and _kind(file) is not None)
    elif root.is_file():  # its name may hold what a glob would take for a pattern
        files = [root]
    else:
        files = sorted(Path(name) for name in glob.glob(str(root), recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(f"{key}={path}: no such file, or no {', '.join(_SUFFIXES)} (.gz, .zst) file in it")
    for file in files:
        name = str(file.relative_to(root)) if root.is_dir() else file.name
        for document in _read(file, name, column, f"{key}={file}"):
            if document.text:
                yield document


def _read(file: Path, name: str, column: str, where: str) -> Iterator[Document]:
    kind = _kind(file)
    if kind is None:
        raise UserError(f"{where}: accepted are {', '.join(_SUFFIXES)}, also packed as .gz or .zst")
    content = _unpacked(file, where)
    if kind == ".txt":
        yield Document(name, _decoded(content, where))
    else:
        rows = _parquet_rows(content, column, where) if kind == ".parquet" else _json_rows(content, column, where)
        yield from (Document(f"{name}:{number}", text) for number, text in enumerate(rows))


def _kind(file: Path) -> str | None:
    """``.txt``, ``.jsonl`` or ``.parquet``, whatever it is packed in; None for other files."""
    suffixes = file.suffixes
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes = suffixes[:-1]
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else None


def _unpacked(file: Path, where: str) -> bytes:
    import pyarrow

    try:
        with pyarrow.input_stream(str(file), compression="detect") as stream:  # unpacks .gz and .zst
            return stream.read()
    except OSError as error:
        raise UserError(f"{where}: {error}") from error


def _decoded(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _json_rows(content: bytes, column: str, where: str) -> Iterator[str]:
    # Not splitlines(): it also splits at what may stand unescaped within a JSON string, as U+2028.
    for number, line in enumerate(_decoded(content, where).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: line {number} is not JSON ({error.msg})") from error
        yield _column(row, column, f"{where}, line {number}")


def _parquet_rows(content: bytes, column: str, where: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        names = table.schema_arrow.names
        texts = table.read(columns=[column]).column(column).to_pylist() if column in names else []
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: {error}") from error
    if column not in names:
        raise UserError(f"data.column={column}: {where} has no such column (there are: {', '.join(names)})")
    for number, text in enumerate(texts):
        yield _column({column: text}, column, f"{where}, row {number}")


def _column(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or column not in row:
        names = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}, no object"
        raise UserError(f"data.column={column}: {where} has no such column (there are: {names})")
    if not isinstance(row[column], str):
        raise UserError(f"data.column={column}: {where} holds {row[column]!r:.40} there, not text")
    return row[column]


def _hub(cfg: DataConfig) -> Iterator[Document]:
    """A streamed Hub dataset, in its own order; a document's number is its name."""
    try:
        import datasets

        rows = datasets.load_dataset(str(cfg.path), cfg.subset, split=cfg.split, streaming=True)
    except ModuleNotFoundError as error:
        raise UserError(f"data=hub: {error}; pip install datasets, or data=text") from error
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={cfg.path}: {error}") from error
    for number, row in enumerate(rows):
        yield Document(f"{cfg.path}:{number}", _column(row, cfg.column, f"data.path={cfg.path}, row {number}"))

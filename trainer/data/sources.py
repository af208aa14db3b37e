"""Documents of a data source: the standard library, local files, or a Hugging Face dataset."""

import hashlib
import io
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from msattn.trainer.config import DataConfig
from msattn.trainer.config.text_files import SUFFIXES, file_type, text_files
from msattn.trainer.data.retrieval import inject_needles
from msattn.trainer.errors import UserError

HELD_OUT_FRACTION = 10  # one in ten documents is held out, or the last tenth of the characters of each


@dataclass(frozen=True)
class Document:
    """A text and its name, which decides whether the document is held out."""

    name: str
    text: str


def documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """Yields the training documents of ``cfg``, or the held-out ones, in a fixed order.

    Held-out documents are those of ``cfg.heldout_path``, if it is set. Otherwise a hash of the names holds out a tenth of the
    documents; if this would leave one split empty (as with a single document), the last tenth of each text is held out instead.
    ``cfg.needles`` injects needles into both splits (:func:`msattn.trainer.data.retrieval.inject_needles`).

    Raises
    ------
    UserError : a path that does not exist or has no text file, a damaged file or one of another type, text that is not UTF-8
        (the message names the byte), a missing column, a Hub dataset that does not load.
    """
    for document in _plain_documents(cfg, heldout=heldout):
        yield Document(document.name, inject_needles(document.text, document.name)) if cfg.needles else document


def _plain_documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """Yields the documents of :func:`documents` without needles."""
    if cfg.source == "text" and cfg.heldout_path is not None:
        key, path = ("data.heldout_path", cfg.heldout_path) if heldout else ("data.path", str(cfg.path))
        yield from _local_documents(key, path, cfg.column)
        return
    if cfg.source == "stdlib":
        found = _stdlib_documents(cfg.path)
    elif cfg.source == "text":
        found = _local_documents("data.path", str(cfg.path), cfg.column)
    else:
        found = _hub_documents(cfg)
    yield from _split(found, heldout=heldout)


def _split(found: Iterator[Document], *, heldout: bool) -> Iterator[Document]:
    """Yields the training or the held-out documents of ``found``; neither split is empty."""
    first: list[Document] = []
    for document in found:
        first.append(document)
        if is_held_out(document.name) != is_held_out(first[0].name):
            break
    else:
        for document in first:
            cut = len(document.text) * (HELD_OUT_FRACTION - 1) // HELD_OUT_FRACTION
            # The two parts have different names, so that different needles are injected.
            yield (
                Document(f"{document.name}, end", document.text[cut:])
                if heldout
                else Document(document.name, document.text[:cut])
            )
        return
    yield from (document for document in chain(first, found) if is_held_out(document.name) == heldout)


def is_held_out(name: str) -> bool:
    """Returns True if the hash of ``name`` holds the document out; the same on every machine."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_FRACTION == 0


def _stdlib_documents(pattern: str | None) -> Iterator[Document]:
    """Yields the modules of the interpreter's standard library, without its tests and installed packages.

    With a ``pattern``, only those whose names match it, e.g. ``json.*``.
    """
    root, matches = Path(sysconfig.get_path("stdlib")), False
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts)
        excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
        if excluded.isdisjoint(parts) and fnmatchcase(name, pattern or "*"):
            matches = True
            # Errors are replaced: a module may declare another encoding than UTF-8.
            yield Document(name, path.read_text(encoding="utf-8", errors="replace"))
    if not matches:
        raise UserError(f"data.path={pattern}: no module of Python's standard library has such a name")


def _local_documents(key: str, path: str, column: str) -> Iterator[Document]:
    """Yields the non-empty documents of a file, a folder (recursively) or a glob; jsonl and parquet have one per row."""
    root = Path(path).expanduser()
    for file in text_files(key, path):
        name = str(file.relative_to(root)) if root.is_dir() else file.name
        for document in _read_file(file, name, column, f"{key}={file}"):
            if document.text:
                yield document


def _read_file(file: Path, name: str, column: str, where: str) -> Iterator[Document]:
    kind = file_type(file)
    if kind is None:
        raise UserError(f"{where}: accepted are {', '.join(SUFFIXES)}, also compressed as .gz or .zst")
    content = _decompress(file, where)
    if kind in (".txt", ".md"):
        yield Document(name, _decode(content, where))
    else:
        rows = _parquet_rows(content, column, where) if kind == ".parquet" else _json_rows(content, column, where)
        yield from (Document(f"{name}:{number}", text) for number, text in enumerate(rows))


def _decompress(file: Path, where: str) -> bytes:
    import pyarrow

    try:
        with pyarrow.input_stream(str(file), compression="detect") as stream:  # decompresses .gz and .zst
            return stream.read()
    except OSError as error:
        raise UserError(f"{where}: {error}") from error


def _decode(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _json_rows(content: bytes, column: str, where: str) -> Iterator[str]:
    # Not splitlines(), which also splits at characters that JSON strings may contain unescaped, such as U+2028.
    for number, line in enumerate(_decode(content, where).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: line {number} is not JSON ({error.msg})") from error
        yield _text_of(row, column, f"{where}, line {number}")


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
        raise UserError(f"data.column={column}: {where} has no such column (it has: {', '.join(names)})")
    for number, text in enumerate(texts):
        yield _text_of({column: text}, column, f"{where}, row {number}")


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or column not in row:
        names = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
        raise UserError(f"data.column={column}: {where} has no such column (it has: {names})")
    if not isinstance(row[column], str):
        raise UserError(f"data.column={column}: {where} has {row[column]!r:.40} in this column, accepted is text")
    return row[column]


def _hub_documents(cfg: DataConfig) -> Iterator[Document]:
    """Yields the documents of a streamed Hub dataset, in its order and named by their row number."""
    try:
        import datasets

        rows = datasets.load_dataset(str(cfg.path), cfg.subset, split=cfg.split, streaming=True)
    except ModuleNotFoundError as error:
        raise UserError(f"data=hub: {error}; pip install datasets, or data=text") from error
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={cfg.path}: {error}") from error
    for number, row in enumerate(rows):
        yield Document(f"{cfg.path}:{number}", _text_of(row, cfg.column, f"data.path={cfg.path}, row {number}"))

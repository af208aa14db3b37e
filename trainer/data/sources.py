"""Documents of a data source: the standard library, local files, or a Hugging Face dataset."""

import hashlib
import lzma
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msattn.trainer.config import DataConfig
from msattn.trainer.config.text_files import (
    COMPRESSED,
    SUFFIXES,
    check_size,
    decode,
    file_type,
    is_unicode,
    largest_corpus,
    largest_text,
    open_bytes,
    parse_json,
    read_stream,
    refused,
    text_files,
)
from msattn.trainer.config.values import shown
from msattn.trainer.data.hub import hub_identity, hub_rows
from msattn.trainer.data.tasks.injection import inject_needles
from msattn.trainer.errors import UserError, first_line

T = TypeVar("T")
PARQUET_ROWS = 64  # decoded at once: a small file may hold very many equal texts
# one in ten documents is held out, or the last tenth of the characters of each
HELD_OUT_FRACTION = 10


@dataclass(frozen=True)
class Document:
    """A text and its name, which decides whether the document is held out."""

    name: str
    text: str


def documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """Yields the training or held-out documents of ``cfg``, in a fixed order.

    Held-out documents come from ``cfg.heldout_path`` or ``cfg.heldout_split`` if one is set.
    Otherwise a hash of the names selects a tenth of the documents; if this would leave one split
    empty (as with a single document), the last tenth of each text is held out instead.
    ``cfg.needles`` injects needles into both splits (:mod:`msattn.trainer.data.tasks.injection`).
    Raises UserError for a path without text, a file that is damaged, of another type or not UTF-8,
    or a failing dataset.
    """
    for document in plain_documents(cfg, heldout=heldout):
        yield (
            Document(document.name, inject_needles(document.text, document.name))
            if cfg.needles
            else document
        )


def plain_documents(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """Yields the documents of :func:`documents` without needles."""
    if cfg.is_library:
        all_documents = _stdlib_documents(cfg.path)
    elif cfg.source == "text":
        all_documents = local_documents(*_text_path(cfg, heldout), cfg.column)
    else:
        split = cfg.heldout_split if heldout and cfg.heldout_split is not None else cfg.split
        all_documents = _hub_documents(cfg, split)
    yield from (
        _split(all_documents, heldout=heldout)
        if cfg.heldout_path is None and cfg.heldout_split is None
        else all_documents
    )


def source_identity(cfg: DataConfig, *, heldout: bool) -> Any | None:
    """Returns JSON values that change when the documents do, or None if they are unknown.

    A file counts as changed if its path, size, mtime or ctime differs; a Hub dataset, if its commit
    differs.
    """
    ignored = ("seq_len", "num_chunks", "bos", "cache")
    settings = {
        item.name: getattr(cfg, item.name) for item in fields(cfg) if item.name not in ignored
    }
    if cfg.source == "hub":
        identity = hub_identity(cfg)
    elif cfg.is_library:
        identity = [_file_identity(path) for path in _stdlib_files(cfg.path).values()]
    else:
        identity = [_file_identity(path) for path in text_files(*_text_path(cfg, heldout))]
    return (
        None if identity is None else {"settings": settings, "heldout": heldout, "found": identity}
    )


def _file_identity(path: Path) -> list[Any]:
    status = path.stat()
    name = os.fsencode(path.absolute()).decode("utf-8", "backslashreplace")
    return [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _text_path(cfg: DataConfig, heldout: bool) -> tuple[str, str]:
    if heldout and cfg.heldout_path is not None:
        return "data.heldout_path", cfg.heldout_path
    return "data.path", str(cfg.path)


def _split(all_documents: Iterator[Document], *, heldout: bool) -> Iterator[Document]:
    """Yields the training or the held-out documents of ``all_documents``; neither split is
    empty.
    """
    first: list[Document] = []
    for document in all_documents:
        first.append(document)
        if is_held_out(document.name) != is_held_out(first[0].name):
            break
    else:
        for document in first:
            cut = len(document.text) * (HELD_OUT_FRACTION - 1) // HELD_OUT_FRACTION
            # The two parts have different names, so that different needles are injected.
            end = Document(f"{document.name}, end", document.text[cut:])
            yield end if heldout else Document(document.name, document.text[:cut])
        return
    yield from (
        document
        for document in chain(first, all_documents)
        if is_held_out(document.name) == heldout
    )


def is_held_out(name: str) -> bool:
    """Returns True if the hash of ``name`` selects the document as held out."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_FRACTION == 0


def _stdlib_documents(pattern: str | None) -> Iterator[Document]:
    """Yields the modules of Python's standard library whose names match ``pattern``, except tests
    and packages.
    """
    for name, path in _stdlib_files(pattern).items():
        # Errors are replaced: a module may declare another encoding than UTF-8.
        yield Document(name, path.read_text(encoding="utf-8", errors="replace"))


def _stdlib_files(pattern: str | None) -> dict[str, Path]:
    """Returns the files of :func:`_stdlib_documents`, keyed by module name."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    root, paths, modules = Path(sysconfig.get_path("stdlib")), list[Path](), {}
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - excluded  # not searched: they may have many files
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(paths):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts)
        if excluded.isdisjoint(parts) and fnmatchcase(name, pattern or "*"):
            modules[name] = path
    if not modules:
        raise UserError(
            f"data.path={pattern}: no module of Python's standard library has a matching name"
        )
    return modules


def local_documents(key: str, path: str, column: str = "text") -> Iterator[Document]:
    """Yields the non-empty documents of a file, folder or glob; ``key`` names ``path`` in
    messages.
    """
    root = Path(os.path.expanduser(path))
    most, left = largest_text(), largest_corpus()
    for file in text_files(key, path):
        where = f"{key}={shown(file)}"
        name = os.fsencode(file.relative_to(root) if root.is_dir() else file.name).decode(
            "utf-8", "backslashreplace"
        )
        for document in _read_file(file, name, column, where, left):
            check_size(len(document.text), min(most, left), f"{where}, {document.name}")
            left -= len(document.text)
            if document.text:
                yield document


def _read_file(file: Path, name: str, column: str, where: str, most: int) -> Iterator[Document]:
    """Yields the documents of a file of at most ``most`` bytes after decompression."""
    kind = file_type(file)
    if kind is None:
        raise UserError(
            f"{where}: expected {', '.join(SUFFIXES)}, also compressed as {', '.join(COMPRESSED)}"
        )
    content = decompressed(file, where, most)
    if kind in (".txt", ".md"):
        yield Document(name, decode(content, where))
        return
    if kind == ".parquet":
        rows = _parquet_rows(content, column, where)
    else:
        rows = (_text_of(row, column, place) for place, row in json_lines(content, where))
    yield from (Document(f"{name}:{number}", text) for number, text in enumerate(rows))


def decompressed(file: Path, where: str, most: int) -> bytearray:
    """Returns the content of a file that may be compressed, of at most ``most`` bytes."""
    import pyarrow

    suffix = file.suffix.lower()
    codec = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
    with refused(where), open_bytes(file, where, most) as raw:
        if suffix == ".xz":
            return _decompress_xz(raw, where, most)
        return read_stream(
            pyarrow.input_stream(raw, compression=codec) if codec else raw, where, most
        )


def _decompress_xz(raw: BinaryIO, where: str, most: int) -> bytearray:
    """Like :func:`decompressed`, for a format that pyarrow does not read."""
    try:
        return read_stream(lzma.LZMAFile(raw), where, most)
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{where}: damaged xz data ({first_line(error)})") from error


def json_lines(content: bytearray, where: str) -> Iterator[tuple[str, Any]]:
    """Yields ``(where and line number, value)`` of each line of jsonl."""
    # splitlines() would also split at characters that JSON strings may contain unescaped, such as
    # U+2028.
    for number, line in enumerate(decode(content, where).split("\n"), start=1):
        if line.strip():
            place = f"{where}, line {number}"
            yield place, parse_json(line, place)


def _parquet_rows(content: bytearray, column: str, where: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet
    from pyarrow import types

    try:
        schema = pyarrow.parquet.read_schema(pyarrow.BufferReader(content))
        if schema.names.count(column) != 1:
            fault = "several columns of this name" if column in schema.names else "no such column"
            raise UserError(
                f"data.column={column}: {where} has {fault} (it has: {', '.join(schema.names)})"
            )
        stored = schema.field(column).type
        kind = stored.value_type if types.is_dictionary(stored) else stored
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(
                f"data.column={column}: {where} has {kind} in this column, expected text"
            )
        table = pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(content), page_checksum_verification=True
        )
        rows = (
            text
            for batch in table.iter_batches(PARQUET_ROWS, columns=[column])
            for text in batch.column(0)
        )
        number = -1
        for number, text in enumerate(rows):
            yield _text_of({column: text.as_py()}, column, f"{where}, row {number}")
        if number + 1 != table.metadata.num_rows:  # a page with another type is skipped
            raise UserError(
                f"{where}: damaged, {number + 1:,} of {table.metadata.num_rows:,} rows found"
            )
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: a text that is not UTF-8") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: {first_line(error)}") from error


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or column not in row:
        names = (
            ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
        )
        raise UserError(f"data.column={column}: {where} has no such column (it has: {names})")
    if not isinstance(row[column], str):
        raise UserError(
            f"data.column={column}: {where} has {row[column]!r:.40} in this column, expected text"
        )
    if not is_unicode(row[column]):
        raise UserError(
            f"data.column={column}: {where} has half of a surrogate pair in this column, expected "
            f"Unicode text"
        )
    return row[column]


def batched(
    items: Iterable[T], size_of: Callable[[T], int], *, most: int, size: int
) -> Iterator[list[T]]:
    """Yields lists of ``items``. A list ends when it has ``most`` items, or when the sum of their
    sizes exceeds ``size``.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size_of(item)
        if len(batch) == most or total > size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _hub_documents(cfg: DataConfig, split: str) -> Iterator[Document]:
    """Yields the documents of a split of a streamed Hub dataset, in order, named by row number."""
    name = str(cfg.path) if split == cfg.split else f"{cfg.path}:{split}"
    for number, row in enumerate(hub_rows(cfg, split)):
        yield Document(
            f"{name}:{number}", _text_of(row, cfg.column, f"data.path={cfg.path}, row {number}")
        )

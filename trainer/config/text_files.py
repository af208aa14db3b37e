"""Text files that a user names: finding and reading them. Imports nothing heavy, so that a wrong
path is refused at once.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.memory import free_memory

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".xz", ".zst")
# bytes of memory for each byte of a text that is encoded at once, measured with the embedded
# tokenizer
MEMORY_PER_BYTE = 160
PIECE = 2**20  # bytes that are read at once


def text_files(key: str, path: str) -> list[Path]:
    """Returns the files of a file name, a folder (recursively) or a glob, in a fixed order.

    Hidden files in a folder are left out: copies and metadata of editors and systems. A glob's
    ``**``, like a folder, does not follow symbolic links, and its wildcards do not match hidden
    names. Raises UserError: there is no text file, it is a device or a pipe, or a link leads to no
    file; the message names ``key``.
    """
    where = f"{key}={shown(path)}"
    root = Path(os.path.expanduser(path))
    with refused(where):
        if not path.strip() or "\0" in path:
            files = []
        elif root.is_dir():
            found = (
                file for file in root.rglob("*") if not _is_hidden(file.relative_to(root).parts)
            )
            files = _existing((file for file in found if file_type(file) is not None), key)
        elif (
            root.exists()
        ):  # checked before the glob, as a file name may contain its metacharacters
            files = [root]
            check_regular(root, where)
        else:
            files = _existing(_glob(root), key)
    if not files:
        raise UserError(
            f"{where}: no such file, or no {', '.join(SUFFIXES)} ({', '.join(COMPRESSED)}) file "
            f"in it"
        )
    return files


def _existing(found: Iterable[Path], key: str) -> list[Path]:
    """Returns the regular files of names that were found; raises UserError for a dangling link."""
    files = sorted(file for file in found if file.is_file() or not file.exists())
    for file in files:
        if not file.exists():
            raise UserError(f"{key}={shown(file)}: a link to a file that does not exist")
    return files


def _glob(pattern: Path) -> Iterator[Path]:
    """Yields what ``pattern`` matches."""
    start = next(
        (i for i, part in enumerate(pattern.parts) if re.search(r"[*?\[]", part)),
        len(pattern.parts),
    )
    hidden = _is_hidden(pattern.parts[start:])
    text = re.sub(
        r"(?<=[^/])\*\*+|\*\*+(?=[^/])", "*", pattern.relative_to(pattern.anchor).as_posix()
    )
    text = re.sub(r"(\*\*/)+", "**/", text)  # the same, but not searched again and again
    for file in Path(pattern.anchor or ".").glob(text):
        if hidden or not _is_hidden(file.parts[start:]):
            yield file


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def file_type(file: Path) -> str | None:
    """Returns one of :data:`SUFFIXES`, ignoring case and a compression suffix; None for other
    files.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else None


def read_text(path: str | Path, where: str) -> str:
    """Returns the text of a regular UTF-8 file without a byte order mark, with line ends
    ``\\n``.
    """
    file, most = Path(os.path.expanduser(path)), largest_text()
    with refused(where), open_bytes(file, where, most) as stream:
        return decode(read_stream(stream, where, most), where)


def open_bytes(file: Path, where: str, most: int) -> BinaryIO:
    """Opens a regular file of at most ``most`` bytes; some files of ``/proc`` look regular and
    would block.
    """
    check_regular(file, where)
    check_size(file.stat().st_size, most, where)
    return open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def check_regular(file: Path, where: str) -> None:
    """Raises UserError for a device or a pipe, which may have no end, and for a path with a NUL;
    OSError if there is none.
    """
    try:
        mode = file.stat().st_mode
    except ValueError as error:  # a NUL character
        raise UserError(f"{where}: {first_line(error)}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{where}: a device, pipe or socket; expected a regular file")


def largest_text() -> int:
    """Returns the bytes of text that can be encoded at once in the free memory."""
    return free_memory() // MEMORY_PER_BYTE


def largest_corpus() -> int:
    """Returns the bytes of text that may be read in all: a quarter of the free memory, as their
    tokens take as much again.
    """
    return free_memory() // 4


def read_stream(stream: BinaryIO | BufferedIOBase, where: str, most: int) -> bytearray:
    """Returns the content of a stream of at most ``most`` bytes, after decompression if it
    decompresses.
    """
    content = bytearray()
    while piece := stream.read(PIECE):
        content += piece
        check_size(len(content), most, where)
    return content


def check_size(size: int, most: int, where: str) -> None:
    """Raises UserError for text of more than ``most`` bytes."""
    if size > most:
        raise UserError(
            f"{where}: more than {most / 1e6:,.1f} MB of text, more than fits in free memory"
        )


def decode(content: bytes | bytearray, where: str) -> str:
    """Returns UTF-8 as text, without a byte order mark and with line ends ``\\n``."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def parse_json(line: str, where: str) -> Any:
    """Returns the value of a line of jsonl."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise UserError(f"{where}: JSON that is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({first_line(error)})") from error


def is_unicode(text: str) -> bool:
    """Returns False for text with surrogates, which stand for bytes that are not UTF-8 and occur in
    JSON's ``\\ud800``.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Raises errors of the operating system as a UserError that begins with ``where``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or first_line(error)}") from error

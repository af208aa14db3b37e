"""The text files that ``data.path`` names. Imports nothing heavy, so that a wrong path is refused at once."""

import glob
from pathlib import Path

from msattn.trainer.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


def text_files(key: str, path: str) -> list[Path]:
    """Returns the files of a file name, a folder (recursively) or a glob, in a fixed order.

    Raises
    ------
    UserError : there is no text file; the message names ``key``.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.is_file() and file_type(file) is not None)
    elif root.is_file():  # checked before the glob, as a file name may contain its metacharacters
        files = [root]
    else:
        files = sorted(Path(name) for name in glob.glob(str(root), recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(f"{key}={path}: no such file, or no {', '.join(SUFFIXES)} (.gz, .zst) file in it")
    return files


def file_type(file: Path) -> str | None:
    """Returns one of :data:`SUFFIXES`, ignoring a compression suffix; None for other files."""
    suffixes = file.suffixes
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes = suffixes[:-1]
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else None

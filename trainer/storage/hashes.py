"""Hashes of files, which tell whether a folder is as it was written."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8  # hashing releases the GIL; checkpoints of large models take 100 GB in a few files


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hashes(folder: Path, *without: str) -> dict[str, str]:
    """Returns the hashes of all files below ``folder`` but those called ``without``, by their relative paths."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in without)
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(file_hash, paths))
    return {str(path.relative_to(folder)): value for path, value in zip(paths, hashes, strict=True)}


def first_difference(folder: Path, hashes: Mapping[str, str], *without: str) -> str | None:
    """Returns a clause about the first file below ``folder`` that differs from ``hashes``, or None if all are as written.

    Raises
    ------
    OSError : a file cannot be read.
    """
    found = folder_hashes(folder, *without)
    for name in sorted(hashes):
        if name not in found:
            return f"{name} is missing"
        if found[name] != hashes[name]:
            return f"{name} is damaged"
    return None

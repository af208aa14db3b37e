"""Hashes of files and folders, and files of tensors that hold a hash of their content: a damaged file counts as missing."""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.errors import first_line
from msattn.trainer.storage.replace import replace_file

THREADS = 8  # hashing releases the GIL; checkpoints of large models take 100 GB in a few files
Digest = Callable[[dict[str, Tensor], dict[str, str]], str]
"""Maps tensors and metadata to the hash that is stored with them; it also covers what the caller expects under this name."""


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
    """Returns a clause about the first file below ``folder`` that differs from ``hashes``, or None if all are as written."""
    found = folder_hashes(folder, *without)
    for name in sorted(hashes):
        if name not in found:
            return f"{name} is missing"
        if found[name] != hashes[name]:
            return f"{name} is damaged"
    return None


class DamagedFile(ValueError):
    """A file is not as it was written; the message gives the reason."""


def read_hashed(path: Path, digest: Digest | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors (memory-mapped) and the metadata of a file; ``digest=None`` does not compare the hash.

    Raises FileNotFoundError, or DamagedFile if the file cannot be read or its hash differs.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        intact = digest is None or metadata.get("hash") == digest(tensors, metadata)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DamagedFile(first_line(error)) from error
    if not intact:
        raise DamagedFile("its hash differs")
    return tensors, metadata


def write_hashed(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], digest: Digest) -> None:
    """Replaces a file by ``tensors``, ``metadata`` and the hash of both; readers see the old file or the new one."""
    with replace_file(path) as new:
        save_tensors(new, tensors, metadata | {"hash": digest(tensors, metadata)})


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, the same bytes each time: the library itself writes metadata in random order."""
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = metadata
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))

"""Hashes of files and folders, and tensor files that contain a hash of their content, so that
damage is detected.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.errors import first_line
from msattn.trainer.storage.replace import replace_file

THREADS = 8  # hashing releases the GIL; checkpoints of large models take 100 GB in a few files


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hashes(folder: Path, *without: str) -> dict[str, str]:
    """Returns the hashes of all files below ``folder``, except files named ``without``, by relative
    path.
    """
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in without
    )
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(file_hash, paths))
    return {str(path.relative_to(folder)): value for path, value in zip(paths, hashes, strict=True)}


def first_difference(folder: Path, hashes: Mapping[str, str], *without: str) -> str | None:
    """Returns a clause about the first file below ``folder`` that differs from ``hashes``, or None
    if all are as written.
    """
    actual = folder_hashes(folder, *without)
    for name in sorted(hashes):
        if name not in actual:
            return f"{name} is missing"
        if actual[name] != hashes[name]:
            return f"{name} is damaged"
    return None


class DamagedFile(ValueError):
    """Raised if a file differs from what was written; the message gives the reason."""


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash(tensors: Mapping[str, Tensor], note: str, name: str, settings: str) -> str:
    return hashlib.sha256(
        "\n".join([name, content_hash(tensors), note, settings]).encode()
    ).hexdigest()


def read_hashed(
    path: Path, name: str | None = None, settings: str = ""
) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors (memory-mapped) and the note of a file; without ``name`` its hash is not
    compared.

    Raises FileNotFoundError, or DamagedFile if the file cannot be read, or was written with another
    name or other settings.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        note = metadata.get("note", "")
        intact = name is None or metadata.get("hash") == _hash(tensors, note, name, settings)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DamagedFile(first_line(error)) from error
    if not intact:
        raise DamagedFile("its hash differs")
    return tensors, note


def write_hashed(
    path: Path, tensors: Mapping[str, Tensor], name: str, settings: str = "", note: str = ""
) -> None:
    """Replaces a file by ``tensors``, ``note`` and the hash of all arguments; readers see the old
    file or the new one.
    """
    with replace_file(path) as new:
        save_tensors(
            new, dict(tensors), {"note": note, "hash": _hash(tensors, note, name, settings)}
        )


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file with reproducible bytes; the library itself writes metadata in
    random order.
    """
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = metadata
        file.seek(8)
        file.write(
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        )

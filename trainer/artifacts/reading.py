"""Reading of artifacts, with full validation."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.artifacts.folders import find
from msattn.trainer.artifacts.kinds import KINDS
from msattn.trainer.artifacts.manifest import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    Artifact,
    checksum,
    describe_tensor,
    read_manifest,
)
from msattn.trainer.errors import UserError
from msattn.trainer.storage.documents import (
    check_contained,
    check_regular,
    parse_yaml,
    read_text,
    root_of_links,
)
from msattn.trainer.storage.hashes import DamagedFile, content_hash, read_hashed

MAX_CONFIG_BYTES = 256_000  # real ones take 2 kB
ATTEMPTS = 5  # attempts to read an artifact that another process replaces at the same time


def read(path: str | Path, kind: str | None = None) -> Artifact:
    """Reads an artifact of ``kind`` and validates all of its files; reads it again if a writer
    replaces it meanwhile.

    Raises UserError for missing, incomplete or altered files, links that leave the folder, values
    that are not finite, another kind or format version; the message names the field.
    """
    for attempt in range(1, ATTEMPTS + 1):
        before = _identities(path)
        try:
            return _read(find(path, *([kind] if kind else [])), path, kind)
        except UserError:
            if attempt == ATTEMPTS or _identities(path) == before:
                raise
    raise AssertionError("the last attempt returns or raises")


def read_kind(path: str | Path) -> str:
    """Returns the kind of an artifact, reading only its manifest."""
    return read_manifest(find(path), path)["kind"]


def check_tensors(artifact: Artifact, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises UserError, with the first tensor that differs, if tensors are not float32 of these
    ``shapes``.
    """
    for name in sorted({*shapes, *artifact.tensors}):
        if name not in shapes:
            raise UserError(
                f"artifact {artifact.path}: {WEIGHTS} has a tensor {name:.80} that no "
                f"{artifact.kind} has"
            )
        if name not in artifact.tensors:
            raise UserError(f"artifact {artifact.path}: {WEIGHTS} has no tensor {name}")
        tensor = artifact.tensors[name]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != tuple(shapes[name]):
            actual = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise UserError(
                f"artifact {artifact.path}: {name} is {actual}, its manifest asks for float32 "
                f"{list(shapes[name])}"
            )


def _identities(path: str | Path) -> list[tuple[int, ...]]:
    """Returns numbers of the folder ``path`` and of its kinds, which change when a writer replaces
    one.
    """
    return [_identity(os.path.join(os.path.expanduser(str(path)), kind)) for kind in ("", *KINDS)]


def _identity(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    # inodes of deleted folders are used again
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _read(folder: Path, path: str | Path, kind: str | None) -> Artifact:
    for name in (MANIFEST, WEIGHTS, CONFIG):
        check_regular(folder / name, f"artifact {path}: {name}")
        check_contained(folder / name, root_of_links(folder), f"artifact {path}: {name}")
    manifest = read_manifest(folder, path, kind)
    where = f"artifact {path}: {CONFIG}"
    text = read_text(folder / CONFIG, where, MAX_CONFIG_BYTES)
    if manifest["checksum"] != checksum(manifest, text):
        raise UserError(
            f"artifact {path}: checksum of {MANIFEST} and {CONFIG} differs; one of the files was "
            f"altered"
        )
    config = parse_yaml(text, where)
    return Artifact(
        manifest["kind"], _read_tensors(folder, path, manifest), config, manifest, folder
    )


def _read_tensors(folder: Path, path: str | Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        tensors, _ = read_hashed(folder / WEIGHTS)
    except (FileNotFoundError, DamagedFile) as error:
        raise UserError(
            f"artifact {path}: {WEIGHTS} is damaged ({' '.join(str(error).split())})"
        ) from error
    described = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    if described != manifest["tensors"]:
        differing = sorted(
            name
            for name in described | manifest["tensors"]
            if described.get(name) != manifest["tensors"].get(name)
        )
        raise UserError(f"artifact {path}: tensors.{differing[0]:.80} differs from {MANIFEST}")
    if content_hash(tensors) != manifest["content_hash"]:
        raise UserError(
            f"artifact {path}: content_hash of {WEIGHTS} differs from {MANIFEST}; the file was "
            f"altered"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise UserError(
                f"artifact {path}: {name:.80} of {WEIGHTS} has values that are not finite"
            )
    return tensors

"""The manifest of an artifact: its schema, its checksum, and the comparison of its base model with
a model.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len
from torch import Tensor

from msattn.kernels.common.checks import MAX_HEAD_SIZE
from msattn.trainer.artifacts.kinds import KINDS
from msattn.trainer.errors import UserError
from msattn.trainer.storage.documents import checked, read_json

FORMAT_VERSION = 1
WEIGHTS, CONFIG, MANIFEST, CARD = "model.safetensors", "config.yaml", "manifest.json", "README.md"
MAX_MANIFEST_BYTES = 8_000_000  # those of models with 100 layers take 0.3 MB
SHAPE_FIELDS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")
IDENTITY_FIELDS = (*SHAPE_FIELDS, "config_hash", "weights_hash")
Count = Annotated[int, Interval(ge=1, le=10_000)]
Sha256 = Annotated[str, Len(64, 64)]


def identity(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a model's fingerprint in which two runs or artifacts of the same model
    agree.
    """
    return {field: fingerprint[field] for field in IDENTITY_FIELDS}


@dataclass(frozen=True)
class BaseModel:
    """The model that an artifact was made for, see
    :func:`msattn.trainer.models.identity.fingerprint`.
    """

    id: str
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Annotated[int, Interval(ge=1, le=MAX_HEAD_SIZE)]
    rope: dict[str, Any]
    config_hash: str
    weights_hash: str | None
    tokenizer_hash: str | None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor."""

    shape: list[Annotated[int, Interval(ge=0)]]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """The keys of ``manifest.json``."""

    kind: str
    format_version: int
    model: BaseModel
    data: str | dict[str, Any]
    seed: int
    versions: dict[str, str]
    metrics: dict[str, Any]
    details: dict[str, Any]
    tensors: dict[str, TensorInfo]
    content_hash: Sha256
    created: str
    checksum: Sha256


@dataclass(frozen=True)
class Artifact:
    """An artifact that was read from disk."""

    kind: str  # one of KINDS
    tensors: dict[str, Tensor]  # weights by name, on the CPU
    config: dict[str, Any]  # resolved configuration of the run that wrote it
    manifest: dict[str, Any]  # content of manifest.json
    path: Path  # local folder


def read_manifest(folder: Path, path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Returns the content of ``manifest.json``, with the types of :class:`Manifest`; ``path`` is
    the artifact's name in errors.

    Raises UserError for a missing or damaged file, a missing key, a wrong type, or another kind or
    format version.
    """
    where = f"artifact {path}: {MANIFEST}"
    manifest = read_json(folder / MANIFEST, where, MAX_MANIFEST_BYTES)
    for key in ("kind", "format_version"):
        if key not in manifest:
            raise UserError(f"{where} has no key {key}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"artifact {path}: format_version={manifest['format_version']!r:.60}: expected "
            f"{FORMAT_VERSION}"
        )
    if manifest["kind"] not in KINDS or kind not in (None, manifest["kind"]):
        raise UserError(
            f"artifact {path}: kind={manifest['kind']!s:.60}: expected {kind or ', '.join(KINDS)}"
        )
    checked(manifest, Manifest, where)
    return manifest


def checksum(manifest: Mapping[str, Any], config: str) -> str:
    """Returns the SHA-256 of a manifest without its key ``checksum``, and of the text of
    ``config.yaml``.

    It detects accidental changes; a deliberate change can include a new checksum.
    """
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps([rest, config], sort_keys=True).encode()).hexdigest()


def describe_tensor(tensor: Tensor) -> dict[str, Any]:
    """Returns the fields of :class:`TensorInfo`."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def check_model(
    manifest: Mapping[str, Any], fingerprint: Mapping[str, Any], *, strict: bool = True
) -> str | None:
    """Checks that the artifact with this ``manifest`` was made for the model with this
    ``fingerprint``.

    Raises UserError for a model with another shape or other RoPE parameters (the message names the
    first field that differs). Returns a warning, or raises UserError with ``strict``, if weights
    differ, as in a quantized model, or cannot be compared; otherwise None.
    """
    made_for = manifest["model"]
    origin = f"{manifest['kind']} artifact made for {made_for.get('id') or 'another model'}"
    unknown = None in (fingerprint.get("weights_hash"), made_for.get("weights_hash"))
    fields = IDENTITY_FIELDS[:-1] if unknown else IDENTITY_FIELDS
    differing = [field for field in fields if made_for.get(field) != fingerprint.get(field)]
    if differing:
        field = differing[0]
        warning = (
            f"{origin}: its {field} is {made_for.get(field)}, this model's is "
            f"{fingerprint.get(field)}"
        )
        if made_for.get("id") == fingerprint.get("id"):
            warning += (
                "; both models have this name, so set model.name= to keep their artifacts apart"
            )
    elif made_for.get("weights_hash") is None:
        warning = (
            f"{origin}: its manifest does not identify that model's weights, so these were "
            f"not compared"
        )
    elif unknown:
        warning = (
            f"{origin}: this model's weights are quantized, offloaded or divided among "
            f"ranks, so they were not compared"
        )
    else:
        return None
    if strict or set(differing) & set(SHAPE_FIELDS):
        raise UserError(warning)
    return f"{warning}; quality may differ from what was measured"

"""Artifacts on disk: written whole or not at all, read strictly.

An artifact is a folder of four files: ``model.safetensors``, ``config.yaml`` (the resolved run configuration),
``manifest.json`` (what it is, what it was made from and for) and ``README.md`` (a model card for the Hub). Never a pickle.
"""

import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from msattn import __version__
from msattn.trainer.errors import UserError, write_error

FORMAT_VERSION = 1
KINDS = ("gate", "kmeans", "qmodel")
WEIGHTS, CONFIG, MANIFEST, CARD = "model.safetensors", "config.yaml", "manifest.json", "README.md"
MANIFEST_KEYS = (
    "kind",
    "format_version",
    "model",
    "data",
    "seed",
    "versions",
    "metrics",
    "details",
    "tensors",
    "content_hash",
    "created",
)
IDENTITY_FIELDS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "config_hash", "rope", "weights_hash")
CARD_TITLES = {
    "gate": "SeerAttention gates: which key blocks each query block needs",
    "kmeans": "Spherical k-means of keys: the buckets that decoding chooses from",
    "qmodel": "SAAP query classifiers: which key buckets a query needs",
}


@dataclass(frozen=True)
class Artifact:
    """An artifact as read: its tensors (on the CPU), the configuration of the run that made it, its manifest, its folder."""

    kind: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    manifest: dict[str, Any]
    path: Path


def artifact_folder(outputs: str | Path, model_name: str, name: str, kind: str) -> Path:
    """``outputs/<model_name>/<name>/<kind>``."""
    return Path(outputs) / model_name / name / kind


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_writable(folder: Path, overwrite: bool = False, *, marker: str = MANIFEST) -> None:
    """Refuse, before hours of work, a folder that :func:`write` would refuse after them.

    Parameters
    ----------
    marker : the file by which an artifact is known.

    Raises
    ------
    UserError : an artifact already exists and ``overwrite`` is off, something else stands there, or the place cannot be written.
    """
    if (folder / marker).exists():
        if not overwrite:
            raise UserError(f"{folder}: an artifact already exists; overwrite=true replaces it, another name= keeps both")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: something that is no artifact stands there; choose another name= or outputs=")
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"outputs={folder}: no permission to write below {existing}")


def write(
    folder: Path,
    *,
    kind: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    details: Mapping[str, Any],
    data: str | Mapping[str, Any],
    seed: int,
    metrics: Mapping[str, Any],
    overwrite: bool = False,
) -> Path:
    """Write an artifact atomically: a killed run leaves the old artifact or the new one, never a part.

    Parameters
    ----------
    folder : where it will stand, see :func:`artifact_folder`
    kind : ``gate``, ``kmeans`` or ``qmodel``
    tensors : weights, on any device
    config : the resolved run configuration as plain dictionaries
    model : the base model's fingerprint (:func:`msattn.trainer.models.identity.fingerprint`)
    details : facts of this kind that loading needs, such as the gate's own configuration
    data : fingerprint of the training data
    metrics : figures for the model card
    overwrite : replace an artifact that stands in ``folder``

    Returns
    -------
    ``folder``

    Raises
    ------
    UserError : see :func:`check_writable`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: accepted are {', '.join(KINDS)}")
    import yaml
    from safetensors.torch import save

    check_writable(folder, overwrite)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    manifest = {
        "kind": kind,
        "format_version": FORMAT_VERSION,
        "model": dict(model),
        "data": data,
        "seed": seed,
        "versions": versions(),
        "metrics": _finite(dict(metrics)),
        "details": dict(details),
        "tensors": {name: _describe(tensor) for name, tensor in stored.items()},
        "content_hash": content_hash(stored),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    files = {
        WEIGHTS: save(stored, metadata={"kind": kind, "format_version": str(FORMAT_VERSION)}),
        CONFIG: yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode(),
        MANIFEST: (json.dumps(manifest, indent=2, allow_nan=False) + "\n").encode(),
        CARD: _card(manifest).encode(),
    }
    with replace_atomically(folder) as new:
        for name, content in files.items():
            (new / name).write_bytes(content)
    return folder


@contextmanager
def replace_atomically(folder: Path) -> Iterator[Path]:
    """A temporary sibling to fill with files, which is then forced to the disk and renamed to ``folder``.

    A killed run leaves the old folder or the new one, never a part; so does an error, which leaves no sibling either.
    UserError: the disk has no room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    if old.exists() and not folder.exists():  # an earlier run was killed between its two renames
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        for path in new.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(new)
    except BaseException as error:
        refused = write_error(folder, error) if isinstance(error, OSError | SafetensorError) else None
        shutil.rmtree(new, ignore_errors=True)
        if refused is not None:
            raise refused from error
        raise
    replaced = folder.exists()
    if replaced:
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if replaced:
            old.rename(folder)
        raise
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _finite(figures: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(figures, Mapping):
        return {key: _finite(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_finite(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def print_summary(folder: Path, metrics: Mapping[str, float]) -> None:
    """One closing line on the terminal: where an artifact stands, and its figures but those of single layers."""
    figures = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "layer" not in name)
    print(f"{folder}  {figures}", flush=True)


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    import transformers

    return {
        "msattn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read(path: str | Path, kind: str | None = None) -> Artifact:
    """Read an artifact and check all of it.

    Parameters
    ----------
    path : a folder, or the id of a Hub repository
    kind : what it must be; None takes any

    Raises
    ------
    UserError : missing, incomplete or altered files, another kind, another format version; the field is named.
    """
    import yaml
    from safetensors.torch import load_file

    folder = _local_folder(path)
    manifest = _read_manifest(folder, path, kind)
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"artifact {path}: {name} is missing")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"artifact {path}: {WEIGHTS} is damaged ({error})") from error
    found = {name: _describe(tensor) for name, tensor in tensors.items()}
    if found != manifest["tensors"]:
        differing = sorted(name for name in found | manifest["tensors"] if found.get(name) != manifest["tensors"].get(name))
        raise UserError(f"artifact {path}: tensors.{differing[0]} is not what {MANIFEST} says")
    if content_hash(tensors) != manifest["content_hash"]:
        raise UserError(f"artifact {path}: content_hash of {WEIGHTS} is not what {MANIFEST} says; the file was altered")
    config = yaml.safe_load((folder / CONFIG).read_text("utf-8")) or {}
    return Artifact(manifest["kind"], tensors, config, manifest, folder)


def _local_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(path, Path) or folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"artifact {path}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=[WEIGHTS, CONFIG, MANIFEST, CARD]))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"artifact {path}: no local folder, and the Hugging Face Hub did not give it ({reason})") from error


def read_kind(path: str | Path) -> str:
    """The kind of the artifact in a folder or on the Hub, from its manifest alone; UserError as in :func:`read`."""
    return _read_manifest(_local_folder(path), path)["kind"]


def _read_manifest(folder: Path, path: str | Path, kind: str | None = None) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise UserError(f"artifact {path}: {MANIFEST} is missing")
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"artifact {path}: {MANIFEST} is no JSON ({error})") from error
    missing = [key for key in MANIFEST_KEYS if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise UserError(f"artifact {path}: {MANIFEST} lacks {missing[0]}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(f"artifact {path}: format_version={manifest['format_version']}: accepted is {FORMAT_VERSION}")
    if manifest["kind"] not in KINDS or kind not in (None, manifest["kind"]):
        raise UserError(f"artifact {path}: kind={manifest['kind']}: accepted is {kind or ', '.join(KINDS)}")
    return manifest


def check_model(artifact: Artifact | Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Refuse an artifact (or its manifest) that was made for another model than the one fingerprinted.

    Raises
    ------
    UserError : names the first field that differs.
    """
    manifest = artifact.manifest if isinstance(artifact, Artifact) else artifact
    made_for = manifest["model"]
    for field in IDENTITY_FIELDS:
        if made_for.get(field) != fingerprint.get(field):
            raise UserError(
                f"{manifest['kind']} artifact made for {made_for.get('id') or 'another model'}: "
                f"its {field} is {made_for.get(field)}, this model's is {fingerprint.get(field)}"
            )


def _card(manifest: Mapping[str, Any]) -> str:
    """A model card: front matter that the Hub reads, then what it is, how to use it and how it was measured."""
    kind, model = manifest["kind"], manifest["model"]
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model["id"]) and not Path(model["id"]).exists()
    base = f"base_model: {model['id']}\n" if on_hub else ""
    argument = "gate" if kind == "gate" else "qmodel"
    figures = [(name, value) for name, value in manifest["metrics"].items() if isinstance(value, int | float | str)]
    rows = "\n".join(f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |" for name, value in figures)
    results = f"\n## Measured\n\n| figure | value |\n| --- | --- |\n{rows}\n" if figures else ""
    return f"""---
library_name: msattn
tags: [sparse-attention, long-context, {kind}]
{base}---

# {CARD_TITLES[kind]}

Made for `{model["id"]}` ({model["num_layers"]} layers, {model["num_heads"]} query heads, {model["num_kv_heads"]} key/value \
heads, head size {model["head_dim"]}) with msattn {manifest["versions"]["msattn"]}. `manifest.json` says from which data, \
seed and versions, and which model it accepts; `config.yaml` holds the whole configuration of the run.

```python
import msattn

with msattn.attach(model, {argument}="path/or/hub-id"):
    model.generate(...)
```
{results}"""

"""Reading and writing of artifacts: atomic writes, and full validation on reading.

An artifact is a folder of four files: ``model.safetensors``, ``config.yaml`` (the resolved run configuration),
``manifest.json`` (its kind, base model, training data and versions) and ``README.md`` (a model card for the Hub). Pickle is
never used.
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
from msattn.trainer.config import RunConfig
from msattn.trainer.config.values import UNPRINTABLE, require, shown
from msattn.trainer.errors import UserError, first_line, write_error

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
SHIPPED = Path(__file__).parent / "embedded" / "artifacts"  # the artifacts of the embedded model, a folder of each kind
SHAPE_FIELDS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")
IDENTITY_FIELDS = (*SHAPE_FIELDS, "config_hash", "weights_hash")
CARD_TITLES = {
    "gate": "SeerAttention gates: scores of key blocks for each query block",
    "kmeans": "Spherical k-means of keys: the buckets that sparse decoding selects from",
    "qmodel": "SAAP query classifiers: scores of key buckets for each query",
}


@dataclass(frozen=True)
class Artifact:
    """An artifact that was read from disk.

    Attributes
    ----------
    kind : ``gate``, ``kmeans`` or ``qmodel``.
    tensors : weights by name, on the CPU.
    config : resolved configuration of the run that wrote it.
    manifest : content of ``manifest.json``.
    path : local folder.
    """

    kind: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    manifest: dict[str, Any]
    path: Path


def artifact_folder(outputs: str | Path, model_name: str, name: str, kind: str) -> Path:
    """Returns the path ``outputs/<model_name>/<name>/<kind>``."""
    return Path(outputs) / model_name / name / kind


def default_artifact(cfg: RunConfig, kind: str) -> Path | None:
    """Returns the artifact of the configured model and name, or None if there is none.

    The embedded model falls back on the artifacts that ship with the package, unless a ``name`` is given.
    """
    own = artifact_folder(cfg.outputs, cfg.model.name, cfg.name, kind)
    if own.exists():
        return own
    return SHIPPED / kind if cfg.model.is_embedded and cfg.name == RunConfig.name else None


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_writable(folder: Path, overwrite: bool = False, *, marker: str = MANIFEST) -> None:
    """Checks that :func:`write` will accept ``folder``, so that a run fails at its start and not at its end.

    Parameters
    ----------
    marker : the file whose presence identifies an artifact.

    Raises
    ------
    UserError : an artifact exists there and ``overwrite`` is off, the folder holds other files, or it cannot be written.
    """
    if (folder / marker).exists():
        if not overwrite:
            raise UserError(f"{folder}: an artifact already exists; overwrite=true replaces it, another name= keeps both")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: the folder holds files that are not an artifact; choose another name= or outputs=")
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
    """Writes an artifact atomically: if the process is killed, ``folder`` holds the old artifact or the complete new one.

    Parameters
    ----------
    folder : destination, see :func:`artifact_folder`
    kind : ``gate``, ``kmeans`` or ``qmodel``
    tensors : weights, on any device
    config : the resolved run configuration as plain dictionaries
    model : the base model's fingerprint (:func:`msattn.trainer.models.identity.fingerprint`)
    details : values specific to the kind that loading needs, such as the gate's configuration
    data : fingerprint of the training data
    metrics : measured values for the model card; values that are not finite are stored as null
    overwrite : replace an existing artifact in ``folder``

    Returns
    -------
    ``folder``

    Raises
    ------
    UserError : as :func:`check_writable` and :func:`replace_atomically`.
    ValueError : an unknown ``kind``.
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
    """Yields a temporary sibling folder, which is synced to disk and renamed to ``folder`` when the block ends.

    After a kill ``folder`` is the old or the complete new one. After an error it is the old one and the sibling is removed.

    Raises
    ------
    UserError : a file cannot be written, as on a full disk.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    if old.exists() and not folder.exists():  # an earlier process was killed between its two renames
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
        # Built before the removal, so that the message reports the free space that the write found.
        failure = write_error(folder, error) if isinstance(error, OSError | SafetensorError) else None
        shutil.rmtree(new, ignore_errors=True)
        if failure is not None:
            raise failure from error
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
    """Replaces NaN and infinity by None, as JSON has neither."""
    if isinstance(figures, Mapping):
        return {key: _finite(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_finite(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def print_summary(folder: Path, metrics: Mapping[str, float]) -> None:
    """Prints the folder of an artifact and its metrics in one line, without the metrics of single layers."""
    figures = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "layer" not in name)
    print(f"{folder}  {figures}", flush=True)


def versions() -> dict[str, str]:
    """Returns the versions of msattn, Python, PyTorch and transformers."""
    import transformers

    return {
        "msattn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read(path: str | Path, kind: str | None = None) -> Artifact:
    """Reads an artifact and validates all of its files.

    Parameters
    ----------
    path : see :func:`find`
    kind : required kind; None accepts any

    Raises
    ------
    UserError : missing, incomplete or altered files, another kind or format version; the message names the field.
    """
    import yaml
    from safetensors.torch import load_file

    folder = find(path, *([kind] if kind else []))
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
        raise UserError(f"artifact {path}: tensors.{differing[0]} differs from {MANIFEST}")
    if content_hash(tensors) != manifest["content_hash"]:
        raise UserError(f"artifact {path}: content_hash of {WEIGHTS} differs from {MANIFEST}; the file was altered")
    config = yaml.safe_load((folder / CONFIG).read_text("utf-8")) or {}
    return Artifact(manifest["kind"], tensors, config, manifest, folder)


def find(path: str | Path, *kinds: str) -> Path:
    """Returns the local folder of an artifact.

    Parameters
    ----------
    path : folder of an artifact, folder of a run (``outputs/<model>/<name>``), id of a Hub repository with the same files, or
        ``embedded`` (the artifacts that ship with the package).
    kinds : accepted kinds, in order of precedence, where ``path`` holds an artifact of each kind.

    Raises
    ------
    UserError : there is no such folder, or it holds only artifacts of other kinds.
    """
    folder = _local_folder(path)
    if (folder / MANIFEST).is_file():
        return folder
    held = [kind for kind in KINDS if (folder / kind / MANIFEST).is_file()]
    accepted = [kind for kind in kinds if kind in held]
    if held and not accepted:
        choice = f"accepted is {' or '.join(kinds)}" if kinds else f"name one, e.g. {folder / held[0]}"
        raise UserError(f"artifact {path}: the folder holds {', '.join(held)}; {choice}")
    return folder / accepted[0] if accepted else folder


def _local_folder(path: str | Path) -> Path:
    require(isinstance(path, str | Path), "artifact", repr(path), "accepted is a folder or the id of a Hub repository")
    require(not UNPRINTABLE.search(str(path)), "artifact", path, "accepted is a path without control characters, in UTF-8")
    if path == "embedded":
        return SHIPPED
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # unlike Path.is_dir, also False for a name that is too long
        return folder
    if isinstance(path, Path) or os.path.exists(folder) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"artifact {shown(path)}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        files = (WEIGHTS, CONFIG, MANIFEST, CARD)
        return Path(snapshot_download(path, allow_patterns=[*files, *(f"{kind}/{name}" for kind in KINDS for name in files)]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"artifact {path}: not a local folder, and loading it from the Hugging Face Hub failed ({first_line(error)})"
        ) from error


def read_kind(path: str | Path) -> str:
    """Returns the kind of an artifact, reading only its manifest.

    Raises
    ------
    UserError : the manifest is missing or invalid.
    """
    return _read_manifest(find(path), path)["kind"]


def _read_manifest(folder: Path, path: str | Path, kind: str | None = None) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise UserError(f"artifact {path}: {MANIFEST} is missing")
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"artifact {path}: {MANIFEST} is not valid JSON ({error})") from error
    missing = [key for key in MANIFEST_KEYS if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise UserError(f"artifact {path}: {MANIFEST} has no key {missing[0]}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(f"artifact {path}: format_version={manifest['format_version']}: accepted is {FORMAT_VERSION}")
    if manifest["kind"] not in KINDS or kind not in (None, manifest["kind"]):
        raise UserError(f"artifact {path}: kind={manifest['kind']}: accepted is {kind or ', '.join(KINDS)}")
    return manifest


def check_model(artifact: Artifact | Mapping[str, Any], fingerprint: Mapping[str, Any], *, strict: bool = True) -> str | None:
    """Checks that an artifact (or its manifest) was made for the model with this ``fingerprint``.

    Parameters
    ----------
    strict : also refuse a model of the same shape with other weights, such as a quantized or fine-tuned one.

    Returns
    -------
    A warning if the weights differ or cannot be compared, else None.

    Raises
    ------
    UserError : it was made for a model of another shape or other RoPE parameters (the message names the first field that
        differs), or, if ``strict``, for other weights.
    """
    manifest = artifact.manifest if isinstance(artifact, Artifact) else artifact
    made_for = manifest["model"]
    origin = f"{manifest['kind']} artifact made for {made_for.get('id') or 'another model'}"
    unknown = fingerprint.get("weights_hash") is None
    fields = IDENTITY_FIELDS[:-1] if unknown else IDENTITY_FIELDS
    differing = [field for field in fields if made_for.get(field) != fingerprint.get(field)]
    if differing:
        field = differing[0]
        warning = f"{origin}: its {field} is {made_for.get(field)}, this model's is {fingerprint.get(field)}"
    elif unknown:
        warning = f"{origin}: this model's weights are quantized or offloaded, so they were not compared"
    else:
        return None
    if strict or set(differing) & set(SHAPE_FIELDS):
        raise UserError(warning)
    return f"{warning}; quality may differ from what was measured"


def _card(manifest: Mapping[str, Any]) -> str:
    """Returns the model card: YAML front matter for the Hub, a description, a usage example and the metrics."""
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
heads, head size {model["head_dim"]}) with msattn {manifest["versions"]["msattn"]}. `manifest.json` records the \
training data, the seed, the versions and the base model; `config.yaml` holds the resolved configuration of the run.

```python
import msattn

with msattn.attach(model, {argument}="path/or/hub-id"):
    model.generate(...)
```
{results}"""

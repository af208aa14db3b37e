"""Atomic writing of artifacts."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.artifacts.card import artifact_card
from msattn.trainer.artifacts.kinds import KINDS
from msattn.trainer.artifacts.manifest import (
    CARD,
    CONFIG,
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    checksum,
    describe_tensor,
)
from msattn.trainer.errors import UserError
from msattn.trainer.storage.documents import finite
from msattn.trainer.storage.hashes import content_hash, save_tensors
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import check_no_link, current_folder, replace_folder
from msattn.trainer.version import __version__


def check_writable(folder: Path, overwrite: bool = False, *, marker: str = MANIFEST) -> None:
    """Checks that :func:`write` will accept ``folder``, so that a run fails at its start and not at
    its end.

    Raises UserError for a symbolic link, an artifact (with the file ``marker``) without
    ``overwrite``, and a folder with other files or that cannot be written.
    """
    check_no_link(folder)
    if os.path.exists(current_folder(folder) / marker):
        if not overwrite:
            raise UserError(
                f"{folder}: an artifact already exists; overwrite=true replaces it, another name= "
                f"keeps both"
            )
    elif os.path.exists(folder) and (not os.path.isdir(folder) or _holds_files(folder)):
        raise UserError(
            f"{folder}: the folder contains files that are not part of an artifact; choose "
            f"another name= or outputs="
        )
    existing = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        raise UserError(f"outputs={folder}: no permission to write below {existing}")


def _holds_files(folder: Path) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError as error:
        raise UserError(
            f"{folder}: the folder cannot be read ({error.strerror}); choose another name= or "
            f"outputs="
        ) from error


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
    """Writes an artifact atomically: if the process is killed, ``folder`` holds the old artifact or
    the complete new one.

    ``config`` is the resolved configuration as plain dictionaries, ``model`` the base model's
    fingerprint (:func:`msattn.trainer.models.identity.fingerprint`), ``data`` the fingerprint of
    the training data. ``details`` are values that loading this kind needs, such as the gate's
    configuration; ``metrics`` go to the model card, as null if not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: expected {', '.join(KINDS)}")
    import yaml

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config_text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    manifest: dict[str, Any] = {
        "kind": kind,
        "format_version": FORMAT_VERSION,
        "model": dict(model),
        "data": data,
        "seed": seed,
        "versions": versions(),
        "metrics": finite(metrics),
        "details": dict(details),
        "tensors": {name: describe_tensor(tensor) for name, tensor in stored.items()},
        "content_hash": content_hash(stored),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # JSON turns tuples into lists
    manifest["checksum"] = checksum(json.loads(json.dumps(manifest)), config_text)
    files = {
        CONFIG: config_text.encode(),
        MANIFEST: (json.dumps(manifest, indent=2, allow_nan=False) + "\n").encode(),
        CARD: artifact_card(manifest).encode(),
    }
    with locked(folder):
        check_writable(folder, overwrite)
        with replace_folder(folder) as new:
            save_tensors(
                new / WEIGHTS, stored, {"kind": kind, "format_version": str(FORMAT_VERSION)}
            )
            for name, content in files.items():
                (new / name).write_bytes(content)
    return folder


def print_summary(folder: Path, metrics: Mapping[str, float]) -> None:
    """Prints the folder of an artifact and its metrics in one line, without the metrics of single
    layers.
    """
    print(f"{folder}  {metrics_line(metrics)}", flush=True)


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Returns the metrics over all layers in one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in without_layers(metrics).items())


def without_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics over all layers, without those of single layers."""
    return {name: value for name, value in metrics.items() if "layer" not in name}


def versions() -> dict[str, str]:
    """Returns the versions of msattn, Python, PyTorch and transformers."""
    import transformers

    return {
        "msattn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

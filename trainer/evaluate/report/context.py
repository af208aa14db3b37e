"""The provenance of a result: machine, versions, commit, configuration and artifacts."""

import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.version import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "transformers", "numpy")
CPU_NOTE = (
    "CPU times say nothing about GPUs: on a CPU each operation runs as its reference in "
    "plain PyTorch."
)
# keys of an artifact's manifest that a result repeats
MANIFEST_KEYS = ("path", "kind", "content_hash", "created", "seed")


@dataclass(frozen=True)
class Context:
    """The provenance that every file of a result contains."""

    title: str
    machine: dict[str, str]
    versions: dict[str, str]
    commit: str | None  # commit of the checkout; None outside a checkout
    config: dict[str, Any]  # resolved, with its seeds
    # path, hash, seed and time of creation, by kind
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # notes that readers need before the tables
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def context(
    title: str,
    config: dict[str, Any],
    manifests: dict[str, dict[str, Any]],
    notes: list[str],
    device: "torch.device",
) -> Context:
    """Returns the provenance of a result on ``device``; reads the installed versions and asks git
    for the commit.
    """
    from importlib.metadata import distributions, version

    installed = {distribution.metadata["Name"] for distribution in distributions()}
    versions = {"msattn": __version__, "python": platform.python_version()} | {
        name: version(name) for name in PACKAGES if name in installed
    }
    artifacts = {
        kind: {key: manifest[key] for key in MANIFEST_KEYS if key in manifest}
        for kind, manifest in manifests.items()
    }
    return Context(title, _machine(device), versions, _commit(), config, artifacts, notes)


def _machine(device: "torch.device") -> dict[str, str]:
    import torch

    system = f"{platform.system()} {platform.machine()}"
    facts = {"system": system, "threads": str(torch.get_num_threads()), "device": device.type}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return facts


def _commit() -> str | None:
    """Returns the commit of the checkout, with ``-dirty`` if files differ from it; None outside a
    checkout.
    """
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            describe,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""``msattn doctor``: checks this machine and prints how to fix what is missing."""

import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from msattn.trainer.progress import activity

OK, MISSING = "[green]ok[/green]", "[yellow]missing[/yellow]"


@dataclass(frozen=True)
class Check:
    """One line of the table; ``fix`` is a command or hint, empty if not needed."""

    name: str
    found: str
    ok: bool
    fix: str = ""


def doctor() -> list[Check]:
    """Runs the checks, prints them as a table, and returns them."""
    with activity("doctor"):
        checks = run_checks()
    table = Table(title="msattn doctor", title_justify="left")
    for column in ("", "found", "state", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.found, OK if check.ok else MISSING, check.fix)
    Console().print(table)
    return checks


def run_checks() -> list[Check]:
    """Checks Python, the libraries, the GPU, the embedded model and the W&B key."""
    import torch

    cuda = torch.cuda.is_available()
    gpus = (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        if cuda
        else "none"
    )
    kernels = cuda and _package("triton") is not None
    return [
        Check("python", platform.python_version(), True),
        _library("torch", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"),
        Check("GPU", gpus, cuda, "" if cuda else "optional: all commands also run on a CPU"),
        *map(_library, ("triton", "transformers", "accelerate", "datasets")),
        _faiss(cuda),
        _wandb(),
        _embedded_model(),
        Check("reference kernels", "all operations in PyTorch, on CPU or GPU", True),
        Check(
            "Triton kernels",
            "compile for this GPU" if kernels else "need an NVIDIA GPU and Triton",
            kernels,
            "" if kernels else "install a CUDA build of torch on a machine with an NVIDIA GPU",
        ),
    ]


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _library(name: str, note: str = "") -> Check:
    installed = _package(name)
    if installed is None:
        return Check(name, "not installed", False, _install(name))
    return Check(name, f"{installed} ({note})" if note else installed, True)


def _install(name: str) -> str:
    try:
        required = requires("msattn") or []
    except PackageNotFoundError:  # msattn runs from an unpacked tree
        required = []
    requirement = next(
        (dependency for dependency in required if re.match(rf"{name}\b", dependency)), name
    )
    return f"pip install '{requirement.partition(';')[0]}'"


def _faiss(cuda: bool) -> Check:
    """Checks Faiss, which k-means needs on a CPU; on CUDA it runs in torch."""
    for name, build in (("faiss-gpu", "GPU"), ("faiss-cpu", "CPU")):
        if installed := _package(name):
            return Check("faiss", f"{installed} ({build})", True)
    if importlib.util.find_spec("faiss") is not None:
        return Check("faiss", "installed, version unknown", True)
    need = (
        "k-means on the GPU does not need it"
        if cuda
        else "fit-kmeans needs it unless kmeans.engine=batched"
    )
    return Check(
        "faiss", f"not installed; {need}", cuda, "" if cuda else "pip install 'msattn[cpu]'"
    )


def _wandb() -> Check:
    installed = _package("wandb")
    if installed is None:
        return Check(
            "wandb",
            "not installed; metrics are still written to metrics.jsonl",
            False,
            _install("wandb"),
        )
    key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_has_wandb()
    mode = "API key found, runs are online" if key else "no API key, runs are offline"
    return Check("wandb", f"{installed} ({mode})", key, "" if key else "wandb login")


def _netrc_has_wandb() -> bool:
    """Returns True if the user's netrc names W&B; one that cannot be read has no key."""
    netrc = Path(os.path.expanduser(os.environ.get("NETRC", "~/.netrc")))
    try:
        return netrc.is_file() and "wandb" in netrc.read_text(errors="ignore")
    except OSError:
        return False


def _embedded_model() -> Check:
    folder = Path(__file__).parents[1] / "embedded" / "model"
    if (folder / "model.safetensors").is_file():
        return Check("embedded model", "model=tiny", True)
    return Check(
        "embedded model", "its weights are missing", False, "pip install --force-reinstall msattn"
    )

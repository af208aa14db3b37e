"""``msattn doctor``: what this machine can run, and the command that mends what is missing."""

import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OK, LACKS = "[green]ok[/green]", "[yellow]missing[/yellow]"


@dataclass(frozen=True)
class Finding:
    """One line of the table: ``mend`` is the command that helps, empty where nothing is missing."""

    what: str
    found: str
    ok: bool
    mend: str = ""


def doctor() -> list[Finding]:
    """Print the table and return its lines."""
    from rich.console import Console
    from rich.table import Table

    findings = examine()
    table = Table(title="msattn doctor", title_justify="left")
    for column in ("", "found", "state", "mend it with"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.found, OK if finding.ok else LACKS, finding.mend)
    Console().print(table)
    return findings


def examine() -> list[Finding]:
    """Look at the interpreter, the libraries, the GPU and the keys of this machine."""
    import torch

    cuda = torch.cuda.is_available()
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else "none: CPU only"
    triton = _package("triton")
    return [
        Finding("python", platform.python_version(), True),
        _library(
            "torch", "pip install 'torch>=2.11'", note=f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        ),
        Finding("GPU", gpus, cuda, "" if cuda else "not needed: every command runs on the CPU too"),
        _library("triton", "pip install 'triton>=3.6' (Linux)"),
        _library("transformers", "pip install 'transformers>=5.17'"),
        _library("accelerate", "pip install 'accelerate>=1.15'"),
        _library("datasets", "pip install 'datasets>=5.2'"),
        _faiss(cuda),
        _wandb(),
        _embedded_model(),
        Finding("reference kernels", "every operation in plain PyTorch, on CPU or GPU", True),
        Finding(
            "Triton kernels",
            "compiled for this GPU" if cuda and triton else "not on this machine",
            bool(cuda and triton),
            "" if cuda and triton else "a CUDA build of torch on a machine with an NVIDIA GPU",
        ),
    ]


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _library(name: str, mend: str, note: str = "") -> Finding:
    found = _package(name)
    return Finding(
        name, f"{found} {f'({note})' if note else ''}".strip() if found else "no", found is not None, "" if found else mend
    )


def _faiss(cuda: bool) -> Finding:
    """k-means on the CPU needs Faiss; on CUDA all heads of a layer are clustered at once, in torch."""
    for name, where in (("faiss-gpu", "GPU"), ("faiss-cpu", "CPU")):
        if found := _package(name):
            return Finding("faiss", f"{found} ({where})", True)
    if importlib.util.find_spec("faiss") is not None:
        return Finding("faiss", "found, version unknown", True)
    note = "no; k-means runs in torch on the GPU" if cuda else "no; fit-kmeans needs it, or kmeans.engine=batched"
    return Finding("faiss", note, cuda, "" if cuda else "pip install 'msattn[cpu]'")


def _wandb() -> Finding:
    found = _package("wandb")
    if found is None:
        return Finding("wandb", "no; metrics.jsonl is always written", False, "pip install 'wandb>=0.31'")
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"))
    state = "key present: runs go online" if key else "no key: runs stay offline"
    return Finding("wandb", f"{found} ({state})", key, "" if key else "wandb login")


def _embedded_model() -> Finding:
    folder = Path(__file__).parents[1] / "embedded" / "model"
    here = (folder / "model.safetensors").is_file()
    return Finding(
        "embedded model", "model=tiny" if here else "no", here, "" if here else "pip install --force-reinstall msattn"
    )

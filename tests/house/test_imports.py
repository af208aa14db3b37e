"""Side effects and weight of imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.modules import MODULES, ROOT, imports

LIGHT = [
    "msattn",
    "msattn.cli",
    "msattn.trainer.config",
    "msattn.trainer.commands.compose",
    "msattn.trainer.commands.launch",
    "msattn.trainer.commands.completion",
    "msattn.trainer.commands.help",
    "msattn.trainer.commands.doctor",
    "msattn.trainer.commands.doctor_model",
    "msattn.trainer.commands.demo",
    "msattn.trainer.commands.artifacts",
]


def test_light_modules_import_nothing_heavy() -> None:
    script = (
        f"import importlib, sys\nfor name in {LIGHT}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'triton', 'hydra', 'wandb', 'faiss', 'datasets', "
        "'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


OF_EXTRAS = (
    # they use vLLM's classes; only vLLM imports them
    *(
        f"trainer.serving.engines.vllm.{name}"
        for name in ("backend", "memory", "metadata", "received")
    ),
    # only msattn serve imports them
    *(
        f"trainer.serving.engines.http.{name}"
        for name in ("app", "connections", "metrics", "supervisor")
    ),
)
PURITY = """
import importlib, os, socket, sys, threading

def refuse(*arguments, **named):
    raise AssertionError("an import reached for the network")

import torch, transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    return dict(os.environ), os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), \\
        torch.initial_seed(), sorted(ALL_ATTENTION_FUNCTIONS), \\
        sorted(ALL_MASK_ATTENTION_FUNCTIONS), threading.active_count(), sorted(os.listdir("."))

socket.socket.connect = socket.getaddrinfo = refuse
optional = "gguf hydra omegaconf wandb faiss datasets matplotlib typer starlette uvicorn"
optional += " prometheus_client vllm"
for name in optional.split():
    sys.modules[name] = None  # an import of it fails
before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert state() == before, "an import changed what lies outside the package"
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_importing_any_module_changes_nothing_and_needs_no_optional_library(tmp_path: Path) -> None:
    """Optional libraries are imported where they are used."""
    names = [
        f"msattn.{name}" if name else "msattn"
        for name in MODULES
        if name not in ("__main__", "cli", *OF_EXTRAS)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PURITY, *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_transformers_finds_no_kernels_package_of_ours() -> None:
    """transformers probes for Hugging Face's ``kernels``; with the root on sys.path it must not
    take ours for it.
    """
    script = (
        "import sys, importlib.util\nimport transformers\nfrom transformers.utils import "
        "is_kernels_available\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None or not spec.origin.startswith(sys.argv[1]), "
        "spec\n"
        "assert not is_kernels_available() or spec.origin is not None"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, str(ROOT)], cwd=ROOT, env=environment, check=True)


def test_tests_share_helpers_not_tests() -> None:
    """Builders and oracles that several test files use stand in modules of their own."""
    for path in (ROOT / "tests").rglob("*.py"):
        names = {name for name in imports(path) if name.startswith("tests.") and ".test_" in name}
        assert not names, f"{path.relative_to(ROOT)} imports {', '.join(sorted(names))}"

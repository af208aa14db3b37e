"""Settings of the tests that run vLLM, on a CPU; they are collected only where it is installed
(``make test-vllm``).
"""

import os
from importlib.util import find_spec

import pytest
import torch
import transformers

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # errors and statistics of the engine are those of this process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the versions that the tests ran with."""
    if find_spec("vllm") is None:
        return
    from vllm.version import __version__

    terminalreporter.section(
        f"vLLM {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )

"""Shared fixtures. Without a GPU, Triton kernels run interpreted; every test starts from the same
seed.
"""

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it on its first import

import pytest

# programs there import each other, as those of docs/figures do
sys.path.append(str(Path(__file__).parents[1] / "docs/experiments"))
FAST_CASES = 3  # of interpreted kernels, in a test with the marker `interpreted`
NO_MODEL = "needs SmolLM2"  # begins the reason of tests that are skipped without it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, skips GPU tests and marks later cases of interpreted kernels as slow."""
    interpreted: Counter[tuple[str, str]] = Counter()
    for item in [] if torch.cuda.is_available() else items:
        marker = item.get_closest_marker("interpreted")
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif marker and isinstance(item, pytest.Function):
            arguments = item.callspec.params
            test = item.nodeid.partition("[")[0], str(arguments.get(marker.kwargs.get("by")))
            if arguments["backend"] == "triton":
                interpreted[test] += 1
                if interpreted[test] > FAST_CASES:
                    item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many tests had no model."""
    if count := sum(
        NO_MODEL in str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])
    ):
        terminalreporter.section(f"{count} tests on SmolLM2 were left out: make models brings it")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Removes the handlers of a sweep, which write to a stream that ends with the test."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def _unmeasured_device() -> Iterator[None]:
    """Attached models are sparse at every length, as on a device whose break-even lengths were not
    measured.
    """
    from msattn.trainer.models import break_even

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(break_even, "BREAK_EVEN", {})
        patch.setattr(break_even, "DECODING_COST", {})
        yield


@pytest.fixture(autouse=True)
def _no_lines_about_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a slow machine runs for more than 10 seconds print what they print on a fast
    one.
    """
    from msattn.trainer import progress

    monkeypatch.setattr(progress, "INTERVAL", 3600.0)


@pytest.fixture(autouse=True)
def _free_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Returns cached GPU memory after each GPU test, for tests that run at the same time."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels under test run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def steady_device(device: str, backend: str) -> str:
    """A device on which a backend is deterministic: PyTorch on a GPU adds up in a different order
    each time.
    """
    return device if backend == "triton" else "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialized memory holds NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _coarse(device: str) -> Iterator[None]:
    """Larger tiles than the shipped ones: the interpreter takes the same time for a tile of any
    size.
    """
    from msattn.kernels import tuned
    from msattn.kernels.multiscale_attention import levels as multiscale_levels

    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(multiscale_levels, "POOL_TILE_ELEMENTS", 2**15)
            for operation, tile in tuned.FULL_PRECISION.items():
                patch.setitem(
                    tuned.FULL_PRECISION, operation, tuned.Tile(max(64, tile.rows), 64, 4, 1)
                )
        yield


@pytest.fixture
def round_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """``msattn bench`` with fixed peak rates and few timed runs."""
    from msattn.kernels.bench import run
    from msattn.kernels.bench.rows import PeakRates
    from msattn.kernels.bench.timing import time_ms

    monkeypatch.setattr(run, "ceilings", lambda device, dtype: PeakRates(2.0, 0.5))
    monkeypatch.setattr(
        run, "time_ms", lambda call, device, budget_s: time_ms(call, device, 5, 0.01)
    )


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes commands start faster.

    Hydra parses each YAML file once, and composes the jobs of a sweep once instead of twice. No
    garbage is collected, and no pictures of block maps are drawn during training: the test of the
    demo draws them.
    """
    from hydra.plugins.sweeper import Sweeper
    from omegaconf import OmegaConf

    parsed: dict[str, Any] = {}
    load = OmegaConf.load

    def load_once(file: Any) -> Any:
        text = file.read() if hasattr(file, "read") else Path(file).read_text()
        if text not in parsed:
            parsed[text] = load(StringIO(text))
        return deepcopy(parsed[text])

    monkeypatch.setattr(OmegaConf, "load", load_once)
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", lambda *_: None)
    monkeypatch.setattr("msattn.trainer.methods.gate.train.save_maps", lambda *_: None)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    gc.disable()
    yield
    gc.enable()

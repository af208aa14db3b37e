"""Shared test set-up: kernels run interpreted where there is no GPU; every test starts from the same seeds."""

import os
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, so it stands before everything that may do so

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _free_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test held on the GPU is there for those that run beside it."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels under test run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def steady_device(device: str, backend: str) -> str:
    """Where a backend gives the same bits each time: on a GPU, PyTorch adds up in another order each time."""
    return device if backend == "triton" else "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _coarse(device: str) -> Iterator[None]:
    """Interpreted, a tile costs the same whatever its size: they are larger there than those that ship."""
    from msattn.kernels import tuned
    from msattn.kernels.multiscale_attention import levels as multiscale_levels

    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(multiscale_levels, "POOLED_AT_ONCE", 2**15)
            for operation, tile in tuned.FULL_PRECISION.items():
                patch.setitem(tuned.FULL_PRECISION, operation, tuned.Tile(max(64, tile.rows), 64, 4, 1))
        yield


@pytest.fixture
def round_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ``msattn bench``, a machine of round figures, looked at once."""
    from msattn.kernels.bench import run
    from msattn.kernels.bench.rows import Rate
    from msattn.kernels.bench.timing import time_ms

    monkeypatch.setattr(run, "ceilings", lambda device, dtype: Rate(2.0, 0.5))
    monkeypatch.setattr(run, "time_ms", lambda call, device, budget_s: time_ms(call, device, 5, 0.01))

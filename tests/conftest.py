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
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def coarse(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a tile costs the same whatever its size: they are larger there than those that ship."""
    from msattn.kernels import multiscale_levels, tuned

    if device == "cpu":
        monkeypatch.setattr(multiscale_levels, "POOLED_AT_ONCE", 2**15)
        for kernel in ("block_sparse_attention", "multiscale_attention"):
            for part in ("", "_dq", "_dkv"):
                monkeypatch.setitem(tuned.FULL_PRECISION, f"{kernel}{part}", tuned.Tile(64, 64, 4, 1))


@pytest.fixture
def round_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ``msattn bench``, a machine of round figures, looked at once."""
    from msattn.kernels.bench import run
    from msattn.kernels.bench.rows import Rate
    from msattn.kernels.bench.timing import time_ms

    monkeypatch.setattr(run, "ceilings", lambda device, dtype: Rate(2.0, 0.5))
    monkeypatch.setattr(run, "time_ms", lambda call, device, budget_s: time_ms(call, device, 5, 0.01))

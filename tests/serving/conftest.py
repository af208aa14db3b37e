"""Fixtures of the tests of decoding."""

import pytest

from msattn.trainer.serving.contiguous import buffers
from msattn.trainer.serving.graphs.capture import Step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which single tokens are steps; on the CPU they are launched kernel by kernel."""
    monkeypatch.setattr(Step, "device_type", request.param)
    return request.param


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow every few tokens."""
    monkeypatch.setattr(buffers, "MIN_FREE", 4)
    monkeypatch.setattr(buffers, "STEP", 1)

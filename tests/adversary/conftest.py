"""Fixtures of the hostile tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.adversary.commands import prepared, trained, work  # noqa: F401  # fixtures
from tests.adversary.model_folders import Models
from tests.adversary.tries import Tries
from tests.hub_server import hub  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of small models."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def tries() -> Iterator[Tries]:
    """The tries of a test, checked when it ends."""
    found = Tries()
    yield found
    found.check()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets how a phase decodes tokens."""
    on = "msattn.trainer.serving.graphs.capture.Step.device_type"
    return lambda phase: monkeypatch.setattr(on, "cpu" if phase == "step" else "cuda")

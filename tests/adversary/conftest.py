"""Fixtures of the hostile tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from tests.adversary.commands import prepared, work  # noqa: F401  # fixtures
from tests.adversary.tries import Tries
from tests.hub_server import hub  # noqa: F401  # a fixture

SHARE_OF_FEW = 0.04  # of the cases, in `make test`
SHARE_OF_MANY = float(os.environ.get("MSATTN_HOSTILE_SHARE", "0.1"))  # in `make test-all`; 1 tries all cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests with the fixture ``tries`` a long run, marked ``slow``, or a short one where slow tests are left out."""
    if "tries" in metafunc.fixturenames:
        few, many = pytest.param(SHARE_OF_FEW, id="few"), pytest.param(SHARE_OF_MANY, id="many", marks=pytest.mark.slow)
        metafunc.parametrize("share", [few if metafunc.config.option.markexpr == "not slow" else many])


@pytest.fixture
def tries(request: pytest.FixtureRequest, share: float, record_property: Callable[[str, object], None]) -> Iterator[Tries]:
    """The tries of the area that the test's mark ``area`` names, checked and reported when the test ends."""
    mark = request.node.get_closest_marker("area")
    assert mark is not None, "the mark area names the area"
    found = Tries(str(mark.args[0]), share)
    yield found
    record_property("tries", [found.area, found.count, found.count - len(found.bad), found.open])
    found.check()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets how a phase decodes tokens."""
    on = "msattn.trainer.serving.steps.DecodingSteps.device_type"
    return lambda phase: monkeypatch.setattr(on, "cpu" if phase == "step" else "cuda")

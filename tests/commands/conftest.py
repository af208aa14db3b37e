"""Fixtures of the tests of commands."""

from collections.abc import Callable

import pytest

from tests.hub_server import hub  # noqa: F401
from tests.running import exit_code

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def msattn(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the entry point in this process; returns its exit code and what it printed on stdout and
    stderr.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(*arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run

"""Fixtures of the tests of commands."""

from collections.abc import Callable

import pytest

from tests.hub_server import hub  # noqa: F401
from tests.running import exit_code

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]


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


@pytest.fixture
def refused(msattn: Run) -> Refused:
    """Runs a command that must end with exit code 2 and one line, which holds ``says``."""

    def run(says: str, *arguments: str) -> None:
        code, out, err = msattn(*arguments)
        assert (code, out, err[:8], err.count("\n")) == (2, "", "msattn: ", 1), err
        assert says in err

    return run

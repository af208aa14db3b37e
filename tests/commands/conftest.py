"""Fixtures of the tests of commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub_server import hub  # noqa: F401
from tests.running import exit_code

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def msattn(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the entry point in this process; returns its exit code and what it printed on stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(*arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run

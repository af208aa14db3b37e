"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from tests.hub_server import hub  # noqa: F401


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""Commands that run in the process of the tests, and what they log."""

import json
from pathlib import Path
from typing import Any

import pytest

from msattn import cli


def exit_code(*arguments: str) -> int:
    """Runs ``msattn *arguments`` and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def succeed(*arguments: str) -> None:
    """Runs ``msattn *arguments``, which ends with exit code 0."""
    assert exit_code(*arguments) == 0


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of ``metrics.jsonl``, which are JSON without its extensions NaN and Infinity."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]

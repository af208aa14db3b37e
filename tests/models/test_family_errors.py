"""The table of docs/measurements.md: its families, and one of its rows."""

import re
from pathlib import Path

import pytest

from msattn.trainer.models.families import FAMILIES
from tests.models.family_errors import errors

TABLE = (Path(__file__).parents[2] / "docs/measurements.md").read_text().partition("## Exactness by model family")[2]


def test_every_family_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| yes \|$", TABLE.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)


@pytest.mark.slow
def test_a_row_is_what_the_script_measures() -> None:
    largest, prompt, new, same = errors("gpt_oss")
    assert max(prompt, new) < 1e-4 < largest
    assert same

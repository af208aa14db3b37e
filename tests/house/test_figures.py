"""The tables and numbers of the documents are those of the CSV files in docs/figures."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.modules import ROOT

sys.path.append(str(ROOT / "docs/figures"))  # as for a program there
TABLES = runpy.run_path(str(ROOT / "docs/figures/tables.py"))


@pytest.mark.parametrize("document", TABLES["DOCUMENTS"], ids=lambda path: path.name)
def test_writing_the_tables_changes_nothing(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert TABLES["written"](text) == text, "run python docs/figures/tables.py"


def test_every_table_and_number_is_shown() -> None:
    shown = [
        match.groups()
        for path in TABLES["DOCUMENTS"]
        for match in TABLES["MARKED"].finditer(path.read_text("utf-8"))
    ]
    assert {name for kind, name in shown if kind == "table"} == {*TABLES["TABLES"]}
    assert {name for kind, name in shown if kind == "number"} == {*TABLES["NUMBERS"]}


@pytest.mark.parametrize("document", TABLES["DOCUMENTS"], ids=lambda path: path.name)
def test_no_line_begins_with_a_number(document: Path) -> None:
    """There the site would end the list or paragraph."""
    assert not re.search(r"^\s*<!-- number", document.read_text("utf-8"), flags=re.MULTILINE)


@pytest.mark.slow
def test_drawing_the_figures_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "docs/figures", tmp_path / "docs/figures", ignore=shutil.ignore_patterns("*.svg")
    )
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "docs/figures/draw.py")], check=True)
    drawn, kept = (
        {path.name: path.read_text() for path in (root / "docs/figures").glob("*.svg")}
        for root in (tmp_path, ROOT)
    )
    assert drawn == kept

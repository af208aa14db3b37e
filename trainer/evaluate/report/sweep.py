"""One table of several evaluations, for ``msattn eval --multirun``."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msattn.trainer.evaluate.report.compare import batch_text, read_results, score_text
from msattn.trainer.evaluate.report.files import flat
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import Method
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import write_table

if TYPE_CHECKING:
    from rich.table import Table


def tabulate(folders: Sequence[Path]) -> Path | None:
    """Prints the scores of trained methods in all evaluations, and writes all rows of all evaluations to one CSV file.

    Parameters
    ----------
    folders : results of :func:`msattn.trainer.evaluate.run.evaluate`, ``outputs/<model>/<name>/eval``.

    Returns
    -------
    Path | None
        ``sweep.csv`` in the folder that holds those of all names; None for evaluations of one name, which replace each other.
    """
    from rich.console import Console

    if len(set(folders)) < max(2, len(folders)):
        return None
    root = Path(os.path.commonpath(folders))
    path, names = root / "sweep.csv", [str(folder.parent.relative_to(root)) for folder in folders]
    results = [read_results(str(folder))["rows"] for folder in folders]
    found = {name: [EvalRow(**row) for row in rows] for name, rows in zip(names, results, strict=True)}
    rows = [replace(row, extra={"name": name, **row.extra}) for name, own in found.items() for row in own]
    with locked(path):
        write_table(path, flat(rows))
    console = Console()
    console.print(_table(found))
    console.print(f"All rows: [bold]{path}[/bold]", soft_wrap=True)
    return path


def _table(found: dict[str, list[EvalRow]]) -> "Table":
    """Returns a table with a line for each evaluation and trained method, and a column for each task and setting."""
    from rich import box
    from rich.table import Table

    cells: dict[tuple[str, Method], dict[str, str]] = {}
    for name, rows in found.items():
        for row in (row for row in rows if row.method.is_trained):
            length = row.extra.get("length")
            column = " ".join(filter(None, (row.task, f"{length:,}" if length else "", batch_text(row), row.setting)))
            cells.setdefault((name, row.method), {})[column] = score_text(row.task, row.score)
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    shown = Table(title="All evaluations", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("name", "method", *columns):
        shown.add_column(header, justify="left" if header in ("name", "method") else "right", overflow="fold")
    for (name, method), line in cells.items():
        shown.add_row(name, method.label, *(line.get(column, "") for column in columns))
    return shown

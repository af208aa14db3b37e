"""Comparison of evaluations: scores and settings next to those of an earlier one, and one table for
a whole sweep.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.report.tables import columns_of, filled, with_columns
from msattn.trainer.evaluate.row import EvalRow, Setting, flat
from msattn.trainer.evaluate.task import task_of
from msattn.trainer.methods.base import Method
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import current_folder, write_table
from msattn.trainer.storage.settings import flat_settings

# the parts of results.json that a comparison reads
KEYS = ("rows", "config", "artifacts", "machine", "versions")
OWN_KEYS = ("config.compare", "config.overwrite")  # differ without an effect on the scores


class ComparedRow(NamedTuple):
    """Scores of one method in one setting of a task, in this evaluation and in the other."""

    row: EvalRow
    other: float

    def cells(self) -> dict[str, str]:
        task, score = self.row.task, self.row.score
        return {
            "task": ", ".join(filter(None, _of(self.row))),
            "method": self.row.method.label,
            "setting": str(self.row.setting),
            "this": score_text(task, score),
            "other": score_text(task, self.other),
            "difference": _difference(task, score, self.other),
        }


class Comparison(NamedTuple):
    """Two evaluations: scores that both have, the number of those that only one has, and settings
    that differ.

    The title is the folder of the other one, as given, and when it was made: this evaluation may
    have replaced it.
    """

    title: str
    rows: list[ComparedRow]
    unmatched: int
    settings: dict[str, tuple[str, str]]  # value here, value there

    def main(self) -> list[ComparedRow]:
        """Returns the rows of dense attention and of trained methods."""
        return [
            compared
            for compared in self.rows
            if compared.row.method.is_trained or compared.row.method.is_dense
        ]

    def others(self) -> list[ComparedRow]:
        main = self.main()
        return [row for row in self.rows if row not in main]


def read_results(folder: str) -> dict[str, Any]:
    """Returns the content of ``results.json`` of another evaluation; UserError if there is none, or
    it is malformed.
    """
    path = current_folder(Path(os.path.expanduser(folder))) / "results.json"
    accepted = "expected the folder of an earlier msattn eval, which holds results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        _rows(results)
        if not all(isinstance(results[key], dict) for key in KEYS[1:]):
            raise TypeError
    except OSError as error:
        raise UserError(f"compare={folder}: {accepted} ({error.strerror})") from error
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"compare={folder}: its results.json is malformed; {accepted}") from error
    return results


def _rows(results: dict[str, Any]) -> list[EvalRow]:
    """Returns the rows of a file; it describes the methods separately, by name (older files have
    only the names).
    """
    methods = {
        name: Method.from_fields(fields) for name, fields in results.get("methods", {}).items()
    }
    return [
        EvalRow(
            **row
            | {
                "method": methods.get(row["method"], Method(row["method"])),
                "setting": Setting(row["setting"]),
            }
        )
        for row in results["rows"]
    ]


def compare(
    path: str, rows: Sequence[EvalRow], about: dict[str, Any], other: dict[str, Any]
) -> Comparison:
    """Compares ``rows`` and their provenance ``about`` with the ``other`` results, read from the
    folder ``path``.
    """
    scores = {_key(row): row.score for row in _rows(other)}
    both = [
        ComparedRow(row, scores[_key(row)]) for row in rows if scores.get(_key(row)) is not None
    ]
    here, there = _settings(about), _settings(other)
    names = [
        name
        for name in here | there
        if name not in OWN_KEYS and here.get(name, "null") != there.get(name, "null")
    ]
    settings = {
        name.removeprefix("config."): (here.get(name, ""), there.get(name, "")) for name in names
    }
    return Comparison(
        f"{path} of {other.get('created', 'unknown time')}",
        both,
        len(rows) + len(scores) - 2 * len(both),
        settings,
    )


def scores(rows: Sequence[ComparedRow]) -> dict[str, list[str]]:
    return columns_of([row.cells() for row in rows])


def show(comparison: Comparison, console: Console) -> None:
    """Prints the scores of dense attention and of trained methods side by side, and the settings
    that differ.
    """
    console.print(
        f"Compared with {comparison.title}",
        style="bold",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if columns := scores(comparison.main()):
        console.print(filled(None, columns, ("task", "method", "setting")))
    if comparison.unmatched:
        console.print(
            f"{comparison.unmatched} rows are in one of the two evaluations only.", highlight=False
        )
    for name, (here, there) in comparison.settings.items():
        console.print(
            f"{name}: {here or 'none'} here, {there or 'none'} there",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def score_text(task: str, score: float) -> str:
    return task_of(task).form.format(score)


def _of(row: EvalRow) -> tuple[str, str, str]:
    length, batch = row.extra.get("length"), row.extra.get("batch", 1)
    return row.task, f"{length:,}" if length else "", f"batch {batch}" if batch > 1 else ""


def _difference(task: str, here: float, there: float) -> str:
    if task_of(task).timed:
        return f"{100 * (here / there - 1):+.1f} %" if there else ""
    return (
        f"{100 * (here - there):+.1f} points"
        if "%" in task_of(task).form
        else f"{here - there:+.3f}"
    )


def _key(row: EvalRow) -> tuple[Any, ...]:
    sample = row.extra.get("length"), row.extra.get("batch", 1), row.extra.get("benchmark")
    return row.task, *sample, str(row.method), str(row.setting)


def _settings(about: Mapping[str, Any]) -> dict[str, str]:
    """Returns the configuration, the artifacts' hashes, the machine and the versions as
    ``{dotted key: text}``.
    """
    hashes = {
        f"{kind} artifact": str(manifest.get("content_hash"))[:16]
        for kind, manifest in about["artifacts"].items()
    }
    config, machine, versions = (
        {name: json.dumps(value) for name, value in flat_settings(about[part], f"{part}.").items()}
        for part in ("config", "machine", "versions")
    )
    return config | hashes | machine | versions


def tabulate(folders: Sequence[Path]) -> Path | None:
    """Prints the scores of trained methods in the evaluations ``folders``, and writes all their
    rows to one CSV file.

    Returns ``sweep.csv`` in the folder that holds those of all names; None for evaluations of one
    name, which replace each other.
    """
    if len(set(folders)) < max(2, len(folders)):
        return None
    root = Path(os.path.commonpath(folders))
    path, names = root / "sweep.csv", [str(folder.parent.relative_to(root)) for folder in folders]
    evaluations = {
        name: _rows(read_results(str(folder))) for name, folder in zip(names, folders, strict=True)
    }
    rows = [
        replace(row, extra={"name": name, **row.extra})
        for name, own in evaluations.items()
        for row in own
    ]
    with locked(path):
        write_table(path, flat(rows))
    console = Console()
    console.print(_table(evaluations))
    console.print(f"All rows: [bold]{path}[/bold]", soft_wrap=True)
    return path


def _table(evaluations: dict[str, list[EvalRow]]) -> Table:
    cells: dict[tuple[str, Method], dict[str, str]] = {}
    for name, rows in evaluations.items():
        for row in (row for row in rows if row.method.is_trained):
            column = " ".join(filter(None, (*_of(row), str(row.setting))))
            cells.setdefault((name, row.method), {})[column] = score_text(row.task, row.score)
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    shown = with_columns("All evaluations", ["name", "method", *columns], ("name", "method"))
    for column in shown.columns:
        column.no_wrap, column.overflow, column.vertical = False, "fold", "top"
    for (name, method), line in cells.items():
        shown.add_row(name, method.label, *(line.get(column, "") for column in columns))
    return shown

"""Cells and tables of Markdown, whose numbers are those of the CSV files in this folder."""

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean

FOLDER = Path(__file__).parent
Where = Mapping[str, str]


@cache
def rows(file: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV file."""
    with (FOLDER / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


class Cell:
    """A column of a table, or a number: the row of a file with ``where``, written as ``form``.

    A form ends in ``%`` for shares, which are written in percent. Three names of ``numbers`` are a
    number and its interval. ``file`` is another file than the table's.
    """

    def __init__(
        self, head: str, form: str, *numbers: str, file: str | None = None, **where: str
    ) -> None:
        self.head, self.form, self.numbers, self.file = head, form, numbers, file
        self.where = where

    def write(self, file: str, where: Where) -> str:
        """Returns the cell, empty without a row. Raises LookupError if rows differ in more than
        their seed.
        """
        file, where = self.file or file, {**where, **self.where}
        matching = [
            row for row in rows(file) if all(row[key] == value for key, value in where.items())
        ]
        if len({row.get("seed") for row in matching}) != len(matching):
            raise LookupError(f"{file}.csv has several rows with {where}")
        if not matching:
            return ""
        shown = [
            format(fmean(float(row[name]) for row in matching), self.form).rstrip("%")
            for name in self.numbers
        ]
        return f"{shown[0]} ({shown[1]} to {shown[2]})" if len(shown) == 3 else shown[0]


class Table:
    """A table of the rows of a file with ``where``: its lines by their first cells (divided by
    ``|``), and its columns.
    """

    def __init__(
        self, file: str, first: str, lines: Mapping[str, Where], columns: list[Cell], **where: str
    ) -> None:
        self.file = file
        self.first = first
        self.lines = lines
        self.columns = columns
        self.where = where

    def write(self) -> Iterator[str]:
        """Yields lines of Markdown. Raises LookupError for a line without numbers."""
        heads = [*self.first.split("|"), *(column.head for column in self.columns)]
        yield from ("", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}")
        for name, line in self.lines.items():
            cells = [column.write(self.file, {**self.where, **line}) for column in self.columns]
            if not any(cells):
                raise LookupError(f"{self.file}.csv has no row with {self.where} and {line}")
            yield f"| {' | '.join([*name.split('|'), *cells])} |"
        yield ""

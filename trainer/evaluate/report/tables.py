"""Tables of rows: cells for terminal and page, the table of the terminal, and a leaderboard."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from msattn.trainer.config import RULER_TASKS, TASKS
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import SECONDS, SPEEDUP, task_of

TEXT_COLUMNS = ("method", "setting")
# shown by the page, but not by the terminal, as are intervals; eval=latency has columns of its own
DETAILS = {
    *RULER_TASKS,
    *("attention", "bits per byte", "imbalance", "latency", "launched by"),
    *("peak memory", "recall", "selection", "sparsity"),
}
# intervals of comparisons with dense attention
COMPARED = ("ratio_interval", "kl_interval", "same_top_interval")

COMMON_COLUMNS = {
    "sparsity": ("sparsity", "{:.1%}"),
    "keys read": ("selectivity", "{:.1%}"),
    "recall": ("recall", "{:.1%}"),
    "latency": ("latency_s", SECONDS),
    "peak memory": ("peak_memory_mb", "{:,.0f} MiB"),
}


def columns_of(lines: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Returns ``{header: cells}`` of lines with the same headers."""
    return {name: [line[name] for line in lines] for name in lines[0]} if lines else {}


def caption(rows: list[EvalRow]) -> str:
    """Returns the heading of a task's table, with the number and length of its samples."""
    first, counts = rows[0], sorted({row.samples for row in rows})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    shown = task_of(first.task)
    return f"{shown.heading}: {span} {shown.unit.format_map(first.extra)}"


def table(rows: list[EvalRow]) -> dict[str, list[str]]:
    """Returns ``{column: cells}`` of the rows of one task, without empty columns."""
    task = task_of(rows[0].task)
    columns = {
        "method": [row.method.label for row in rows],
        "setting": [str(row.setting) for row in rows],
    }
    common = {name: cell for name, cell in COMMON_COLUMNS.items() if name not in task.hidden}
    for name, (key, form) in {**task.columns, **common}.items():
        if name == SPEEDUP:
            speedups = dict.fromkeys(
                field for row in rows for field in row.extra if field.startswith(key)
            )
            columns |= {
                name + field.removeprefix(key): [_cell(row, field, form) for row in rows]
                for field in speedups
            }
        else:
            columns[name] = [_cell(row, key, form) for row in rows]
    return {name: cells for name, cells in columns.items() if any(cells)}


def _cell(row: EvalRow, key: str, form: str) -> str:
    """Returns a field of a row or of its ``extra`` as text; empty if there is none, or it compares
    dense with itself.
    """
    value = row.extra.get(key) if key in row.extra else getattr(row, key, None)
    if value is None or (key in COMPARED and row.method.is_dense):
        return ""
    if form == SECONDS:
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return (
        " – ".join(form.format(bound) for bound in value)
        if isinstance(value, tuple | list)
        else form.format(value)
    )


def show(rows: Sequence[EvalRow], notes: list[str], console: Console) -> None:
    for task in TASKS:
        own = [row for row in rows if row.task == task]
        if own:
            console.print(_terminal(own))
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def _terminal(rows: list[EvalRow]) -> Table:
    columns = {
        header: cells
        for header, cells in table(rows).items()
        if header not in DETAILS and "95 %" not in header
    }
    groups = [(row.method, row.extra.get("length"), row.extra.get("batch")) for row in rows]
    bold = [row.method.is_trained for row in rows]
    return filled(caption(rows), columns, TEXT_COLUMNS, groups, bold)


def filled(
    title: str | None,
    columns: dict[str, list[str]],
    text: Collection[str],
    groups: Sequence[Any] | None = None,
    bold: Sequence[bool] | None = None,
    sections: bool = False,
) -> Table:
    """Returns ``{header: cells}`` as a table; its first column shows only the first cell of each
    group of lines.

    ``sections`` leaves room between groups; ``bold`` marks lines.
    """
    headers = [name if name in text else name.replace(" ", "\n") for name in columns]
    shown = with_columns(title, headers, text)
    for column, cells in zip(shown.columns, columns.values(), strict=True):
        if not column.no_wrap:  # rich would break words before it shortens numbers
            column.min_width = max(len(word) for cell in cells for word in ["", *cell.split()])
    for number, (first, *cells) in enumerate(zip(*columns.values(), strict=True)):
        begins = groups is None or not number or groups[number] != groups[number - 1]
        if sections and begins and number:
            shown.add_section()
        shown.add_row(
            first if begins else "", *cells, style="bold" if bold and bold[number] else None
        )
    return shown


def with_columns(title: str | None, headers: Sequence[str], text: Collection[str]) -> Table:
    """Returns a table without rows. In a narrow terminal the columns of ``text`` wrap, numbers do
    not.
    """
    shown = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for header in headers:
        is_text = header in text
        shown.add_column(
            header,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            vertical="bottom",
        )
    return shown


def leaderboard(rows: Sequence[EvalRow]) -> str:
    """Returns a table in Markdown for each length of the prompts; empty without rows."""
    lengths = sorted({row.extra["length"] for row in rows})
    return "\n".join(
        _leaderboard([row for row in rows if row.extra["length"] == length], length)
        for length in lengths
    )


def _leaderboard(rows: list[EvalRow], length: int) -> str:
    shares = dict.fromkeys(map(_left_out, rows))
    columns = sorted(
        shares, key=lambda name: (0, float(name[:-2])) if name.endswith(" %") else (1, 0)
    )
    methods = {
        row.method: {_left_out(own): own for own in rows if own.method == row.method}
        for row in rows
    }
    best_first = sorted(
        methods,
        key=lambda method: fmean(row.score for row in methods[method].values()),
        reverse=True,
    )
    lines = [
        [method.label, *(_score_and_reads(methods[method].get(name)) for name in columns)]
        for method in sorted(best_first, key=lambda method: not method.is_dense)
    ]
    table = [["method", *columns], ["---"] * (1 + len(columns)), *lines]
    title = (
        f"RULER, {rows[0].samples} prompts of {length:,} tokens: score (keys read), both in "
        f"%, by the share left out"
    )
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in table), ""])


def _left_out(row: EvalRow) -> str:
    """Returns the requested share of blocks or keys to leave out (kvpress' compression ratio), or
    else the setting.
    """
    if row.method.is_dense:
        return "0 %"
    left_out = row.setting.left_out
    return str(row.setting) if left_out is None else f"{100 * left_out:.4g} %"


def _score_and_reads(row: EvalRow | None) -> str:
    return f"{100 * row.score:.1f} ({100 * (row.selectivity or 0):.1f})" if row else ""

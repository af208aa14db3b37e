"""Tables of rows: the cells for terminal and page, and the layout for the terminal, where no number is cut."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import RULER_TASKS
from msattn.trainer.evaluate.row import EvalRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEADINGS = {
    "perplexity": "Perplexity of held-out text",
    "recall": "Attention mass read",
    "needle": "Needles in a haystack",
    "documents": "Perplexity of documents from their beginning",
    "ruler": "RULER's average",
    "harness": "lm_eval",
    "prompts": "Own prompts",
    "analysis": "Queries, keys and attention mass",
    "latency": "Time to the first token",
    "decoding": "Tokens per second in decoding",
    "throughput": "Requests served together",
}
TEXT_COLUMNS = ("method", "setting")
SPEEDUP = "x "  # start of the columns of speed-ups
SAMPLE_UNITS = dict.fromkeys(("needle", "ruler", "prompts", "latency"), "prompts per row")
SAMPLE_UNITS |= {"documents": "documents per row", "harness": "samples per row", "decoding": "tokens per row"}
SAMPLE_UNITS["throughput"] = "requests per row"
# A terminal that is too narrow drops those of RULER's tasks, then these, in this order, then speed-ups, the widest first.
OPTIONAL_COLUMNS = (
    *("peak memory", "sparsity", "bits per byte", "latency", "same top, 95 %", "KL, 95 %", "95 % interval", "recall"),
    *("attention", "selection", "launched by", "break-even", "metric", "measure", "imbalance", "99 %", "prompt", "requests"),
    *("same top", "KL", "vs dense, 95 %", "vs dense"),
)

SECONDS = "seconds"  # as milliseconds below one second
COMPARED = ("ratio_interval", "kl_interval", "same_top_interval")  # intervals of comparisons with dense attention

# The columns of each task: the field of a row or of its ``extra``, and its format.
SHARE, BOUNDS, RATIO = ("score", "{:.1%}"), ("interval", "{:.0%}"), ("ratio_to_dense", "{:.3f}")
LENGTH, BATCH, RATE, NAME = ("length", "{:,}"), ("batch", "{}"), ("score", "{:.4g}"), ("score_name", "{}")
TOKENS, ERROR = {"tokens": LENGTH}, {"output error": ("output_error", "{:.4f}")}
SPEEDUPS = {SPEEDUP: ("times_", "{:.2f}")}  # a column for each dense method
PERPLEXITY = {
    "perplexity": ("score", "{:.3f}"),
    "vs dense": ("ratio_to_dense", "{:.4f}"),
    "95 % interval": ("ratio_interval", "{:.4f}"),
    "KL": ("kl_divergence", "{:.4f}"),
    "KL, 95 %": ("kl_interval", "{:.4f}"),
    "same top": ("same_top", "{:.1%}"),
    "same top, 95 %": ("same_top_interval", "{:.1%}"),
    "bits per byte": ("bits_per_byte", "{:.3f}"),
}
TASK_COLUMNS = {
    "perplexity": PERPLEXITY,
    "recall": {"mass read": SHARE, "95 % interval": ("interval", "{:.1%}"), **ERROR},
    "needle": TOKENS | {"found": SHARE, "95 % interval": BOUNDS, "vs dense": RATIO},
    "documents": TOKENS | PERPLEXITY,
    "ruler": TOKENS
    | {"average": SHARE, "95 % interval": BOUNDS, "vs dense": RATIO, "vs dense, 95 %": ("ratio_interval", "{:.3f}")}
    | {task: (task, "{:.1%}") for task in RULER_TASKS},
    "harness": {"benchmark": ("benchmark", "{}")}
    | TOKENS
    | {"metric": NAME, "score": ("score", "{:.3f}"), "95 % interval": ("interval", "{:.3f}"), "vs dense": RATIO},
    "prompts": {"as expected": SHARE, "95 % interval": BOUNDS, "tokens as dense": ("same_as_dense", "{:.1%}")},
    "analysis": {"measure": NAME, "value": ("score", "{:.3f}"), **ERROR, "imbalance": ("imbalance", "{:.2f}")},
    "latency": TOKENS
    | {"first token": ("score", SECONDS)}
    | SPEEDUPS
    | {part: (f"{part}_share", "{:.1%}") for part in ("selection", "attention")}
    | {"break-even": ("break_even", "{:,}")},
    "decoding": {"launched by": ("launched_by", "{}"), "batch": BATCH, "keys": LENGTH, "tokens/s": RATE} | SPEEDUPS,
    "throughput": {"requests": BATCH, "prompt": LENGTH, "tokens/s": RATE}
    | SPEEDUPS
    | {"first token": ("first_token_p50_s", SECONDS), "99 %": ("first_token_p99_s", SECONDS)},
}
COMMON_COLUMNS = {
    "sparsity": ("sparsity", "{:.1%}"),
    "keys read": ("selectivity", "{:.1%}"),
    "recall": ("recall", "{:.1%}"),
    "latency": ("latency_s", SECONDS),
    "peak memory": ("peak_memory_mb", "{:,.0f} MiB"),
}
SHOWN_OTHERWISE = {"recall": ("recall", "analysis"), "latency": ("latency", "decoding", "throughput")}  # in these tasks

PADDING = 3  # characters between two columns; the two edges have a space each, together one less
TEXT_WIDTH = 14  # characters of a column of text, whose longer cells wrap before columns go


def caption(rows: list[EvalRow]) -> str:
    """Returns the heading of a task's table, with the number and length of its samples."""
    first, counts = rows[0], sorted({row.samples for row in rows})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    length = f" of {first.extra['length']:,} tokens" if first.task == "perplexity" else ""
    return f"{HEADINGS[first.task]}: {span} {SAMPLE_UNITS.get(first.task, 'chunks')}{length}"


def table(rows: list[EvalRow]) -> dict[str, list[str]]:
    """Returns ``{column: cells}`` of the rows of one task, without empty columns."""
    task = rows[0].task
    columns = {"method": [row.method.label for row in rows], "setting": [row.setting for row in rows]}
    common = {name: cell for name, cell in COMMON_COLUMNS.items() if task not in SHOWN_OTHERWISE.get(name, ())}
    for name, (key, form) in (TASK_COLUMNS[task] | common).items():
        if name == SPEEDUP:
            speedups = dict.fromkeys(each for row in rows for each in row.extra if each.startswith(key))
            columns |= {name + each.removeprefix(key): [_cell(row, each, form) for row in rows] for each in speedups}
        else:
            columns[name] = [_cell(row, key, form) for row in rows]
    return {name: cells for name, cells in columns.items() if any(cells)}


def _cell(row: EvalRow, key: str, form: str) -> str:
    """Returns a field of a row or of its ``extra`` as text; empty if there is none, or it compares dense with itself."""
    value = row.extra.get(key) if key in row.extra else getattr(row, key, None)
    if value is None or (key in COMPARED and row.method.is_dense):
        return ""
    if form == SECONDS:
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return " – ".join(form.format(bound) for bound in value) if isinstance(value, tuple | list) else form.format(value)


def show(rows: Sequence[EvalRow], notes: list[str], console: "Console") -> None:
    """Prints one table for each task, then the notes."""
    for task in HEADINGS:
        own = [row for row in rows if row.task == task]
        if own:
            console.print(_terminal(own, console.width))
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def _terminal(rows: list[EvalRow], width: int) -> "Table":
    columns = table(rows)
    speedups = sorted((name for name in columns if name.startswith(SPEEDUP)), key=len, reverse=True)
    columns = fitting(columns, width, TEXT_COLUMNS, (RULER_TASKS, *((name,) for name in (*OPTIONAL_COLUMNS, *speedups))))
    groups = [(row.method, row.extra.get("length"), row.extra.get("batch")) for row in rows]
    return filled(caption(rows), columns, TEXT_COLUMNS, groups, [row.method.is_trained for row in rows])


def fitting(
    columns: dict[str, list[str]], width: int, text: Collection[str], optional: Iterable[Collection[str]]
) -> dict[str, list[str]]:
    """Returns the ``{header: cells}`` that fit ``width`` characters.

    If they do not, headers break at their spaces and the columns of ``text`` wrap, then the groups of ``optional`` headers go,
    in this order.
    """
    room = width + 1
    if sum(PADDING + max(map(len, [header, *cells])) for header, cells in columns.items()) <= room:
        return columns
    broken = {header.replace(" ", "\n").replace("\n%", " %"): cells for header, cells in columns.items()}
    for names in optional:
        if sum(PADDING + _least_width(header, cells, header in text) for header, cells in broken.items()) > room:
            broken = {header: cells for header, cells in broken.items() if header.replace("\n", " ") not in names}
    return broken


def filled(
    title: str | None,
    columns: dict[str, list[str]],
    text: Collection[str],
    groups: Sequence[Any] | None = None,
    bold: Sequence[bool] | None = None,
    sections: bool = False,
) -> "Table":
    """Returns ``{header: cells}`` as a table whose first column shows the cell of the first line of each group alone.

    ``sections`` leaves room between groups; ``bold`` marks lines.
    """
    shown = with_columns(title, list(columns), text)
    for number, (first, *cells) in enumerate(zip(*columns.values(), strict=True)):
        begins = groups is None or not number or groups[number] != groups[number - 1]
        if sections and begins and number:
            shown.add_section()
        shown.add_row(first if begins else "", *cells, style="bold" if bold and bold[number] else None)
    return shown


def with_columns(title: str | None, headers: Sequence[str], text: Collection[str]) -> "Table":
    """Returns a table without rows. In a terminal that is still too narrow the columns of ``text`` wrap, numbers do not."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        is_text = header in text
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not is_text, vertical="bottom")
    return table


def _least_width(header: str, cells: list[str], is_text: bool) -> int:
    whole = max(map(len, [*header.split("\n"), *cells]))
    return max([min(whole, TEXT_WIDTH), *(len(word) for cell in cells for word in cell.split())]) if is_text else whole

"""Tables of rows: the cells for terminal and page, and the layout for the terminal, where no number is cut."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

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
TOKENS = {"tokens": ("length", "{:,}")}
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
    "recall": {
        "mass read": ("score", "{:.1%}"),
        "95 % interval": ("interval", "{:.1%}"),
        "output error": ("output_error", "{:.4f}"),
    },
    "needle": TOKENS
    | {
        "found": ("score", "{:.1%}"),
        "95 % interval": ("interval", "{:.0%}"),
        "vs dense": ("ratio_to_dense", "{:.3f}"),
    },
    "documents": TOKENS | PERPLEXITY,
    "ruler": TOKENS
    | {
        "average": ("score", "{:.1%}"),
        "95 % interval": ("interval", "{:.0%}"),
        "vs dense": ("ratio_to_dense", "{:.3f}"),
        "vs dense, 95 %": ("ratio_interval", "{:.3f}"),
        **{task: (task, "{:.1%}") for task in RULER_TASKS},
    },
    "harness": {"benchmark": ("benchmark", "{}")}
    | TOKENS
    | {
        "metric": ("score_name", "{}"),
        "score": ("score", "{:.3f}"),
        "95 % interval": ("interval", "{:.3f}"),
        "vs dense": ("ratio_to_dense", "{:.3f}"),
    },
    "prompts": {
        "as expected": ("score", "{:.1%}"),
        "95 % interval": ("interval", "{:.0%}"),
        "tokens as dense": ("same_as_dense", "{:.1%}"),
    },
    "analysis": {
        "measure": ("score_name", "{}"),
        "value": ("score", "{:.3f}"),
        "output error": ("output_error", "{:.4f}"),
        "imbalance": ("imbalance", "{:.2f}"),
    },
    "latency": TOKENS
    | {"first token": ("score", SECONDS)}
    | SPEEDUPS
    | {
        "selection": ("selection_share", "{:.1%}"),
        "attention": ("attention_share", "{:.1%}"),
        "break-even": ("break_even", "{:,}"),
    },
    "decoding": {
        "launched by": ("launched_by", "{}"),
        "batch": ("batch", "{}"),
        "keys": ("length", "{:,}"),
        "tokens/s": ("score", "{:.4g}"),
    }
    | SPEEDUPS,
    "throughput": {
        "requests": ("batch", "{}"),
        "prompt": ("length", "{:,}"),
        "tokens/s": ("score", "{:.4g}"),
    }
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
    shown = with_columns(caption(rows), list(columns), TEXT_COLUMNS)
    before = None
    for row, (method, *cells) in zip(rows, zip(*columns.values(), strict=True), strict=True):
        group = (row.method, row.extra.get("length"), row.extra.get("batch"))
        shown.add_row("" if group == before else method, *cells, style="bold" if row.method.is_trained else None)
        before = group
    return shown


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

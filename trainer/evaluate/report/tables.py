"""Tables of rows: the cells for terminal and page, and the layout for the terminal."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msattn.trainer.config import RULER_TASKS
from msattn.trainer.evaluate.report.terminal import fitting, with_columns
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


def caption(rows: list[EvalRow]) -> str:
    """Returns the heading of a task's table, with the number and length of its samples."""
    first, counts = rows[0], sorted({row.samples for row in rows})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    length = f" of {first.extra['length']:,} tokens" if first.task == "perplexity" else ""
    return f"{HEADINGS[first.task]}: {span} {SAMPLE_UNITS.get(first.task, 'chunks')}{length}"


def table(rows: list[EvalRow]) -> dict[str, list[str]]:
    """Returns ``{column: cells}`` of the rows of one task, without empty columns."""
    columns = {"method": [row.method.label for row in rows], "setting": [row.setting for row in rows]}
    columns |= TASK_COLUMNS[rows[0].task](rows)
    columns |= {
        "sparsity": [_percent(row.sparsity) for row in rows],
        "keys read": [_percent(row.selectivity) for row in rows],
        "recall": [_percent(row.recall) if row.task not in ("recall", "analysis") else "" for row in rows],
        "latency": [_seconds(row.latency_s) if row.task not in ("latency", "decoding", "throughput") else "" for row in rows],
        "peak memory": [f"{row.peak_memory_mb:,.0f} MiB" if row.peak_memory_mb is not None else "" for row in rows],
    }
    return {name: cells for name, cells in columns.items() if any(cells)}


def _perplexity(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "perplexity": [f"{row.score:.3f}" for row in rows],
        "vs dense": [f"{row.ratio_to_dense:.4f}" for row in rows],
        "95 % interval": ["" if row.method.is_dense else _interval(row.extra["ratio_interval"], "{:.4f}") for row in rows],
        "KL": [f"{row.extra['kl_divergence']:.4f}" for row in rows],
        "KL, 95 %": ["" if row.method.is_dense else _interval(row.extra["kl_interval"], "{:.4f}") for row in rows],
        "same top": [_percent(row.extra["same_top"]) for row in rows],
        "same top, 95 %": ["" if row.method.is_dense else _interval(row.extra["same_top_interval"], "{:.1%}") for row in rows],
        "bits per byte": [f"{row.extra['bits_per_byte']:.3f}" for row in rows],
    }


def _documents(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {"tokens": [f"{row.extra['length']:,}" for row in rows], **_perplexity(rows)}


def _recall(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "mass read": [_percent(row.score) for row in rows],
        "95 % interval": [_interval(row.interval, "{:.1%}") for row in rows],
        "output error": [f"{row.extra['output_error']:.4f}" for row in rows],
    }


def _needle(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "tokens": [f"{row.extra['length']:,}" for row in rows],
        "found": [_percent(row.score) for row in rows],
        "95 % interval": [_interval(row.interval, "{:.0%}") for row in rows],
        "vs dense": [f"{row.ratio_to_dense:.3f}" if row.ratio_to_dense is not None else "" for row in rows],
    }


def _ruler(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "tokens": [f"{row.extra['length']:,}" for row in rows],
        "average": [_percent(row.score) for row in rows],
        "95 % interval": [_interval(row.interval, "{:.0%}") for row in rows],
        "vs dense": [f"{row.ratio_to_dense:.3f}" if row.ratio_to_dense is not None else "" for row in rows],
        "vs dense, 95 %": [_interval(row.extra["ratio_interval"], "{:.3f}") for row in rows],
        **{task: [_percent(row.extra.get(task)) for row in rows] for task in RULER_TASKS},
    }


def _harness(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "benchmark": [row.extra["benchmark"] for row in rows],
        "tokens": [f"{row.extra['length']:,}" if "length" in row.extra else "" for row in rows],
        "metric": [row.score_name for row in rows],
        "score": [f"{row.score:.3f}" for row in rows],
        "95 % interval": [_interval(row.interval, "{:.3f}") for row in rows],
        "vs dense": [f"{row.ratio_to_dense:.3f}" if row.ratio_to_dense is not None else "" for row in rows],
    }


def _prompts(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "as expected": [_percent(row.score) for row in rows],
        "95 % interval": [_interval(row.interval, "{:.0%}") for row in rows],
        "tokens as dense": [_percent(row.extra["same_as_dense"]) for row in rows],
    }


def _analysis(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "measure": [row.score_name for row in rows],
        "value": [f"{row.score:.3f}" for row in rows],
        "output error": [f"{row.extra['output_error']:.4f}" if "output_error" in row.extra else "" for row in rows],
        "imbalance": [f"{row.extra['imbalance']:.2f}" if "imbalance" in row.extra else "" for row in rows],
    }


def _latency(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "tokens": [f"{row.extra['length']:,}" for row in rows],
        "first token": [_seconds(row.score) for row in rows],
        **_speedups(rows),
        "selection": [_percent(row.extra["selection_share"]) for row in rows],
        "attention": [_percent(row.extra["attention_share"]) for row in rows],
        "break-even": [f"{row.extra['break_even']:,}" if row.extra["break_even"] else "" for row in rows],
    }


def _decoding(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "launched by": [row.extra["launched_by"] for row in rows],
        "batch": [f"{row.extra['batch']}" for row in rows],
        "keys": [f"{row.extra['length']:,}" for row in rows],
        "tokens/s": [f"{row.score:.4g}" for row in rows],
        **_speedups(rows),
    }


def _throughput(rows: list[EvalRow]) -> dict[str, list[str]]:
    return {
        "requests": [f"{row.extra['batch']}" for row in rows],
        "prompt": [f"{row.extra['length']:,}" for row in rows],
        "tokens/s": [f"{row.score:.4g}" for row in rows],
        **_speedups(rows),
        "first token": [_seconds(row.extra["first_token_p50_s"]) for row in rows],
        "99 %": [_seconds(row.extra["first_token_p99_s"]) for row in rows],
    }


def _speedups(rows: list[EvalRow]) -> dict[str, list[str]]:
    """Returns a column of speed-ups over each dense method."""
    keys = dict.fromkeys(key for row in rows for key in row.extra if key.startswith("times_"))
    return {
        f"{SPEEDUP}{key.removeprefix('times_')}": [f"{row.extra[key]:.2f}" if key in row.extra else "" for row in rows]
        for key in keys
    }


TASK_COLUMNS: dict[str, Callable[[list[EvalRow]], dict[str, list[str]]]] = {
    "perplexity": _perplexity,
    "recall": _recall,
    "needle": _needle,
    "documents": _documents,
    "ruler": _ruler,
    "harness": _harness,
    "prompts": _prompts,
    "analysis": _analysis,
    "latency": _latency,
    "decoding": _decoding,
    "throughput": _throughput,
}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _interval(bounds: Sequence[float] | None, form: str) -> str:
    return "" if bounds is None else f"{form.format(bounds[0])} – {form.format(bounds[1])}"


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

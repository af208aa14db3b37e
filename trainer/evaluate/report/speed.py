"""Figures of speed: time to the first token with its parts, and tokens per second of ``generate``,
against the length.
"""

from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.report.style import (
    BLUE,
    INK,
    few_lines,
    legend_under,
    length_axis,
    longest,
    plot_by_length,
    plot_line,
    row_title,
    subplots,
)
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# lines of sparse attention per panel; with more, each method shows only the setting that reads the
# fewest keys
MAX_LINES = 6
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
MARKERS = "osD^vP"
DENSE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": INK, "linestyle": "--"},
    {"color": "#808080", "linestyle": "-."},
    {"color": INK, "linestyle": ":"},
)
FASTEST = "dense, fastest kernel"

Line = list[tuple[int, float]]  # lengths and values


def speed(rows: list[EvalRow]) -> "Figure | None":
    """Plots seconds to the first token and tokens per second after a cache against the length, one
    sequence each.
    """
    own = [row for row in rows if row.is_of_one_prompt()]
    prompts, decoded = (
        [row for row in own if row.task == task] for task in ("latency", "decoding")
    )
    drawn = [
        panel for panel in ((prompts, "tokens of the prompt"), (decoded, "cached keys")) if panel[0]
    ]
    if not drawn:
        return None
    figure, panels = subplots(1, len(drawn), (5.75 * len(drawn), 5.2))
    for axes, (of_task, label) in zip(panels, drawn, strict=True):
        _plot(
            axes,
            _dense_lines(of_task),
            few_lines([row for row in of_task if not row.method.is_dense], MAX_LINES),
        )
        length_axis(axes, of_task, label)
        prefill = of_task is prompts
        axes.set(ylabel="seconds to the first token" if prefill else "tokens per second")
        axes.set_title("time to the first token" if prefill else "decoding, one sequence")
    return figure


def _dense_lines(rows: list[EvalRow]) -> dict[str, Line]:
    """Returns the lines of dense attention: what ``generate`` reaches, and the fastest SDPA kernel
    at each length.
    """
    dense = [row for row in rows if row.method.is_dense]
    lines: dict[str, Line] = {}
    kernels: dict[int, list[EvalRow]] = {}
    for row in dense:
        if row.extra.get("launched_by") == "generate":
            lines.setdefault(str(row.method), []).append((row.extra["length"], row.score))
        else:
            kernels.setdefault(row.extra["length"], []).append(row)
    if kernels:
        best = max if rows[0].task == "decoding" else min
        graph = {row.extra.get("launched_by") for row in dense} & {"CUDA graph"}
        names = {str(row.method) for of_length in kernels.values() for row in of_length}
        name = (names.pop() if len(names) == 1 else FASTEST) + " (CUDA graph)" * bool(graph)
        lines[name] = [
            (length, best(row.score for row in of_length)) for length, of_length in kernels.items()
        ]
    return lines


def _plot(axes: "Axes", dense: dict[str, Line], sparse: list[EvalRow]) -> None:
    for number, (name, points) in enumerate(dense.items()):
        plot_line(axes, points, name, marker=".", linewidth=1.4, **DENSE_STYLES[number % 3])
    lines: dict[tuple[Method, Setting], list[EvalRow]] = {}
    for row in sparse:
        lines.setdefault((row.method, row.setting), []).append(row)
    one_of_each = len({method for method, _ in lines}) == len(lines)
    for number, ((method, _), points) in enumerate(lines.items()):
        style: dict[str, Any] = {
            "color": COLORS[number % 6],
            "marker": MARKERS[number % 6],
            "linewidth": 1.8,
            "markersize": 5,
        }
        if one_of_each and method.style:
            style = method.line
        plot_line(
            axes,
            [(row.extra["length"], row.score) for row in points],
            row_title(points[0]),
            **style,
        )
    axes.set_yscale("log")
    _value_ticks(axes)
    legend_under(axes, 2)


def _value_ticks(axes: "Axes") -> None:
    """Labels the y axis with plain numbers, more of them if it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def latency(rows: list[EvalRow]) -> "Figure | None":
    """Plots the speed-up over the fastest dense attention by length, and the parts of the time at
    the longest length.
    """
    rows = few_lines([row for row in rows if row.is_of_one_prompt()], 2 * MAX_LINES)
    if not rows:
        return None
    figure, (speedup, parts) = subplots(1, 2, (11.5, 5.2))
    sparse = [row for row in rows if not row.method.is_dense and row.ratio_to_dense]
    plot_by_length(speedup, sparse, lambda row: 1 / (row.ratio_to_dense or 1.0))
    speedup.axhline(1, color=INK, linewidth=0.8)
    speedup.set(ylabel="speed-up over the fastest dense attention")
    if sparse:
        legend_under(speedup, 2)
    _plot_parts(parts, longest(rows))
    parts.set(
        xlabel="seconds to the first token", title=f"{longest(rows)[0].extra['length']:,} tokens"
    )
    return figure


def _plot_parts(axes: "Axes", rows: list[EvalRow]) -> None:
    """Plots stacked bars of the seconds in attention, in block selection and in the rest of the
    model.
    """
    attention = [row.extra["attention_s"] for row in rows]
    selection = [row.extra["selection_s"] for row in rows]
    rest = [
        max(0.0, row.score - a - s) for row, a, s in zip(rows, attention, selection, strict=True)
    ]
    left = [0.0] * len(rows)
    parts = (
        ("attention", BLUE, attention),
        ("block selection", "#D55E00", selection),
        ("rest of the model", "#CCCCCC", rest),
    )
    for part, color, widths in parts:
        axes.barh([row_title(row) for row in rows], widths, left=left, label=part, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9)

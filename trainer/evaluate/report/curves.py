"""Curves of the results: quality and speed against the share of what is read."""

from typing import TYPE_CHECKING

from msattn.trainer.evaluate.report.style import (
    BLUE,
    INK,
    by_method,
    is_of_one_prompt,
    key_share_axis,
    legend_outside,
    panel_grid,
    percent,
    percent_above,
    perplexity_axis,
    plot_with_intervals,
    row_title,
    subplots,
)
from msattn.trainer.evaluate.row import EvalRow

MAX_LINES = 12  # of the figure of latencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def perplexity(rows: list[EvalRow]) -> "Figure | None":
    """Plots the rise of perplexity over dense attention against realised sparsity, with intervals of paired differences."""
    rows = [row for row in rows if not row.method.is_dense]
    if not rows:
        return None
    figure, (axes,) = panel_grid(1)
    for method, points in by_method(rows):
        points.sort(key=lambda row: row.sparsity or 0)
        rise = [percent_above(row.ratio_to_dense) for row in points]
        intervals = [row.extra["ratio_interval"] or (row.ratio_to_dense,) * 2 for row in points]
        bounds = [[percent_above(bound) for bound in interval] for interval in intervals]
        plot_with_intervals(axes, [percent(row.sparsity) for row in points], rise, bounds, method)
    perplexity_axis(axes, [percent_above(row.ratio_to_dense) for row in rows])
    axes.set(xlabel="sparsity: visible blocks not read (%)")
    legend_outside(figure, axes)
    return figure


def documents(rows: list[EvalRow]) -> "Figure | None":
    """Plots the rise of perplexity over dense attention against the length; of many lines, one for each method."""
    rows = few_lines([row for row in rows if not row.method.is_dense])
    if not rows:
        return None
    figure, (axes,) = panel_grid(1)
    for number, name in enumerate(dict.fromkeys(map(row_title, rows))):
        points = sorted((row for row in rows if row_title(row) == name), key=lambda row: row.extra["length"])
        rise = [percent_above(row.ratio_to_dense) for row in points]
        axes.plot([row.extra["length"] for row in points], rise, label=name, color=f"C{number % 10}", marker="o")
    perplexity_axis(axes, [percent_above(row.ratio_to_dense) for row in rows])
    length_axis(axes, rows)
    legend_outside(figure, axes)
    return figure


def recall(rows: list[EvalRow]) -> "Figure | None":
    """Plots the attention mass that is read and the error of the output against the share of keys read."""
    if not rows:
        return None
    figure, (mass, error) = panel_grid(2)
    for method, points in by_method(rows):
        points.sort(key=lambda row: row.selectivity or 0)
        read = [percent(row.selectivity) for row in points]
        mass.plot(read, [percent(row.score) for row in points], label=method.label, **method.line)
        error.plot(read, [max(row.extra["output_error"], 1e-6) for row in points], **method.line)
    for axes in (mass, error):
        key_share_axis(axes, rows)
    mass.set(ylabel="attention mass read (%)", ylim=(None, 101))
    error.set(ylabel="relative squared error of the output", yscale="log")
    legend_outside(figure, mass)
    return figure


def found(rows: list[EvalRow], label: str) -> "Figure | None":
    """Plots scores against the share of keys read: one panel for each length, with intervals. ``label`` names the score."""
    lengths = sorted({row.extra["length"] for row in rows})
    if not lengths:
        return None
    figure, panels = panel_grid(len(lengths))
    for axes, length in zip(panels, lengths, strict=True):
        of_length = [row for row in rows if row.extra["length"] == length]
        for method, points in by_method([row for row in of_length if not row.method.is_dense]):
            points.sort(key=lambda row: row.selectivity or 0)
            scores = [percent(row.score) for row in points]
            bounds = [[percent(bound) for bound in row.interval or (row.score, row.score)] for row in points]
            plot_with_intervals(axes, [percent(row.selectivity) for row in points], scores, bounds, method)
        dense = [row for row in of_length if row.method.is_dense]
        if dense:
            axes.axhline(percent(dense[0].score), color=INK, linewidth=0.9, linestyle=":", label="dense")
        axes.set(title=f"{length:,} tokens", ylabel=f"{label} (%)", ylim=(-4, 104))
        key_share_axis(axes, of_length)
    legend_outside(figure, panels[0])
    return figure


def latency(rows: list[EvalRow]) -> "Figure | None":
    """Plots the speed-up over the fastest dense attention by length, and the parts of the time at the longest length.

    With many methods, each is plotted in its setting that reads the fewest keys.
    """
    rows = few_lines([row for row in rows if is_of_one_prompt(row)])
    if not rows:
        return None
    figure, (speedup, parts) = subplots(1, 2, (11.5, 5.2))
    lengths = sorted({row.extra["length"] for row in rows})
    _plot_speedups(speedup, rows)
    _plot_parts(parts, [row for row in rows if row.extra["length"] == lengths[-1]])
    parts.set(xlabel="seconds to the first token", title=f"{lengths[-1]:,} tokens")
    return figure


def few_lines(rows: list[EvalRow]) -> list[EvalRow]:
    """Returns the rows of at most ``MAX_LINES`` lines, or those of each method in its setting that reads the fewest keys."""
    lines = {(row.method, row.setting): row.selectivity or 0.0 for row in rows}
    if len(lines) <= MAX_LINES:
        return rows
    fewest = {method: min((keys, setting) for (each, setting), keys in lines.items() if each == method) for method, _ in lines}
    return [row for row in rows if row.setting == fewest[row.method][1]]


def length_axis(axes: "Axes", rows: list[EvalRow]) -> None:
    """Makes the x axis a logarithmic one of the rows' lengths."""
    lengths = sorted({row.extra["length"] for row in rows})
    axes.set(xscale="log", xlabel="tokens of the prompt")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
    axes.minorticks_off()


def _plot_speedups(axes: "Axes", rows: list[EvalRow]) -> None:
    """Plots dense over sparse time against the length, one line for each method and setting."""
    lines: dict[str, list[EvalRow]] = {}
    for row in rows:
        if row.setting and row.ratio_to_dense:
            lines.setdefault(row_title(row), []).append(row)
    for number, (name, points) in enumerate(lines.items()):
        speedups = [1 / (row.ratio_to_dense or 1.0) for row in points]
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "marker": "o"}
        axes.plot([row.extra["length"] for row in points], speedups, label=name, **style)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(ylabel="speed-up over the fastest dense attention")
    length_axis(axes, rows)
    if lines:
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _plot_parts(axes: "Axes", rows: list[EvalRow]) -> None:
    """Plots stacked bars of the seconds in attention, in block selection and in the rest of the model."""
    attention = [row.extra["attention_s"] for row in rows]
    selection = [row.extra["selection_s"] for row in rows]
    rest = [max(0.0, row.score - a - s) for row, a, s in zip(rows, attention, selection, strict=True)]
    left = [0.0] * len(rows)
    for part, color, widths in (
        ("attention", BLUE, attention),
        ("block selection", "#D55E00", selection),
        ("rest of the model", "#CCCCCC", rest),
    ):
        axes.barh([row_title(row) for row in rows], widths, left=left, label=part, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9)

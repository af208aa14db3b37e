"""Curves of quality: against the share of what is read, the measured time and the length."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from msattn.trainer.evaluate.report.style import (
    INK,
    by_method,
    few_lines,
    key_share_axis,
    legend_below,
    legend_outside,
    log_ticks,
    longest,
    panel_grid,
    percent,
    percent_above,
    perplexity_axis,
    plot_by_length,
    plot_line,
    plot_with_intervals,
    subplots,
)
from msattn.trainer.evaluate.row import EvalRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LINES = 12  # lines in the plot of perplexity by length
# ticks of the time relative to dense attention
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)


def tradeoff(rows: list[EvalRow]) -> "Figure | None":
    """Plots needles and perplexity at the longest prompts against the keys read and against time
    relative to dense.
    """
    values: dict[str, Callable[[EvalRow], float]] = {
        "needle": lambda row: percent(row.score),
        "perplexity": lambda row: percent_above(row.ratio_to_dense),
    }
    of_tasks = {task: longest([row for row in rows if row.task == task]) for task in values}
    of_tasks = {
        task: own for task, own in of_tasks.items() if any(not row.method.is_dense for row in own)
    }
    if not of_tasks:
        return None
    figure, panels = subplots(len(of_tasks), 2, (9.6, 3.6 * len(of_tasks) + 0.9))
    for number, (task, own) in enumerate(of_tasks.items()):
        by_reads, by_time = panels[2 * number : 2 * number + 2]
        value = values[task]
        dense = dense_of(own)
        sparse = [row for row in own if not row.method.is_dense]
        times = {id(row): ratio for row in sparse if (ratio := relative_time(row, own, rows))}
        for method, points in by_method(sparse):
            plot_line(
                by_reads,
                [(percent(row.selectivity), value(row)) for row in points],
                method.label,
                **method.line,
            )
            timed = [(times[id(row)], value(row)) for row in points if id(row) in times]
            plot_line(by_time, timed, method.label, **method.line)
        key_share_axis(by_reads, own)
        _time_axis(by_time, list(times.values()))
        for axes in (by_reads, by_time):
            if task == "perplexity":
                perplexity_axis(axes, [value(row) for row in sparse])
            else:
                axes.set(ylabel="needles found (%)", ylim=(-4, 104))
                axes.axhline(
                    value(dense[0]) if dense else 100, color=INK, linewidth=0.9, linestyle=":"
                )
    legend_below(figure, panels)
    return figure


def dense_of(rows: list[EvalRow]) -> list[EvalRow]:
    return [row for row in rows if row.method.is_dense]


def relative_time(row: EvalRow, own: list[EvalRow], rows: list[EvalRow]) -> float | None:
    """Returns the time of a row relative to dense attention; None if it was not measured.

    For block selections this is the prefill time of the same prompts, ``own``. For routings it is
    the time of a decoded token, from the task ``decoding`` among all ``rows``.
    """
    if row.sparsity is None:
        decoded = [other for other in rows if other.task == "decoding" and other.is_of_one_prompt()]
        same = longest(
            [
                other
                for other in decoded
                if (other.method, other.setting) == (row.method, row.setting)
            ]
        )
        ratio = same[0].ratio_to_dense if same else None
        return 1 / ratio if ratio else None
    dense = [dense_row.latency_s for dense_row in dense_of(own) if dense_row.latency_s]
    return row.latency_s / dense[0] if row.latency_s and dense else None


def _time_axis(axes: "Axes", times: list[float]) -> None:
    axes.axvline(1, color=INK, linewidth=0.9)
    low, high = min([0.8, *times]) / 1.1, max([1.25, *times]) * 1.1
    ticks = [tick for tick in RATIOS if low <= tick <= high]
    label = "time relative to dense attention (left of 1: faster)"
    log_ticks(axes, ticks, xlim=(low, high), xlabel=label)


def perplexity(rows: list[EvalRow]) -> "Figure | None":
    """Plots the rise of perplexity over dense attention against realized sparsity, with intervals
    of paired differences.
    """
    rows = [row for row in rows if not row.method.is_dense]
    if not rows:
        return None
    figure, (axes,) = panel_grid(1)

    def rise(row: EvalRow) -> tuple[float, ...]:
        bounds = row.extra["ratio_interval"] or (row.ratio_to_dense,) * 2
        return tuple(map(percent_above, (row.ratio_to_dense, *bounds)))

    plot_with_intervals(axes, rows, lambda row: percent(row.sparsity), rise)
    perplexity_axis(axes, [percent_above(row.ratio_to_dense) for row in rows])
    axes.set(xlabel="sparsity: visible blocks not read (%)")
    legend_outside(figure, axes)
    return figure


def documents(rows: list[EvalRow]) -> "Figure | None":
    """Plots the rise of perplexity over dense attention against the length; of many lines, one for
    each method.
    """
    rows = few_lines([row for row in rows if not row.method.is_dense], MAX_LINES)
    if not rows:
        return None
    figure, (axes,) = panel_grid(1)
    plot_by_length(axes, rows, lambda row: percent_above(row.ratio_to_dense))
    perplexity_axis(axes, [percent_above(row.ratio_to_dense) for row in rows])
    legend_outside(figure, axes)
    return figure


def recall(rows: list[EvalRow]) -> "Figure | None":
    """Plots the attention mass that is read and the error of the output against the share of keys
    read.
    """
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
    """Plots scores against the share of keys read: one panel for each length, with intervals.
    ``label`` names the score.
    """
    lengths = sorted({row.extra["length"] for row in rows})
    if not lengths:
        return None
    figure, panels = panel_grid(len(lengths))

    def share_found(row: EvalRow) -> tuple[float, ...]:
        return tuple(map(percent, (row.score, *(row.interval or (row.score, row.score)))))

    for axes, length in zip(panels, lengths, strict=True):
        of_length = [row for row in rows if row.extra["length"] == length]
        sparse = [row for row in of_length if not row.method.is_dense]
        plot_with_intervals(axes, sparse, lambda row: percent(row.selectivity), share_found)
        if dense := dense_of(of_length):
            axes.axhline(
                percent(dense[0].score), color=INK, linewidth=0.9, linestyle=":", label="dense"
            )
        axes.set(title=f"{length:,} tokens", ylabel=f"{label} (%)", ylim=(-4, 104))
        key_share_axis(axes, of_length)
    legend_outside(figure, panels[0])
    return figure

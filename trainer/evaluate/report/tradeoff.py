"""The first figure of a report: quality against the share of keys that is read, beside quality against measured time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msattn.trainer.evaluate.report.style import (
    INK,
    by_method,
    is_of_one_prompt,
    key_share_axis,
    legend_below,
    percent,
    percent_above,
    perplexity_axis,
    subplots,
)
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Quality(NamedTuple):
    """A quality to plot: its task, the value of a row and the label of its axis."""

    task: str
    value: Callable[[EvalRow], float]
    label: str


QUALITIES = (
    Quality("needle", lambda row: percent(row.score), "needles found (%)"),
    Quality("perplexity", lambda row: percent_above(row.ratio_to_dense), "perplexity above dense (%)"),
)


def tradeoff(rows: list[EvalRow]) -> "Figure | None":
    """Plots needles and perplexity at the longest prompts against the keys read and against time relative to dense."""
    shown = {quality: _longest([row for row in rows if row.task == quality.task]) for quality in QUALITIES}
    shown = {quality: own for quality, own in shown.items() if any(not row.method.is_dense for row in own)}
    if not shown:
        return None
    figure, panels = subplots(len(shown), 2, (9.6, 3.6 * len(shown) + 0.9))
    for number, (quality, own) in enumerate(shown.items()):
        by_reads, by_time = panels[2 * number : 2 * number + 2]
        sparse = [row for row in own if not row.method.is_dense]
        times = {id(row): ratio for row in sparse if (ratio := relative_time(row, own, rows))}
        for method, points in by_method(sparse):
            _plot(by_reads, method, [(percent(row.selectivity), quality.value(row)) for row in points])
            _plot(by_time, method, [(times[id(row)], quality.value(row)) for row in points if id(row) in times])
        key_share_axis(by_reads, own)
        _time_axis(by_time, list(times.values()))
        for axes in (by_reads, by_time):
            if quality.task == "perplexity":
                perplexity_axis(axes, [quality.value(row) for row in sparse])
            else:
                axes.set(ylabel=quality.label, ylim=(-4, 104))
                dense = [row for row in own if row.method.is_dense]
                axes.axhline(quality.value(dense[0]) if dense else 100, color=INK, linewidth=0.9, linestyle=":")
    legend_below(figure, panels)
    return figure


def relative_time(row: EvalRow, own: list[EvalRow], rows: list[EvalRow]) -> float | None:
    """Returns the time of a row relative to dense attention; None if it was not measured.

    Block selections have the time of their prefill of the same prompts, ``own``. Routings have that of a decoded token, from
    the task ``decoding`` among all ``rows``.
    """
    if row.sparsity is None:
        decoded = [each for each in rows if each.task == "decoding" and is_of_one_prompt(each)]
        same = [each for each in decoded if (each.method, each.setting) == (row.method, row.setting)]
        ratio = max(same, key=lambda each: each.extra["length"]).ratio_to_dense if same else None
        return 1 / ratio if ratio else None
    dense = [each.latency_s for each in own if each.method.is_dense and each.latency_s]
    return row.latency_s / dense[0] if row.latency_s and dense else None


def _longest(rows: list[EvalRow]) -> list[EvalRow]:
    longest = max((row.extra["length"] for row in rows), default=0)
    return [row for row in rows if row.extra["length"] == longest]


def _plot(axes: "Axes", method: Method, points: list[tuple[float, float]]) -> None:
    style = method.line
    if points:
        axes.plot(*zip(*sorted(points), strict=True), label=method.label, **style)


def _time_axis(axes: "Axes", times: list[float]) -> None:
    """Makes the x axis the time relative to dense attention, which is marked at 1."""
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=0.9)
    low, high = min([0.8, *times]) / 1.1, max([1.25, *times]) * 1.1
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(low, high), xlabel="time relative to dense attention (left of 1: faster)")

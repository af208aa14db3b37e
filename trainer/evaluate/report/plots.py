"""Figures of the results, each drawn from rows alone."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.report.style import (
    key_share_axis,
    legend_outside,
    method_style,
    method_title,
    panel_grid,
    percent,
    percent_above,
    plot_with_intervals,
    row_title,
    subplots,
)
from msattn.trainer.evaluate.row import WINDOW, EvalRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
HEATMAP: dict[str, Any] = {"vmin": 0, "vmax": 1, "cmap": "viridis", "aspect": "auto", "interpolation": "nearest"}
MAX_LABELLED_COLUMNS = 24  # a needle grid with more columns has no numbers in its cells


def draw(rows: list[EvalRow], folder: Path) -> dict[str, Path]:
    """Writes the figures that ``rows`` have data for as ``folder/<name>.png``.

    Returns
    -------
    dict
        ``{name: file}`` of the figures, in the order of the report.
    """
    figures: dict[str, Callable[[list[EvalRow]], Figure | None]] = {
        "perplexity": perplexity,
        "recall": recall,
        "recall_heads": recall_heads,
        "needle": needle,
        "needle_grid": needle_grid,
        "latency": latency,
    }
    drawn = {}
    for name, figure_of in figures.items():
        figure = figure_of([row for row in rows if row.task == name.split("_")[0]])
        if figure is not None:
            drawn[name] = folder / f"{name}.png"
            figure.savefig(drawn[name], dpi=DPI)
    return drawn


def perplexity(rows: list[EvalRow]) -> "Figure | None":
    """Plots the rise of perplexity over dense attention against realised sparsity, with intervals of paired differences."""
    rows = [row for row in rows if row.method != "dense"]
    if not rows:
        return None
    figure, (axes,) = panel_grid(1)
    axes.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    for method, points in _by_method(rows):
        points.sort(key=lambda row: row.sparsity or 0)
        rise = [percent_above(row.ratio_to_dense) for row in points]
        intervals = [row.extra["ratio_interval"] or (row.ratio_to_dense,) * 2 for row in points]
        bounds = [[percent_above(bound) for bound in interval] for interval in intervals]
        plot_with_intervals(axes, [percent(row.sparsity) for row in points], rise, bounds, method)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set(xlabel="sparsity: visible blocks not read (%)", ylabel="perplexity above dense")
    legend_outside(figure, axes)
    return figure


def recall(rows: list[EvalRow]) -> "Figure | None":
    """Plots the attention mass that is read and the error of the output against the share of keys read."""
    if not rows:
        return None
    figure, (mass, error) = panel_grid(2)
    for method, points in _by_method(rows):
        points.sort(key=lambda row: row.selectivity or 0)
        read = [percent(row.selectivity) for row in points]
        mass.plot(read, [percent(row.score) for row in points], label=method_title(method), **method_style(method))
        error.plot(read, [max(row.extra["output_error"], 1e-6) for row in points], **method_style(method))
    for axes in (mass, error):
        key_share_axis(axes, rows)
    mass.set(ylabel="attention mass read (%)", ylim=(None, 101))
    error.set(ylabel="relative squared error of the output", yscale="log")
    legend_outside(figure, mass)
    return figure


def recall_heads(rows: list[EvalRow]) -> "Figure | None":
    """Draws the attention mass that each head reads: one panel for each method, at its setting with the fewest keys."""
    fewest = [min(points, key=lambda row: row.selectivity or 0) for method, points in _by_method(rows) if method != WINDOW]
    if not fewest:
        return None
    columns = min(4, len(fewest))
    lines = -(-len(fewest) // columns)
    height = 0.9 + max(1.2, min(4.0, 0.18 * max(len(row.extra["layers"]) for row in fewest)))
    figure, grid = subplots(lines, columns, (9.0, height * lines + 0.3))
    image = None
    for axes, row in zip(grid, fewest, strict=False):
        layers, heads = row.extra["layers"], row.extra["heads"]
        image = axes.imshow(heads, **HEATMAP)
        axes.set_title(f"{method_title(row.method)}\n{row.setting}, mean {row.score:.0%}", fontsize=9)
        ticks = _at_most_eight(range(len(layers)))
        axes.set_yticks(ticks, [layers[i] for i in ticks])
        axes.set_xticks(_at_most_eight(range(len(heads[0]))))
        axes.set(xlabel="query head", ylabel="layer")
        axes.grid(False)
    for axes in grid[len(fewest) :]:
        axes.set_axis_off()
    assert image is not None
    figure.colorbar(image, ax=list(grid), label="attention mass read", shrink=0.9, pad=0.02)
    return figure


def needle(rows: list[EvalRow]) -> "Figure | None":
    """Plots accuracy against the share of keys read: one panel for each length, with Wilson intervals."""
    lengths = sorted({row.extra["length"] for row in rows})
    if not lengths:
        return None
    figure, panels = panel_grid(len(lengths))
    for axes, length in zip(panels, lengths, strict=True):
        of_length = [row for row in rows if row.extra["length"] == length]
        for method, points in _by_method([row for row in of_length if row.method != "dense"]):
            points.sort(key=lambda row: row.selectivity or 0)
            found = [percent(row.score) for row in points]
            bounds = [[percent(bound) for bound in row.interval or (row.score, row.score)] for row in points]
            plot_with_intervals(axes, [percent(row.selectivity) for row in points], found, bounds, method)
        dense = [row for row in of_length if row.method == "dense"]
        if dense:
            axes.axhline(percent(dense[0].score), color="#333333", linewidth=0.9, linestyle=":", label="dense")
        axes.set(title=f"{length:,} tokens", ylabel="needles found (%)", ylim=(-4, 104))
        key_share_axis(axes, of_length)
    legend_outside(figure, panels[0])
    return figure


def needle_grid(rows: list[EvalRow]) -> "Figure | None":
    """Draws accuracy by length of the context and depth of the needle, one line for each method and setting."""
    if not rows:
        return None
    lengths = sorted({row.extra["length"] for row in rows})
    depths = sorted({float(depth) for row in rows for depth in row.extra["by_depth"]})
    table = _needle_accuracies(rows, lengths, depths)
    width = min(13.0, 3.4 + 0.55 * len(lengths) * len(depths))
    figure, (axes,) = subplots(1, 1, (max(5.5, width), 1.3 + 0.24 * len(table)))
    image = axes.imshow(list(table.values()), **HEATMAP)
    axes.set_yticks(range(len(table)), list(table))
    axes.set_xticks(range(len(lengths) * len(depths)), [f"{depth:.0%}" for _ in lengths for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    for number, length in enumerate(lengths):
        axes.text((number + 0.5) * len(depths) - 0.5, -0.75, f"{length:,} tokens", ha="center", fontsize=9)
        if number:
            axes.axvline(number * len(depths) - 0.5, color="white", linewidth=3)
    if len(lengths) * len(depths) <= MAX_LABELLED_COLUMNS:
        _label_cells(axes, list(table.values()))
    axes.set_xlabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="needles found", pad=0.02)
    return figure


def _needle_accuracies(rows: list[EvalRow], lengths: list[int], depths: list[float]) -> dict[str, list[float]]:
    """Returns ``{method and setting: accuracies}``, by length and then by depth; NaN where nothing was measured."""
    cells = {
        (row_title(row), row.extra["length"], float(depth)): accuracy
        for row in rows
        for depth, accuracy in row.extra["by_depth"].items()
    }
    titles = dict.fromkeys(row_title(row) for row in rows)
    return {
        title: [cells.get((title, length, depth), float("nan")) for length in lengths for depth in depths] for title in titles
    }


def _label_cells(axes: "Axes", table: list[list[float]]) -> None:
    """Writes the percentage into each cell of a heatmap."""
    for y, line in enumerate(table):
        for x, share in enumerate(line):
            color = "black" if share > 0.6 else "white"
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=color)


def latency(rows: list[EvalRow]) -> "Figure | None":
    """Plots the speed-up over the fastest dense attention by length, and the parts of the time at the longest length."""
    if not rows:
        return None
    figure, (speedup, parts) = subplots(1, 2, (11.5, 4.6))
    lengths = sorted({row.extra["length"] for row in rows})
    _plot_speedups(speedup, rows, lengths)
    _plot_parts(parts, [row for row in rows if row.extra["length"] == lengths[-1]])
    parts.set(xlabel="seconds to the first token", title=f"{lengths[-1]:,} tokens")
    return figure


def _plot_speedups(axes: "Axes", rows: list[EvalRow], lengths: list[int]) -> None:
    """Plots dense over sparse time against the length, one line for each method and setting."""
    lines: dict[str, list[EvalRow]] = {}
    for row in rows:
        if row.setting and row.ratio_to_dense:
            lines.setdefault(row_title(row), []).append(row)
    for number, (name, points) in enumerate(lines.items()):
        speedups = [1 / (row.ratio_to_dense or 1.0) for row in points]
        axes.plot([row.extra["length"] for row in points], speedups, label=name, marker="o", color=f"C{number % 10}")
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens of the prompt", ylabel="speed-up over the fastest dense attention")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
    axes.minorticks_off()
    if lines:
        axes.legend(frameon=False, fontsize=9)


def _plot_parts(axes: "Axes", rows: list[EvalRow]) -> None:
    """Plots stacked bars of the seconds in attention, in block selection and in the rest of the model."""
    attention = [row.extra["attention_s"] for row in rows]
    selection = [row.extra["selection_s"] for row in rows]
    rest = [max(0.0, row.score - a - s) for row, a, s in zip(rows, attention, selection, strict=True)]
    left = [0.0] * len(rows)
    for part, color, widths in (
        ("attention", "#0072B2", attention),
        ("block selection", "#D55E00", selection),
        ("rest of the model", "#CCCCCC", rest),
    ):
        axes.barh([row_title(row) for row in rows], widths, left=left, label=part, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9)


def _by_method(rows: Iterable[EvalRow]) -> list[tuple[str, list[EvalRow]]]:
    groups: dict[str, list[EvalRow]] = {}
    for row in rows:
        groups.setdefault(row.method, []).append(row)
    return list(groups.items())


def _at_most_eight(numbers: range) -> list[int]:
    """Returns at most eight of ``numbers``, evenly spaced."""
    return list(numbers[:: max(1, -(-len(numbers) // 8))])

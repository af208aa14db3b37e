"""Figures of the analysis: queries and keys in a plane, bucket sizes, mass in the top keys, error
against selectivity.
"""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.report.style import (
    BLUE,
    INK,
    at_most,
    by_head,
    by_method,
    key_share_axis,
    legend_below,
    log_ticks,
    percent,
    subplots,
)
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import ROPE, Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PLANES = 4  # layers whose planes are drawn
QUERY_COLOR = "#D55E00"
# styles of the partition before and after RoPE
PARTITION_STYLES = ((BLUE, "o"), (QUERY_COLOR, "s"))
LOWEST = 1e-6  # lower limit of logarithmic axes


def analysis_planes(rows: list[EvalRow]) -> "Figure | None":
    """Draws keys and queries in their first two principal components, before and after RoPE, for
    one head of some layers.
    """
    lines = [(row.setting, row.extra["planes"]) for row in rows if "planes" in row.extra]
    if not lines:
        return None
    shown = at_most(MAX_PLANES, range(len(lines[0][1])))
    figure, grid = subplots(
        len(lines), len(shown), (max(6.4, 2.9 * len(shown)), 2.9 * len(lines) + 0.5)
    )
    for number, axes in enumerate(grid):
        stage, pictures = lines[number // len(shown)]
        picture = pictures[shown[number % len(shown)]]
        _draw_plane(axes, picture)
        axes.set_title(f"layer {picture['layer']}, head {picture['head']}, {stage}", fontsize=9)
    legend_below(figure, grid)
    return figure


def analysis_buckets(rows: list[EvalRow]) -> "Figure | None":
    """Draws the deviation of bucket sizes for each way of sampling, the same by position, and the
    sizes in order.
    """
    partitions = by_method(row for row in rows if "deviations" in row.extra)
    if not partitions:
        return None
    figure, (dots, positions, sizes) = subplots(1, 3, (12.6, 4.3))
    ways = [str(row.setting) for row in partitions[0][1]]
    for number, (method, points) in enumerate(partitions):
        color, marker = PARTITION_STYLES[number % 2]
        name = method.label
        for row in points:
            away = row.extra["deviations"]
            height = ways.index(str(row.setting)) + 0.22 * (number - 0.5)
            label = name if row is points[0] else None
            dots.plot(
                away,
                [height] * len(away),
                color=color,
                marker=marker,
                linestyle="none",
                alpha=0.65,
                label=label,
            )
        drifting = points[-1].extra["deviations"]  # ranges of positions are the last way
        step = points[-1].extra["length"] / len(drifting)
        positions.plot(
            [(i + 0.5) * step for i in range(len(drifting))], drifting, color=color, marker=marker
        )
        for row, style in ((points[1], "-"), (points[-1], ":")):
            relative = row.extra["sorted_sizes"]
            x = [percent((i + 1) / len(relative)) for i in range(len(relative))]
            sizes.plot(x, relative, color=color, linestyle=style, label=f"{name}: {row.setting}")
    dots.set_yticks(range(len(ways)), [way.replace(" of ", "\nof ") for way in ways])
    dots.set(xlabel="deviation of bucket sizes", xlim=(0, None))
    dots.invert_yaxis()
    positions.set(
        xlabel="position of the keys",
        ylabel="deviation of bucket sizes",
        ylim=(0, None),
        xlim=(0, None),
    )
    sizes.axhline(1, color=INK, linewidth=0.8)
    sizes.set(
        xlabel="buckets, the largest first (%)",
        ylabel="size, relative to equal buckets",
        yscale="log",
    )
    sizes.set_ylim(bottom=max(0.01, sizes.get_ylim()[0]))
    legend_below(figure, [dots, sizes])
    return figure


def analysis_mass(rows: list[EvalRow]) -> "Figure | None":
    """Draws the mass in the top keys by layer, and by layer and head for the smallest share of the
    keys.
    """
    curves = [row for row in rows if "shares" in row.extra]
    if not curves:
        return None
    far = curves[1] if len(curves) > 1 else curves[0]  # all keys, keys outside the window, blocks
    figure, (lines, heads) = subplots(1, 2, (11.0, 4.4))
    _mass_lines(lines, far, [row for row in curves if row is not far])
    figure.colorbar(by_head(heads, far), ax=heads, label="share of the attention mass")
    heads.set_title(f"{far.score_name} of the keys {far.setting}", fontsize=10)
    legend_below(figure, [lines])
    return figure


def analysis_error(rows: list[EvalRow]) -> "Figure | None":
    """Draws the error of the output and the missed mass against the share of keys read, on
    logarithmic axes.
    """
    read = [row for row in rows if "missed_mass" in row.extra]
    if not read:
        return None
    figure, (error, missed) = subplots(1, 2, (11.0, 4.8))
    for number, (method, points) in enumerate(by_method(read)):
        style = {**method.line, **_own_style(method, number)}
        share = [percent(row.selectivity) for row in points]
        error.plot(
            share,
            [max(row.extra["output_error"], LOWEST) for row in points],
            label=method.label,
            **style,
        )
        missed.plot(
            share, [percent(max(row.extra["missed_mass"], LOWEST)) for row in points], **style
        )
    for axes in (error, missed):
        key_share_axis(axes, read)
        axes.set_yscale("log")
    error.set(ylabel="relative squared error of the output")
    missed.set(ylabel="attention mass not read (%)")
    missed.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_below(figure, [error])
    return figure


def _draw_plane(axes: "Axes", picture: dict[str, Any]) -> None:
    """Draws the points of one head; large ones are the first position, the attention sink."""
    for name, color in (("keys", BLUE), ("queries", QUERY_COLOR)):
        axes.plot(
            *zip(*picture[name], strict=True),
            color=color,
            marker=".",
            linestyle="none",
            markersize=3.5,
            label=name,
        )
        sinks = zip(*picture[f"sink_{name}"], strict=True)
        axes.plot(
            *sinks,
            color=color,
            marker="o",
            linestyle="none",
            markersize=8,
            alpha=0.8,
            label=f"{name}, first position",
        )
    axes.plot(
        *zip(*picture["origin"], strict=True),
        color=INK,
        marker="+",
        linestyle="none",
        markersize=9,
        label="origin",
    )
    axes.tick_params(labelleft=False, labelbottom=False, length=0)


def _mass_lines(axes: "Axes", far: EvalRow, others: list[EvalRow]) -> None:
    """Draws a line for each layer outside the window, and the means of the other kinds."""
    shares = [percent(share) for share in far.extra["shares"]]
    for number, layer in enumerate(far.extra["layers"]):
        mass = [percent(value) for value in far.extra["by_layer"][number]]
        axes.plot(
            shares, mass, color=f"C{number % 10}", marker="o", markersize=4, label=f"layer {layer}"
        )
    for row, style in zip_longest(others, ("--", ":")[: len(others)]):
        mass = [percent(row.extra[f"top {share:.0%}"]) for share in row.extra["shares"]]
        axes.plot(shares, mass, color=INK, linestyle=style, label=row.method.label)
    axes.plot(shares, shares, color="#999999", linewidth=1.0, label="equal weights")
    axes.set(ylabel="share of the attention mass (%)", ylim=(0, 102))
    log_ticks(axes, shares, xlabel="top keys or blocks (%)")
    axes.set_title(f"layers: keys {far.setting}", fontsize=10)


def _own_style(method: Method, number: int) -> dict[str, Any]:
    """Returns what tells methods apart that have no style of their own: fitted partitions of
    several sizes.
    """
    if not method.variants or ROPE in method.variants:
        return {}
    return {"fillstyle": "none", "linestyle": ("--", ":", "-.")[number % 3]}

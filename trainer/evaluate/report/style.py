"""Colors and axes that all figures share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Text and axes; grid and empty areas; the gate. The page replaces these colors by those of its
# theme.
INK, GRID, BLUE = "#222222", "#E3E3E3", "#0072B2"
# ticks of the share of keys read, in percent
KEY_SHARES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
# ticks of the rise of perplexity, in percent
RISES = (-50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
HEATMAP: dict[str, Any] = {
    "vmin": 0,
    "vmax": 1,
    "cmap": "viridis",
    "aspect": "auto",
    "interpolation": "nearest",
}
# percent; a model that far above dense attention is broken, and how far tells nothing
HIGHEST_RISE = 200.0


def row_title(row: EvalRow) -> str:
    return ", ".join(filter(None, (row.method.label, str(row.setting))))


def percent(share: float | None) -> float:
    """Returns a share as a percentage; None counts as 0."""
    return 100 * (share or 0.0)


def percent_above(ratio: float | None) -> float:
    """Returns the percentage by which ``ratio`` exceeds 1; None counts as 1."""
    return 100 * ((ratio or 1.0) - 1)


@contextmanager
def drawing() -> Iterator[None]:
    """Sets text and axes to ``INK``, transparent axes, and SVG text as text instead of outlines,
    with reproducible ids.
    """
    import matplotlib

    colored = (
        "text.color",
        "axes.edgecolor",
        "axes.labelcolor",
        "axes.titlecolor",
        "xtick.color",
        "ytick.color",
    )
    settings = {"axes.facecolor": "none", "svg.fonttype": "none"}
    with matplotlib.rc_context(dict.fromkeys(colored, INK) | settings):
        yield


def by_method(rows: Iterable[EvalRow]) -> list[tuple[Method, list[EvalRow]]]:
    groups: dict[Method, list[EvalRow]] = {}
    for row in rows:
        groups.setdefault(row.method, []).append(row)
    return list(groups.items())


def few_lines(rows: list[EvalRow], most: int) -> list[EvalRow]:
    """Returns the rows of at most ``most`` lines, or those of each method in its setting that reads
    the fewest keys.
    """
    lines = {(row.method, row.setting): row.selectivity or 0.0 for row in rows}
    if len(lines) <= most:
        return rows
    # the last setting of a method
    fewest = dict(sorted(lines, key=lambda line: lines[line], reverse=True))
    return [row for row in rows if row.setting == fewest[row.method]]


def longest(rows: list[EvalRow]) -> list[EvalRow]:
    length = max((row.extra.get("length", 0) for row in rows), default=0)
    return [row for row in rows if row.extra.get("length", 0) == length]


def at_most(most: int, numbers: range) -> list[int]:
    """Returns at most ``most`` of ``numbers``, evenly spaced."""
    return list(numbers[:: max(1, -(-len(numbers) // most))])


def subplots(
    lines: int, columns: int, size: tuple[float, float], height_ratios: list[float] | None = None
) -> "tuple[Figure, list[Axes]]":
    """Returns a figure of ``size`` in inches and its axes in reading order, without a display and
    without pyplot's state.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, height_ratios=height_ratios)
    for panel in axes.flat:
        panel.grid(True, color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def panel_grid(panels: int) -> "tuple[Figure, list[Axes]]":
    """Returns a figure with ``panels`` axes, at most three in a line."""
    columns = min(3, panels)
    figure, axes = subplots(
        -(-panels // columns), columns, (max(6.4, 4.2 * columns), 4.3 * -(-panels // columns))
    )
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, axes[:panels]


def plot_with_intervals(
    axes: "Axes",
    rows: list[EvalRow],
    x: Callable[[EvalRow], float],
    y: Callable[[EvalRow], tuple[float, ...]],
) -> None:
    """Plots a line of each method, in its style, over ``x``; ``y`` returns a value and the bounds
    of its interval.
    """
    for method, points in by_method(rows):
        points.sort(key=x)
        values = [y(row) for row in points]
        spread = [
            [value - low for value, low, _ in values],
            [high - value for value, _, high in values],
        ]
        drawn = axes.errorbar(
            list(map(x, points)),
            [value for value, _, _ in values],
            spread,
            elinewidth=1.0,
            label=method.label,
            **method.line,
        )
        for bars in drawn[2]:
            bars.set_alpha(0.5)


def by_head(axes: "Axes", row: EvalRow) -> "AxesImage":
    """Draws ``extra["heads"]`` of a row by layer and query head, between 0 and 1."""
    layers, heads = row.extra["layers"], row.extra["heads"]
    drawn = axes.imshow(heads, **HEATMAP)
    ticks = at_most(8, range(len(layers)))
    axes.set_yticks(ticks, [layers[i] for i in ticks])
    axes.set_xticks(at_most(8, range(len(heads[0]))))
    axes.set(xlabel="query head", ylabel="layer")
    axes.grid(False)
    return drawn


def plot_line(
    axes: "Axes", points: Iterable[tuple[float, float]], label: str, **style: Any
) -> None:
    """Plots points in the order of x; nothing if there are none."""
    if ordered := sorted(points):
        axes.plot(*zip(*ordered, strict=True), label=label, **style)


def plot_by_length(axes: "Axes", rows: list[EvalRow], value: Callable[[EvalRow], float]) -> None:
    """Plots a line of each method and setting against the length."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row_title(row), []).append((row.extra["length"], value(row)))
    for number, (title, points) in enumerate(lines.items()):
        plot_line(
            axes,
            points,
            title,
            color=f"C{number % 10}",
            linestyle="-" if number < 10 else "--",
            marker="o",
        )
    length_axis(axes, rows)


def legend_under(axes: "Axes", columns: int) -> None:
    axes.legend(
        frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns
    )


def legend_outside(figure: "Figure", axes: "Axes") -> None:
    """Adds the legend of ``axes`` to the right of all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)


def legend_below(figure: "Figure", panels: "list[Axes]") -> None:
    """Adds one legend of all ``panels`` below them."""
    labeled = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labeled.values(), labeled, loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )


def log_ticks(
    axes: "Axes",
    ticks: Sequence[float],
    form: Callable[[Any], str] = "{:g}".format,
    **settings: Any,
) -> None:
    """Makes the x axis a logarithmic one with these ticks alone; ``settings`` are those of
    ``Axes.set``.
    """
    axes.set(xscale="log", **settings)
    axes.set_xticks(ticks, list(map(form, ticks)))
    axes.minorticks_off()


def length_axis(axes: "Axes", rows: list[EvalRow], label: str = "tokens of the prompt") -> None:
    lengths = sorted({row.extra["length"] for row in rows})
    log_ticks(axes, lengths, lambda n: f"{n // 1024}k" if n % 1024 == 0 else str(n), xlabel=label)


def key_share_axis(axes: "Axes", rows: list[EvalRow]) -> None:
    """Makes the x axis a logarithmic percentage of keys read, from the lowest share of the sparse
    ``rows``.
    """
    lowest = 0.8 * min(
        (percent(row.selectivity) for row in rows if not row.method.is_dense), default=1
    )
    log_ticks(
        axes,
        [tick for tick in KEY_SHARES if tick >= lowest],
        xlabel="keys read (%)",
        xlim=(lowest, 105),
    )


def perplexity_axis(axes: "Axes", rises: list[float]) -> None:
    """Makes the y axis the percentage above dense perplexity: linear within 1 %, logarithmic above,
    up to ``HIGHEST_RISE``.

    ``rises`` are the values that are plotted. Those beyond the axis are marked at its upper edge.
    """
    lowest, highest = min(0.0, *rises), max(1.0, *rises)
    axes.set_yscale("symlog", linthresh=1, linscale=0.9)
    axes.set(
        ylim=(1.3 * lowest - 0.15, min(1.4 * highest, HIGHEST_RISE)),
        ylabel="perplexity above dense (%)",
    )
    axes.set_yticks([tick for tick in RISES if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.axhline(0, color=INK, linewidth=0.8)
    beyond = sum(rise > HIGHEST_RISE for rise in rises)
    if beyond:
        text = f"▲ {beyond} beyond, up to {highest:,.0f} %"
        axes.text(0.02, 0.985, text, transform=axes.transAxes, ha="left", va="top", fontsize=8)

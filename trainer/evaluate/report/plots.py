"""The figures of a result, each made from rows alone."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.row import WINDOW, EvalRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind eyes; trained methods are drawn stronger.
STYLE: dict[str, dict[str, Any]] = {
    "gate": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 4},
    "gate, top-k": {"color": "#0072B2", "marker": "o", "linestyle": ":", "fillstyle": "none"},
    "classifier": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 4},
    "oracle": {"color": "#333333", "marker": "D", "linestyle": "--"},
    "oracle routing": {"color": "#7A7A7A", "marker": "D", "linestyle": "--"},
    "quest": {"color": "#009E73", "marker": "s"},
    "mean_pool": {"color": "#56B4E9", "marker": "^"},
    "sink_local": {"color": "#E69F00", "marker": "v"},
    "random": {"color": "#AAAAAA", "marker": "x"},
    "k-means": {"color": "#CC79A7", "marker": "P"},
    WINDOW: {"color": "#8C564B", "marker": "*", "linestyle": "none", "markersize": 9},
}
METHOD_TITLES = {"sink_local": "sink + local", "mean_pool": "mean pooling", "quest": "Quest bounds"}
DEFAULT_STYLE = {"color": "#B8860B", "marker": "d"}
DPI = 150


def title(method: str) -> str:
    """How figures and tables call a method."""
    return METHOD_TITLES.get(method, method)


def draw(rows: list[EvalRow], folder: Path) -> dict[str, Path]:
    """Write the figures that ``rows`` have data for as ``folder/<name>.png``.

    Returns
    -------
    dict
        ``{name: file}`` of the figures drawn, in the order of a report.
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
    """Rise of perplexity over dense attention against realised sparsity, with paired intervals."""
    rows = [row for row in rows if row.method != "dense"]
    if not rows:
        return None
    figure, (axes,) = _figure(1)
    axes.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    for method, points in _by_method(rows):
        points.sort(key=lambda row: row.sparsity or 0)
        rise = [_percent(row.ratio_to_dense) for row in points]
        bounds = [[_percent(bound) for bound in row.extra["ratio_interval"] or (row.ratio_to_dense,) * 2] for row in points]
        _line(axes, [_percent_of(row.sparsity) for row in points], rise, bounds, method)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set(xlabel="sparsity: visible blocks not read (%)", ylabel="perplexity above dense")
    _legend(figure, axes)
    return figure


def recall(rows: list[EvalRow]) -> "Figure | None":
    """Attention mass read, and error of the output, against the share of keys read."""
    if not rows:
        return None
    figure, (mass, error) = _figure(2)
    for method, points in _by_method(rows):
        points.sort(key=lambda row: row.selectivity or 0)
        read = [_percent_of(row.selectivity) for row in points]
        mass.plot(read, [_percent_of(row.score) for row in points], label=title(method), **_style(method))
        error.plot(read, [max(row.extra["output_error"], 1e-6) for row in points], **_style(method))
    for axes in (mass, error):
        _share_axis(axes, rows)
    mass.set(ylabel="attention mass read (%)", ylim=(None, 101))
    error.set(ylabel="relative squared error of the output", yscale="log")
    _legend(figure, mass)
    return figure


def recall_heads(rows: list[EvalRow]) -> "Figure | None":
    """Attention mass read by each head of each layer, a panel a method, at the setting that reads least but something."""
    chosen = []
    for method, points in _by_method(rows):
        if method != WINDOW:
            chosen.append((method, min(points, key=lambda row: row.selectivity or 0)))
    if not chosen:
        return None
    columns = min(4, len(chosen))
    lines = -(-len(chosen) // columns)
    height = 0.9 + max(1.2, min(4.0, 0.18 * max(len(row.extra["layers"]) for _, row in chosen)))
    figure, grid = subplots(lines, columns, (9.0, height * lines + 0.3))
    image = None
    for axes, (method, row) in zip(grid, chosen, strict=False):
        heads = row.extra["heads"]
        image = axes.imshow(heads, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.set_title(f"{title(method)}\n{row.setting}, mean {row.score:.0%}", fontsize=9)
        layers = row.extra["layers"]
        axes.set_yticks(_few(range(len(layers))), [layers[i] for i in _few(range(len(layers)))])
        axes.set_xticks(_few(range(len(heads[0]))))
        axes.set(xlabel="query head", ylabel="layer")
        axes.grid(False)
    for axes in grid[len(chosen) :]:
        axes.set_axis_off()
    assert image is not None
    figure.colorbar(image, ax=list(grid), label="attention mass read", shrink=0.9, pad=0.02)
    return figure


def needle(rows: list[EvalRow]) -> "Figure | None":
    """Accuracy against the share of keys read, a panel a length, with Wilson intervals."""
    lengths = sorted({row.extra["length"] for row in rows})
    if not lengths:
        return None
    figure, panels = _figure(len(lengths))
    for axes, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row.extra["length"] == length]
        for method, points in _by_method([row for row in here if row.method != "dense"]):
            points.sort(key=lambda row: row.selectivity or 0)
            found = [_percent_of(row.score) for row in points]
            bounds = [[_percent_of(bound) for bound in row.interval or (row.score, row.score)] for row in points]
            _line(axes, [_percent_of(row.selectivity) for row in points], found, bounds, method)
        dense = [row for row in here if row.method == "dense"]
        if dense:
            axes.axhline(_percent_of(dense[0].score), color="#333333", linewidth=0.9, linestyle=":", label="dense")
        axes.set(title=f"{length:,} tokens", ylabel="needles found (%)", ylim=(-4, 104))
        _share_axis(axes, here)
    _legend(figure, panels[0])
    return figure


def needle_grid(rows: list[EvalRow]) -> "Figure | None":
    """Accuracy by depth of the needle and length of the context: a line a method and setting."""
    if not rows:
        return None
    lengths = sorted({row.extra["length"] for row in rows})
    depths = sorted({float(depth) for row in rows for depth in row.extra["by_depth"]})
    lines = list(dict.fromkeys((row.method, row.setting) for row in rows))
    cells = {
        (row.method, row.setting, row.extra["length"], float(depth)): accuracy
        for row in rows
        for depth, accuracy in row.extra["by_depth"].items()
    }
    nothing = float("nan")
    table = [[cells.get((*line, length, depth), nothing) for length in lengths for depth in depths] for line in lines]
    width = min(13.0, 3.4 + 0.55 * len(lengths) * len(depths))
    figure, (axes,) = subplots(1, 1, (max(5.5, width), 1.3 + 0.24 * len(lines)))
    image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_yticks(
        range(len(lines)), [f"{title(method)}, {setting}" if setting else title(method) for method, setting in lines]
    )
    axes.set_xticks(range(len(lengths) * len(depths)), [f"{depth:.0%}" for _ in lengths for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    for number, length in enumerate(lengths):
        axes.text((number + 0.5) * len(depths) - 0.5, -0.75, f"{length:,} tokens", ha="center", fontsize=9)
        if number:
            axes.axvline(number * len(depths) - 0.5, color="white", linewidth=3)
    if len(table[0]) <= 24:
        for y, line in enumerate(table):
            for x, accuracy in enumerate(line):
                axes.text(
                    x,
                    y,
                    f"{100 * accuracy:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if accuracy > 0.6 else "white",
                )
    axes.set_xlabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="needles found", pad=0.02)
    return figure


def latency(rows: list[EvalRow]) -> "Figure | None":
    """How many times faster than the fastest dense attention, by length; and the parts of the time at the longest length."""
    if not rows:
        return None
    figure, (faster, parts) = subplots(1, 2, (11.5, 4.6))
    lines: dict[str, list[EvalRow]] = {}
    for row in rows:
        if row.setting and row.ratio_to_dense:
            lines.setdefault(_line_of(row), []).append(row)
    for number, (name, points) in enumerate(lines.items()):
        times = [1 / (row.ratio_to_dense or 1.0) for row in points]
        faster.plot([row.extra["length"] for row in points], times, label=name, marker="o", color=f"C{number % 10}")
    faster.axhline(1, color="#333333", linewidth=0.8)
    lengths = sorted({row.extra["length"] for row in rows})
    faster.set(xscale="log", xlabel="tokens of the prompt", ylabel="times faster than the fastest dense attention")
    faster.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
    faster.minorticks_off()
    if lines:
        faster.legend(frameon=False, fontsize=9)
    longest = [row for row in rows if row.extra["length"] == lengths[-1]]
    left = [0.0] * len(longest)
    for part, color in (("attention", "#0072B2"), ("choosing blocks", "#D55E00"), ("the rest", "#CCCCCC")):
        widths = [_part(row, part) for row in longest]
        parts.barh([_line_of(row) for row in longest], widths, left=left, label=part, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    parts.invert_yaxis()
    parts.set(xlabel="seconds to the first token", title=f"{lengths[-1]:,} tokens")
    parts.legend(frameon=False, fontsize=9)
    return figure


def _line_of(row: EvalRow) -> str:
    return f"{title(row.method)}, {row.setting}" if row.setting else title(row.method)


def _part(row: EvalRow, part: str) -> float:
    """Seconds of a part of a prompt."""
    attention, choosing = row.extra["attention_s"], row.extra["selection_s"]
    return {"attention": attention, "choosing blocks": choosing}.get(part, max(0.0, row.score - attention - choosing))


def subplots(lines: int, columns: int, size: tuple[float, float]) -> "tuple[Figure, list[Axes]]":
    """Axes in reading order, on a figure that needs no display and leaves no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    for each in axes.flat:
        each.grid(True, color="#E3E3E3", linewidth=0.7)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    columns = min(3, panels)
    figure, axes = subplots(-(-panels // columns), columns, (max(6.4, 4.2 * columns), 4.3 * -(-panels // columns)))
    for extra in axes[panels:]:
        extra.set_axis_off()
    return figure, axes[:panels]


def _line(axes: "Axes", x: list[float], y: list[float], bounds: list[list[float]], method: str) -> None:
    """Points with the intervals ``bounds`` (low, high), joined in the method's style."""
    spread = [[value - low for value, (low, _) in zip(y, bounds, strict=True)]]
    spread.append([high - value for value, (_, high) in zip(y, bounds, strict=True)])
    axes.errorbar(x, y, yerr=spread, elinewidth=1.0, label=title(method), **_style(method))


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Beside the panels, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)


def _share_axis(axes: "Axes", rows: list[EvalRow]) -> None:
    shares = [_percent_of(row.selectivity) for row in rows if row.method != "dense"]
    axes.set(xlabel="keys read (%)", xscale="log", xlim=(min(shares, default=1) * 0.8, 105))
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if tick >= min(shares, default=1) * 0.8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _by_method(rows: Iterable[EvalRow]) -> list[tuple[str, list[EvalRow]]]:
    groups: dict[str, list[EvalRow]] = {}
    for row in rows:
        groups.setdefault(row.method, []).append(row)
    return list(groups.items())


def _style(method: str) -> dict[str, Any]:
    return {"linewidth": 1.3, "markersize": 5, **STYLE.get(method, DEFAULT_STYLE)}


def _percent(ratio: float | None) -> float:
    return 100 * ((ratio or 1.0) - 1)


def _percent_of(share: float | None) -> float:
    return 100 * (share or 0.0)


def _few(numbers: range) -> list[int]:
    """At most eight of them, evenly apart."""
    return list(numbers[:: max(1, -(-len(numbers) // 8))])

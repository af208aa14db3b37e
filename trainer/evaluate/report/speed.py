"""The figure of speed: time to the first token and tokens per second of ``generate``, against the length."""

from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate.report.style import INK, is_of_one_prompt, row_title, subplots
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LINES = 6  # of sparse attention in a panel; with more, each method has the setting that reads the fewest keys
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
    """Plots seconds to the first token and tokens per second after a cache against the length, one sequence each."""
    own = [row for row in rows if is_of_one_prompt(row)]
    prompts, decoded = ([row for row in own if row.task == task] for task in ("latency", "decoding"))
    drawn = [each for each in ((prompts, "tokens of the prompt"), (decoded, "cached keys")) if each[0]]
    if not drawn:
        return None
    figure, panels = subplots(1, len(drawn), (5.75 * len(drawn), 5.2))
    for axes, (of_task, label) in zip(panels, drawn, strict=True):
        _plot(axes, _dense_lines(of_task), _sparse_rows(of_task))
        lengths = sorted({row.extra["length"] for row in of_task})
        axes.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
        prefill = of_task is prompts
        axes.set(xlabel=label, ylabel="seconds to the first token" if prefill else "tokens per second")
        axes.set_title("time to the first token" if prefill else "decoding, one sequence")
    return figure


def _dense_lines(rows: list[EvalRow]) -> dict[str, Line]:
    """Returns the lines of dense attention: what ``generate`` reaches, and the fastest SDPA kernel at each length."""
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
        lines[name] = [(length, best(row.score for row in of_length)) for length, of_length in kernels.items()]
    return lines


def _sparse_rows(rows: list[EvalRow]) -> list[EvalRow]:
    """Returns the rows of sparse attention; with many lines, of each method in its setting that reads the fewest keys."""
    sparse = [row for row in rows if not row.method.is_dense]
    reads = {(row.method, row.setting): row.selectivity or 0.0 for row in sparse}
    if len(reads) <= MAX_LINES:
        return sparse
    ordered = sorted(reads, key=lambda line: reads[line], reverse=True)
    fewest = dict(ordered)  # the last setting of a method
    return [row for row in sparse if row.setting == fewest[row.method]]


def _plot(axes: "Axes", dense: dict[str, Line], sparse: list[EvalRow]) -> None:
    """Plots lines on logarithmic axes with a legend below them."""
    for number, (name, points) in enumerate(dense.items()):
        axes.plot(*zip(*sorted(points), strict=True), label=name, marker=".", linewidth=1.4, **DENSE_STYLES[number % 3])
    lines: dict[tuple[Method, str], list[EvalRow]] = {}
    for row in sparse:
        lines.setdefault((row.method, row.setting), []).append(row)
    one_of_each = len({method for method, _ in lines}) == len(lines)
    for number, ((method, _), points) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLORS[number % 6], "marker": MARKERS[number % 6], "linewidth": 1.8, "markersize": 5}
        if one_of_each and method.style:
            style = method.line
        values = sorted((row.extra["length"], row.score) for row in points)
        axes.plot(*zip(*values, strict=True), label=row_title(points[0]), **style)
    axes.set(xscale="log", yscale="log")
    _value_ticks(axes)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _value_ticks(axes: "Axes") -> None:
    """Labels the y axis with plain numbers, more of them if it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()

"""Draws the figures of the documents, for light and dark pages, and writes their tables, from the CSV files in this folder.

The files are from evaluations; docs/results.md and docs/measurements.md name the commands. Run::

    python docs/figures/draw.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tables
from cells import rows as rows_of

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
Rows = list[dict[str, str]]
Points = tuple[list[float], list[float]]
NAMES = {method: tables.TITLES[method] for method in ("quest", "vertical_slash", "a_shape", "mean_pool")}


@dataclass(frozen=True)
class Theme:
    """Colours of one page background."""

    text: str
    grid: str
    ours: str
    peer: str
    baselines: tuple[str, ...]


THEMES = {
    "light": Theme("#24292f", "#d8dee4", "#c2410c", "#57606a", ("#0969da", "#1a7f37", "#8250df", "#9a6700")),
    "dark": Theme("#e6edf3", "#3d444d", "#ff9a5c", "#9ea7b3", ("#58a6ff", "#56d364", "#d2a8ff", "#e3b341")),
}


def series(rows: Rows, x: str, y: str, **where: str) -> Points:
    """Columns ``x`` and ``y`` of the rows whose columns equal ``where``, ordered by ``x``."""
    points = sorted((float(row[x]), float(row[y])) for row in rows if all(row[key] == value for key, value in where.items()))
    return [point[0] for point in points], [point[1] for point in points]


def draw_prefill(axes: Axes, theme: Theme) -> None:
    """Seconds to the first token against prompt length, dense and at three sparsities."""
    rows = [row for row in rows_of("speed") if not row["situation"]]  # whole prompts
    for kernel, style in (("flash", "--"), ("cuDNN", ":")):
        by_length(axes, rows, f"dense, {kernel}", theme.peer, style, method=f"dense, {kernel}")
    for sparsity, width, shift in (("0.8", 1.2, 3), ("0.9", 1.7, 1), ("0.95", 2.2, -5)):
        title = f"msattn, {float(sparsity):.0%} sparse"
        x = by_length(axes, rows, title, theme.ours, width=width, shift=shift, setting=f"sparsity {sparsity}")
    axes.set(title="Time to the first token", xlabel="prompt length (tokens)", ylabel="seconds")
    length_ticks(axes, x)
    axes.set_xlim(0, 185_000)
    axes.set_ylim(0, None)


def draw_decode(axes: Axes, theme: Theme) -> None:
    """Tokens per second of ``generate`` against cache length, dense and routed; of SDPA's kernels, a step as a CUDA graph."""
    rows = [row for row in rows_of("decode") if row["batch"] == "1"]
    for kernel, style, shift in (("flash", "--", -7), ("cuDNN", ":", 0)):
        by_length(axes, rows, f"dense, {kernel}, as a graph", theme.peer, style, shift=shift, method=f"dense, {kernel}")
    by_length(axes, rows, "msattn, dense", theme.ours, width=1.2, shift=8, method="dense, same cache and graphs")
    x = by_length(axes, rows, "msattn,\n32 of 1024 buckets", theme.ours, width=2.2, setting="32 probes")
    axes.set(title="Decoding with generate", xlabel="keys in the cache", ylabel="tokens per second", xscale="log")
    length_ticks(axes, [length for length in x if length != 24576])
    axes.set_xlim(x[0] / 1.2, x[-1] * 5)
    axes.set_ylim(0, None)


def draw_quality(axes: Axes, theme: Theme) -> None:
    """Perplexity over dense against the share of blocks read: the gate and training-free selections, all calibrated."""
    rows = [row for row in rows_of("teacher") if row["task"] == "perplexity" and row["dense_queries"] == "0"]
    rows = [row for row in rows if row["seed"] in ("", "0")]
    lines = [(method, name, color, "--", 1.2) for (method, name), color in zip(NAMES.items(), theme.baselines, strict=True)]
    lines += [("gate", "gate", theme.ours, "-", 2.0), ("oracle", "true block map", theme.peer, ":", 1.2)]
    for method, name, color, style, width in lines:
        points = series(rows, "selectivity", "ratio_to_dense", method=method, select="calibrated")
        draw_line(axes, points, color, name, style, width)
    axes.axhline(1, color=theme.grid, linewidth=1)
    axes.set(title="Perplexity over dense", ylabel="ratio")
    share_ticks(axes)
    axes.set_ylim(0.995, 1.08)
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.text)


def draw_ruler_blocks(axes: Axes, theme: Theme) -> None:
    """RULER's average at 16,384 tokens against the share of blocks read: gates of three seeds and training-free selections."""
    rows = [row for row in rows_of("ruler") if row["length"] == "16384" and row["dense_queries"] in ("", "0")]
    for (method, name), color in zip(NAMES.items(), theme.baselines, strict=True):
        draw_line(axes, series(rows, "selectivity", "score", method=method, select="topk"), color, name)
    draw_line(axes, series(rows, "selectivity", "score", method="oracle", select="topk"), theme.peer, "true block map", ":")
    draw_seeds(axes, theme, rows, "gate", "gate, three seeds", select="topk")
    draw_dense(axes, theme, rows)
    share_ticks(axes)
    answers_found(axes, theme, "sparse prompts", (0.4, 0.5, 0.6, 0.7))


def draw_ruler_keys(axes: Axes, theme: Theme) -> None:
    """RULER's average at 16,384 tokens against the share of the keys that new tokens read: classifiers and other routers."""
    names = {"Quest pages": "Quest pages", "LSH": "LSH", "sink and window": "first and last keys", "k-means": "k-means, seed 0"}
    rows = [row for row in rows_of("ruler") if row["length"] == "16384" and row["select"] == ""]
    for (method, name), color in zip(names.items(), theme.baselines, strict=True):
        of_one_seed = [row for row in rows if row["seed"] in ("", "0")]
        draw_line(axes, series(of_one_seed, "selectivity", "score", method=method), color, name)
    draw_seeds(axes, theme, rows, "classifier", "classifier, three seeds")
    found = series(rows, "selectivity", "score", method="classifier, calibrated")
    axes.plot(*found, "*", color=theme.ours, markersize=9, label="the same, calibrated")
    draw_dense(axes, theme, rows)
    axes.set_xlabel("share of the keys that new tokens read (%)")
    axes.set_xticks([0.02, 0.04, 0.06, 0.08, 0.1], ["2", "4", "6", "8", "10"])
    answers_found(axes, theme, "sparse decoding", (0, 0.2, 0.4, 0.6))


def answers_found(axes: Axes, theme: Theme, part: str, ticks: tuple[float, ...]) -> None:
    """Titles, vertical axis and legend of RULER's averages."""
    axes.set(title=f"RULER, 16,384 tokens, {part}", ylabel="answers found (%)")
    axes.set_yticks(ticks, [f"{100 * tick:.0f}" for tick in ticks])
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.text, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_line(axes: Axes, points: Points, color: str, label: str | None, style: str = "--", width: float = 1.2) -> None:
    """One line, by default as for a method without training."""
    axes.plot(*points, style, color=color, linewidth=width, marker="o", markersize=3, label=label)


def draw_seeds(axes: Axes, theme: Theme, rows: Rows, method: str, label: str, **where: str) -> None:
    """One line for the artifacts of each seed."""
    for seed in ("0", "1", "2"):
        points = series(rows, "selectivity", "score", method=method, seed=seed, **where)
        draw_line(axes, points, theme.ours, label if seed == "0" else None, "-", 1.5)


def draw_dense(axes: Axes, theme: Theme, rows: Rows) -> None:
    """RULER's average with dense attention, as a line."""
    axes.axhline(series(rows, "length", "score", method="dense")[1][0], color=theme.peer, linewidth=0.8, label="dense")


def by_length(
    axes: Axes, rows: Rows, text: str, color: str, style: str = "-", width: float = 1.5, shift: float = 0, **where: str
) -> list[float]:
    """One line of scores, named at its last point, ``shift`` points above it; returns the lengths."""
    x, y = series(rows, "length", "score", **where)
    draw_line(axes, (x, y), color, None, style, width)
    axes.annotate(text, (x[-1], y[-1]), (6, shift), textcoords="offset points", color=color, fontsize=8, va="center")
    return x


def length_ticks(axes: Axes, lengths: list[float]) -> None:
    """Ticks at lengths in thousands of tokens; on a linear axis at the longer ones alone."""
    shown = [length for length in lengths if axes.get_xscale() == "log" or length >= lengths[-1] / 4]
    axes.set_xticks(shown, [f"{length / 1024:g}k" for length in shown])
    axes.minorticks_off()


def share_ticks(axes: Axes) -> None:
    """A logarithmic axis for the share of blocks that is read."""
    axes.set(xlabel="share of visible blocks that is read (%)", xscale="log")
    axes.set_xticks([0.05, 0.1, 0.2, 0.5], ["5", "10", "20", "50"])
    axes.minorticks_off()


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Matplotlib settings of a theme; text stays text, and element ids are the same in every run."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "msattn", "font.family": "sans-serif", "font.size": 9}
    settings |= {"axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    settings |= {"grid.linewidth": 0.6} | dict.fromkeys(("grid.color", "axes.edgecolor"), theme.grid)
    texts = ("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    with plt.rc_context(settings | dict.fromkeys(texts, theme.text)):
        yield


def figure(draw: Callable[[Axes, Theme], None], theme: Theme) -> Figure:
    """One figure on a transparent background."""
    drawn, axes = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    drawn.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    draw(axes, theme)
    return drawn


def main() -> None:
    """Writes ``<name>-<theme>.svg`` for every figure and theme, and the tables of the documents."""
    figures = {
        "prefill": draw_prefill,
        "decode": draw_decode,
        "quality": draw_quality,
        "ruler-blocks": draw_ruler_blocks,
        "ruler-keys": draw_ruler_keys,
    }
    for name, draw in figures.items():
        for label, theme in THEMES.items():
            with styled(theme):
                drawn = figure(draw, theme)
                drawn.savefig(FOLDER / f"{name}-{label}.svg", metadata={"Date": None})
                plt.close(drawn)
    tables.main()


if __name__ == "__main__":
    main()

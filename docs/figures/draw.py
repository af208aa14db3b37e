"""Draws the figures of the documents, for light and dark pages, and writes their tables, from the
CSV files in this folder.

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


@dataclass(frozen=True)
class Theme:
    """Colors of one page background."""

    text: str
    grid: str
    ours: str
    peer: str


THEMES = {
    "light": Theme("#24292f", "#d8dee4", "#c2410c", "#57606a"),
    "dark": Theme("#e6edf3", "#3d444d", "#ff9a5c", "#9ea7b3"),
}


def draw_prefill(axes: Axes, theme: Theme) -> None:
    """Seconds to the first token against prompt length, dense and at three sparsities."""
    rows = [row for row in rows_of("speed") if not row["situation"]]  # whole prompts
    for kernel, style in (("flash", "--"), ("cuDNN", ":")):
        by_length(axes, rows, f"dense, {kernel}", theme.peer, style, method=f"dense, {kernel}")
    for sparsity, width, shift in (("0.8", 1.2, 3), ("0.9", 1.7, 1), ("0.95", 2.2, -5)):
        title = f"msattn, {float(sparsity):.0%} sparse"
        x = by_length(
            axes, rows, title, theme.ours, width=width, shift=shift, setting=f"sparsity {sparsity}"
        )
    axes.set(title="Time to the first token", xlabel="prompt length (tokens)", ylabel="seconds")
    length_ticks(axes, x)
    axes.set_xlim(0, 185_000)
    axes.set_ylim(0, None)


def draw_decode(axes: Axes, theme: Theme) -> None:
    """Tokens per second of ``generate`` against cache length, dense and routed; of SDPA's kernels,
    a step as a CUDA graph.
    """
    rows = [row for row in rows_of("decode") if row["batch"] == "1"]
    for kernel, style, shift in (("flash", "--", -7), ("cuDNN", ":", 0)):
        by_length(
            axes,
            rows,
            f"dense, {kernel}, as a graph",
            theme.peer,
            style,
            shift=shift,
            method=f"dense, {kernel}",
        )
    by_length(
        axes,
        rows,
        "msattn, dense",
        theme.ours,
        width=1.2,
        shift=8,
        method="dense, same cache and graphs",
    )
    x = by_length(
        axes, rows, "msattn,\n32 of 1024 buckets", theme.ours, width=2.2, setting="32 probes"
    )
    axes.set(
        title="Decoding with generate",
        xlabel="keys in the cache",
        ylabel="tokens per second",
        xscale="log",
    )
    length_ticks(axes, [length for length in x if length != 24576])
    axes.set_xlim(x[0] / 1.2, x[-1] * 5)
    axes.set_ylim(0, None)


def draw_loss(axes: Axes, theme: Theme) -> None:
    """KL divergence from dense predictions against the share of the keys that is read, by rows x
    keys of a block.
    """
    rows = [row for row in rows_of("blocks") if row["text"] == "A"]
    for method, blocks, text, color, style, width, shift in (
        ("xattention", "64 x 64", "XAttention, 64 x 64", theme.peer, ":", 1.5, 5),
        ("mean_pool", "64 x 16", "mean pooling, 64 x 16", theme.peer, "--", 1.5, -4),
        ("gate_question", "64 x 64", "gate and question, 64 x 64", theme.ours, "-", 1.2, 4),
        ("gate_question", "64 x 16", "gate and question, 64 x 16", theme.ours, "-", 2.2, -4),
    ):
        chosen = [row for row in rows if (row["method"], row["blocks"]) == (method, blocks)]
        points = sorted(
            (100 * float(row["selectivity"]), float(row["kl_divergence"])) for row in chosen
        )
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=color,
            linewidth=width,
            marker="o",
            markersize=3,
        )
        axes.annotate(
            text,
            points[-1],
            (6, shift),
            textcoords="offset points",
            color=color,
            fontsize=8,
            va="center",
        )
    axes.set(
        title="Distance from dense predictions",
        xlabel="keys read (%)",
        ylabel="KL (nats per token)",
        yscale="log",
    )
    axes.set_xlim(0, 45)
    axes.set_xticks((5, 10, 20, 30))
    losses = (0.01, 0.03, 0.1, 0.3)
    axes.set_yticks(losses, [*map(str, losses)])
    axes.minorticks_off()


def by_length(
    axes: Axes,
    rows: Rows,
    text: str,
    color: str,
    style: str = "-",
    width: float = 1.5,
    shift: float = 0,
    **where: str,
) -> list[float]:
    """One line of scores, named at its last point, ``shift`` points above it; returns the
    lengths.
    """
    chosen = [row for row in rows if all(row[key] == value for key, value in where.items())]
    x, y = zip(*sorted((float(row["length"]), float(row["score"])) for row in chosen), strict=True)
    axes.plot(x, y, style, color=color, linewidth=width, marker="o", markersize=3)
    axes.annotate(
        text,
        (x[-1], y[-1]),
        (6, shift),
        textcoords="offset points",
        color=color,
        fontsize=8,
        va="center",
    )
    return list(x)


def length_ticks(axes: Axes, lengths: list[float]) -> None:
    """Ticks at lengths in thousands of tokens; on a linear axis at the longer ones alone."""
    shown = [
        length for length in lengths if axes.get_xscale() == "log" or length >= lengths[-1] / 4
    ]
    axes.set_xticks(shown, [f"{length / 1024:g}k" for length in shown])
    axes.minorticks_off()


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Matplotlib settings of a theme; text stays text, and element ids are the same in every
    run.
    """
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "msattn",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    settings |= {
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
    }
    settings |= {"grid.linewidth": 0.6} | dict.fromkeys(
        ("grid.color", "axes.edgecolor"), theme.grid
    )
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
    for name, draw in (("loss", draw_loss), ("prefill", draw_prefill), ("decode", draw_decode)):
        for label, theme in THEMES.items():
            with styled(theme):
                drawn = figure(draw, theme)
                drawn.savefig(FOLDER / f"{name}-{label}.svg", metadata={"Date": None})
                plt.close(drawn)
    tables.main()


if __name__ == "__main__":
    main()

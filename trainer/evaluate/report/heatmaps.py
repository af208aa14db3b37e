"""Heatmaps of the results: heads, needles by depth, block maps, and the keys that a decoded token
reads.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import RULER_TASKS
from msattn.trainer.evaluate.report.style import (
    BLUE,
    GRID,
    HEATMAP,
    INK,
    by_head,
    by_method,
    row_title,
    subplots,
)
from msattn.trainer.evaluate.row import WINDOW, EvalRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LABELED_COLUMNS = 24  # a needle grid with more columns has no numbers in its cells


def recall_heads(rows: list[EvalRow]) -> "Figure | None":
    """Draws the attention mass that each head reads: one panel for each method, at its setting with
    the fewest keys.
    """
    fewest = [
        min(points, key=lambda row: row.selectivity or 0)
        for method, points in by_method(rows)
        if method != WINDOW
    ]
    if not fewest:
        return None
    columns = min(4, len(fewest))
    lines = -(-len(fewest) // columns)
    height = 0.9 + max(1.2, min(4.0, 0.18 * max(len(row.extra["layers"]) for row in fewest)))
    figure, grid = subplots(lines, columns, (9.0, height * lines + 0.3))
    images = [by_head(axes, row) for axes, row in zip(grid, fewest, strict=False)]
    for axes, row in zip(grid, fewest, strict=False):
        axes.set_title(f"{row.method.label}\n{row.setting}, mean {row.score:.0%}", fontsize=9)
    for axes in grid[len(fewest) :]:
        axes.set_axis_off()
    figure.colorbar(images[-1], ax=list(grid), label="attention mass read", shrink=0.9, pad=0.02)
    return figure


def needle_grid(rows: list[EvalRow]) -> "Figure | None":
    """Draws accuracy by length of the context and depth of the needle, one line for each method and
    setting.
    """
    depths: list[str] = sorted(
        {depth for row in rows for depth in row.extra["by_depth"]}, key=float
    )
    parts = {depth: f"{float(depth):.0%}" for depth in depths}
    return _grid(
        rows, parts, lambda row: row.extra["by_depth"], "depth of the needle", "needles found"
    )


def ruler_grid(rows: list[EvalRow]) -> "Figure | None":
    """Draws the scores by length and task, one line for each method and setting."""
    parts: dict[str, str] = {
        task: task.removeprefix("niah_").replace("_", "\n")
        for task in RULER_TASKS
        if any(task in row.extra for row in rows)
    }
    return _grid(rows, parts, lambda row: row.extra, "task", "score")


def _grid(
    rows: list[EvalRow],
    parts: dict[str, str],
    scores: Callable[[EvalRow], dict[str, Any]],
    label: str,
    score: str,
) -> "Figure | None":
    """Draws the ``scores`` of each row, whose keys and labels are ``parts``, by length."""
    if not rows:
        return None
    lengths = sorted({row.extra["length"] for row in rows})
    cells = {
        (row_title(row), row.extra["length"], part): scores(row)[part]
        for row in rows
        for part in parts
        if part in scores(row)
    }
    columns = [(length, part) for length in lengths for part in parts]
    titles = list(dict.fromkeys(map(row_title, rows)))
    # NaN: not measured
    table = [[cells.get((title, *column), float("nan")) for column in columns] for title in titles]
    width = min(13.0, 3.4 + 0.55 * len(columns))
    figure, (axes,) = subplots(1, 1, (max(5.5, width), 1.3 + 0.24 * len(table)))
    image = axes.imshow(table, **HEATMAP)
    axes.set_yticks(range(len(table)), titles)
    axes.set_xticks(range(len(columns)), [parts[part] for _, part in columns], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    for number, length in enumerate(lengths):
        axes.text(
            (number + 0.5) * len(parts) - 0.5, -0.75, f"{length:,} tokens", ha="center", fontsize=9
        )
        if number:
            axes.axvline(number * len(parts) - 0.5, color="white", linewidth=3)
    if len(columns) <= MAX_LABELED_COLUMNS:
        for y, line in enumerate(table):
            for x, share in enumerate(line):
                color = "black" if share > 0.6 else "white"
                axes.text(
                    x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=color
                )
    axes.set_xlabel(label)
    figure.colorbar(image, ax=axes, label=score, pad=0.02)
    return figure


def recall_maps(rows: list[EvalRow]) -> "Figure | None":
    """Draws the true block map, the scores of a method and the blocks that it reads, for a head in
    each of three layers.
    """
    data = next((row.extra["maps"] for row in rows if "maps" in row.extra), None)
    if data is None:
        return None
    import torch

    from msattn.trainer.training.pictures import draw_maps

    maps = {}
    for head in data["heads"]:
        lists = (
            [[float("nan") if cell is None else cell for cell in line] for line in one]
            for one in head["maps"]
        )
        maps[head["layer"], head["head"]] = [torch.tensor(one) for one in lists]
    title = data["method"]
    return draw_maps(
        maps, ("true block map", f"scores: {title}", f"blocks read\n({data['setting']})")
    )


def recall_decoded(rows: list[EvalRow]) -> "Figure | None":
    """Draws the attention mass of a decoded token by position, and the keys that each routing
    reads.
    """
    data = next((row.extra["decoded"] for row in rows if "decoded" in row.extra), None)
    if data is None:
        return None
    reads = data["reads"]
    figure, (mass, strips) = subplots(
        2, 1, (9.0, 3.2 + 0.34 * len(reads)), height_ratios=[2.4, 0.34 * len(reads) + 0.2]
    )
    bins, extent = len(data["mass"]), (0, data["keys"])
    width = data["keys"] / bins
    heights = [max(share, 1e-6) for share in data["mass"]]
    mass.bar([width * i for i in range(bins)], heights, width, align="edge", color=BLUE)
    mass.set(yscale="log", ylim=(1e-5, 1.2), xlim=extent, ylabel="attention mass")
    mass.set_title(
        f"layer {data['layer']}, key/value head {data['head']}; routing reads {data['setting']}",
        fontsize=10,
    )
    lines = [read["bins"] for read in reads.values()]
    strips.imshow(lines, **(HEATMAP | {"cmap": "Greens"}), extent=(*extent, len(lines) - 0.5, -0.5))
    names = [
        f"{name}:\n{read['keys']:.0%} of keys, {read['mass']:.0%} of mass"
        for name, read in reads.items()
    ]
    strips.set_yticks(range(len(names)), names, fontsize=8)
    strips.hlines([i + 0.5 for i in range(len(names) - 1)], *extent, color=INK, linewidth=0.5)
    strips.set(xlabel="position of the key; the token stands at the right end")
    strips.set_facecolor(GRID)
    strips.grid(False)
    return figure

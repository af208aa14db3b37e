"""Writes rows as ``results.json``, ``results.csv``, figures (PNG and SVG), one HTML page, and
RULER's as ``ruler.md``.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msattn.trainer.evaluate.report import analysis, curves, heatmaps, speed
from msattn.trainer.evaluate.report.compare import Comparison
from msattn.trainer.evaluate.report.context import Context
from msattn.trainer.evaluate.report.page import page
from msattn.trainer.evaluate.report.style import drawing
from msattn.trainer.evaluate.report.tables import leaderboard
from msattn.trainer.evaluate.row import EvalRow, flat
from msattn.trainer.storage.documents import finite
from msattn.trainer.storage.replace import write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
SEVERAL_TASKS = ("tradeoff", "speed")  # figures that are drawn from the rows of more than one task
FIGURES: dict[str, Callable[[list[EvalRow]], "Figure | None"]] = {
    "tradeoff": curves.tradeoff,
    "speed": speed.speed,
    "perplexity": curves.perplexity,
    "recall": curves.recall,
    "recall_heads": heatmaps.recall_heads,
    "recall_maps": heatmaps.recall_maps,
    "recall_decoded": heatmaps.recall_decoded,
    "needle": partial(curves.found, label="needles found"),
    "needle_grid": heatmaps.needle_grid,
    "documents": curves.documents,
    "ruler": partial(curves.found, label="RULER's average"),
    "ruler_grid": heatmaps.ruler_grid,
    "analysis_planes": analysis.analysis_planes,
    "analysis_buckets": analysis.analysis_buckets,
    "analysis_mass": analysis.analysis_mass,
    "analysis_error": analysis.analysis_error,
    "latency": speed.latency,
}
NUMBER_LIST = re.compile(r"\[\s+((?:-?\d[^\[\]\s]*|null,?)(?:\s+(?:-?\d[^\[\]\s]*|null,?))*)\s+\]")


def write(
    folder: Path, rows: Sequence[EvalRow], about: Context, comparison: Comparison | None = None
) -> dict[str, Path]:
    """Writes all files into ``folder``; returns the figures by name."""
    rows = list(rows)
    figures = draw(rows, folder)
    methods = {str(row.method): asdict(row.method) for row in rows}
    document = finite({**asdict(about), "methods": methods, "rows": [row.plain() for row in rows]})
    text = json.dumps(document, indent=2, allow_nan=False)
    # a list of numbers takes one line
    text = NUMBER_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    write_table(folder / "results.csv", flat(rows))
    if of_ruler := [row for row in rows if row.task == "ruler"]:
        (folder / "ruler.md").write_text(leaderboard(of_ruler), encoding="utf-8")
    (folder / "report.html").write_text(
        page(rows, asdict(about), figures, comparison), encoding="utf-8"
    )
    return figures


def draw(rows: list[EvalRow], folder: Path) -> dict[str, Path]:
    """Writes the figures that ``rows`` have data for as ``folder/<name>.png`` and, with a
    transparent background, ``.svg``. Returns the PNG files by name, in the order of the report.
    """
    import matplotlib

    drawn = {}
    for name, figure_of in FIGURES.items():
        task = name.split("_")[0]
        with drawing():
            figure = figure_of(
                rows if name in SEVERAL_TASKS else [row for row in rows if row.task == task]
            )
            if figure is not None:
                drawn[name] = folder / f"{name}.png"
                figure.savefig(drawn[name], dpi=DPI)
                # ids of clips in two figures of a page must differ
                with matplotlib.rc_context({"svg.hashsalt": name}):
                    figure.savefig(
                        drawn[name].with_suffix(".svg"),
                        dpi=DPI,
                        facecolor="none",
                        metadata={"Date": None},
                    )
    return drawn

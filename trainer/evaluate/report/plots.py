"""The figures of a report: each is drawn from rows alone and written as PNG and SVG."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msattn.trainer.evaluate.report import analysis, curves, heatmaps, speed, tradeoff
from msattn.trainer.evaluate.report.style import drawing, phone_path, stack_panels
from msattn.trainer.evaluate.row import EvalRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
SEVERAL_TASKS = ("tradeoff", "speed")  # figures that are drawn from the rows of more than one task
FIGURES: dict[str, Callable[[list[EvalRow]], "Figure | None"]] = {
    "tradeoff": tradeoff.tradeoff,
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
    "latency": curves.latency,
}


def draw(rows: list[EvalRow], folder: Path) -> dict[str, Path]:
    """Writes the figures that ``rows`` have data for as ``folder/<name>.png`` and, with a transparent background, ``.svg``.

    Of the first one, which readers of the report see first, ``<name>_phone.svg`` has the panels below each other.

    Returns
    -------
    dict
        ``{name: PNG file}`` of the figures, in the order of the report.
    """
    drawn = {}
    for name, figure_of in FIGURES.items():
        task = name.split("_")[0]
        with drawing():
            figure = figure_of(rows if name in SEVERAL_TASKS else [row for row in rows if row.task == task])
            if figure is not None:
                drawn[name] = folder / f"{name}.png"
                figure.savefig(drawn[name], dpi=DPI)
                _save_svg(figure, drawn[name].with_suffix(".svg"))
                if len(drawn) == 1:
                    stack_panels(figure)
                    _save_svg(figure, phone_path(drawn[name]))
    return drawn


def _save_svg(figure: "Figure", path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # ids of clips in two figures of a page must differ
        figure.savefig(path, dpi=DPI, facecolor="none", metadata={"Date": None})

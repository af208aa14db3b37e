"""Writes rows as ``results.json``, ``results.csv``, figures (PNG and SVG) and one HTML page."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msattn.trainer.evaluate.report import plots
from msattn.trainer.evaluate.report.compare import Comparison
from msattn.trainer.evaluate.report.context import Context
from msattn.trainer.evaluate.report.page import page
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.storage.documents import finite
from msattn.trainer.storage.replace import write_table

NUMBER_LIST = re.compile(r"\[\s+((?:-?\d[^\[\]\s]*|null,?)(?:\s+(?:-?\d[^\[\]\s]*|null,?))*)\s+\]")


def write(folder: Path, rows: Sequence[EvalRow], about: Context, comparison: Comparison | None = None) -> dict[str, Path]:
    """Writes all files into ``folder``; returns the figures by name."""
    rows = list(rows)
    figures = plots.draw(rows, folder)
    document = finite({**asdict(about), "rows": [row.plain() for row in rows]})
    text = json.dumps(document, indent=2, allow_nan=False)
    text = NUMBER_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)  # a list of numbers takes one line
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    write_table(folder / "results.csv", flat(rows))
    (folder / "report.html").write_text(page(rows, asdict(about), figures, comparison), encoding="utf-8")
    return figures


def flat(rows: Sequence[EvalRow]) -> list[dict[str, Any]]:
    """Returns a table: the fields of each row, each interval as two columns, and the numbers and strings of ``extra``."""
    lines = []
    for row in rows:
        line = row.plain()
        extra = line.pop("extra")
        line["interval_low"], line["interval_high"] = line.pop("interval") or (None, None)
        for name in [key.removesuffix("_interval") for key in extra if key.endswith("_interval")]:
            line[f"{name}_low"], line[f"{name}_high"] = extra[f"{name}_interval"] or (None, None)
        lines.append(line | {key: value for key, value in extra.items() if isinstance(value, int | float | str)})
    return lines

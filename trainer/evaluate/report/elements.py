"""Pieces of HTML that the sections of the report share. They escape every text."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from msattn.trainer.evaluate.report.style import BLUE, GRID, INK, phone_path

TEXT_COLUMNS = (
    *("task", "method", "setting", "launched by", "answer", "key", "here", "there"),
    *("quality", "best trained", "best untrained"),
)
THEME = {INK: "var(--ink)", GRID: "var(--grid)", BLUE: "var(--blue)"}  # colours of figures that follow the page's theme


def table(columns: dict[str, list[str]], bold: Sequence[bool] = ()) -> str:
    """Returns ``{column: cells}`` as a table that scrolls in its own box; ``bold`` marks rows."""
    names = list(columns)
    kinds = [' class="text"' if name in TEXT_COLUMNS else "" for name in names]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(names, kinds, strict=True))
    lines = []
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        mark = ' class="trained"' if number < len(bold) and bold[number] else ""
        lines.append(f"<tr{mark}>{''.join(f'<td{k}>{escape(c)}</td>' for c, k in zip(cells, kinds, strict=True))}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def figure(path: Path, explanation: str) -> str:
    """Returns the SVG file beside the PNG file ``path``, inline and in the colours of the page, with its explanation (HTML).

    A figure with a file for phones has both, of which the page shows one.
    """
    wide, phone = path.with_suffix(".svg"), phone_path(path)
    shown = f'<div class="scroll">{_inline(wide)}</div>'
    if phone.exists():
        shown = f'<div class="scroll wide">{_inline(wide)}</div><div class="phone">{_inline(phone)}</div>'
    return f"<figure>{shown}<figcaption>{explanation}</figcaption></figure>"


def _inline(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    drawing = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in THEME.items():
        drawing = drawing.replace(color.lower(), variable)
    return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(path.stem)}"', 1)


def folded(summary: str, body: str, is_open: bool = False) -> str:
    """Returns ``body`` (HTML) in a box that opens on a click."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"

"""The report as one self-contained HTML file, from the template ``page.html`` and the explanations
in ``captions.yaml``.
"""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from msattn.trainer.config import TASKS
from msattn.trainer.evaluate.report.compare import Comparison, scores
from msattn.trainer.evaluate.report.context import CPU_NOTE
from msattn.trainer.evaluate.report.style import BLUE, GRID, INK, by_method
from msattn.trainer.evaluate.report.tables import caption, columns_of, table
from msattn.trainer.evaluate.report.verdict import sentences, verdict
from msattn.trainer.evaluate.row import EvalRow

FOLDER = Path(__file__).parent
# figures that stand before the tables of the tasks
OWN_SECTIONS = ("tradeoff", "speed", "recall_maps", "recall_decoded")
MOST_NEEDLES = 2  # prompts with needles that are shown
PROMPT_CHARACTERS = 700  # the end of a longer prompt is shown
TEXT_COLUMNS = (
    *("task", "method", "setting", "launched by", "answer", "key", "here", "there"),
    *("quality", "best trained", "best untrained"),
)
# colors of figures that follow the page's theme
THEME = {INK: "var(--ink)", GRID: "var(--grid)", BLUE: "var(--blue)"}


def page(
    rows: list[EvalRow],
    about: dict[str, Any],
    figures: dict[str, Path],
    comparison: Comparison | None = None,
) -> str:
    """Returns the page of ``rows``, with the fields of their
    :class:`~msattn.trainer.evaluate.report.context.Context`.

    ``figures`` are ``{name: PNG file}``, each with an SVG file beside it, which the page embeds.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template, lines = environment.get_template("page.html"), verdict(rows)
    return template.render(
        about=about,
        facts=_facts(about),
        config=json.dumps(about["config"], indent=2),
        on_cpu=about["machine"]["device"] == "cpu",
        cpu_note=CPU_NOTE,
        # that one stands beside the times
        notes=[note for note in about["notes"] if note != CPU_NOTE],
        verdict=columns_of([line.cells for line in lines]),
        said=sentences(rows, lines),
        figures={name: _inline(path.with_suffix(".svg")) for name, path in figures.items()},
        captions=yaml.safe_load((FOLDER / "captions.yaml").read_text(encoding="utf-8")),
        examples=dict(_examples(rows)),
        comparison=comparison,
        scores=scores,
        tasks=list(_tasks(rows, figures)),
        text_columns=TEXT_COLUMNS,
        anchor=lambda heading: "-".join(re.findall(r"[^\W_]+", heading.lower())[:4]),
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
    )


def _facts(about: dict[str, Any]) -> dict[str, str]:
    facts = {
        "created": about["created"],
        "machine": ", ".join(f"{key} {value}" for key, value in about["machine"].items()),
        "versions": ", ".join(f"{key} {value}" for key, value in about["versions"].items()),
        "commit": about["commit"] or "not run from a checkout",
        "seed": str(about["config"].get("seed", "")),
    }
    for kind, artifact in about["artifacts"].items():
        facts[kind] = (
            f"{artifact['path']} (sha256 {artifact['content_hash'][:16]}, created "
            f"{artifact['created']})"
        )
    return facts


def _inline(path: Path) -> str:
    """Returns an SVG file in the colors of the page."""
    text = path.read_text(encoding="utf-8")
    drawing = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in THEME.items():
        drawing = drawing.replace(color.lower(), variable)
    return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(path.stem)}"', 1)


def _tasks(rows: list[EvalRow], figures: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Yields the heading, the table and the names of the figures of each task."""
    for task in TASKS:
        if own := [row for row in rows if row.task == task]:
            bold = [row.method.is_trained for row in own]
            drawn = [
                name for name in figures if name not in OWN_SECTIONS and name.split("_")[0] == task
            ]
            yield {
                "name": task,
                "caption": caption(own),
                "table": table(own),
                "bold": bold,
                "figures": drawn,
            }


def _examples(rows: list[EvalRow]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the prompts of each task whose rows have ``examples``, with the answers of all
    methods.
    """
    for task in dict.fromkeys(row.task for row in rows if row.extra.get("examples")):
        shown_rows = by_method(
            row for row in rows if row.task == task and row.extra.get("examples")
        )
        own = [min(points, key=_order) for _, points in shown_rows]
        prompts = list(zip(*(row.extra["examples"] for row in own), strict=True))
        # the prompts on which the methods agree least: about half of them are right
        if task == "needle":
            prompts.sort(
                key=lambda answers: abs(2 * fmean(answer["correct"] for answer in answers) - 1)
            )
            del prompts[MOST_NEEDLES:]
        yield task, [_prompt(own, answers) for answers in prompts]


def _order(row: EvalRow) -> tuple[int, float]:
    """Returns a key that puts the row of the longest prompts and the fewest keys read first."""
    return -row.extra.get("length", 0), 1.0 if row.selectivity is None else row.selectivity


def _prompt(rows: list[EvalRow], answers: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    prompt, expected = answers[0]["prompt"], (answers[0].get("expected") or "").strip()
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = f"… {prompt[-PROMPT_CHARACTERS:]}"
    shown = {
        "method": [row.method.label for row in rows],
        "setting": [str(row.setting) for row in rows],
        "answer": [
            (("✗ ", "✓ ")[answer["correct"]] if expected else "") + answer["answer"]
            for answer in answers
        ],
    }
    # the expected answer is marked between them
    parts = prompt.split(expected) if expected else [prompt]
    return {
        "parts": parts,
        "expected": expected,
        "answers": shown,
        "bold": [row.method.is_trained for row in rows],
    }

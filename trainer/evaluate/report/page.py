"""The report as one self-contained HTML file: the verdict first, then figures, examples, tables and provenance."""

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from msattn.trainer.config import TASKS
from msattn.trainer.evaluate.report.captions import CAPTIONS, EXAMPLES, INTRODUCTION, NEEDLE_EXAMPLES
from msattn.trainer.evaluate.report.compare import Comparison, scores
from msattn.trainer.evaluate.report.context import CPU_NOTE
from msattn.trainer.evaluate.report.style import BLUE, GRID, INK, by_method, phone_path
from msattn.trainer.evaluate.report.tables import caption, table
from msattn.trainer.evaluate.report.verdict import columns, sentences, verdict
from msattn.trainer.evaluate.row import EvalRow

_FOLDER = files("msattn.trainer.evaluate.report")
OWN_SECTIONS = ("tradeoff", "speed", "recall_maps", "recall_decoded")  # figures that stand before the tables of the tasks
MANY_NOTES = 4  # more notes are folded
MOST_NEEDLES = 2  # prompts with needles that are shown
PROMPT_CHARACTERS = 700  # the end of a longer prompt is shown
UNBROKEN_PERCENT = "\u00a0%"
TEXT_COLUMNS = (
    *("task", "method", "setting", "launched by", "answer", "key", "here", "there"),
    *("quality", "best trained", "best untrained"),
)
THEME = {INK: "var(--ink)", GRID: "var(--grid)", BLUE: "var(--blue)"}  # colours of figures that follow the page's theme


def page(rows: list[EvalRow], about: dict[str, Any], figures: dict[str, Path], comparison: Comparison | None = None) -> str:
    """Returns the page of ``rows``, with the fields of their :class:`~msattn.trainer.evaluate.report.context.Context`.

    ``figures`` are ``{name: PNG file}``, each with an SVG file beside it, which the page embeds.
    """
    drawn = {name: figure(path, CAPTIONS[name]) for name, path in figures.items()}
    lines = verdict(rows)
    sections = {
        "Verdict": (html_table(columns(lines)) if lines else "") + _said(sentences(rows, lines)) + _notes(about["notes"]),
        "Speed beside quality": _timed("tradeoff", drawn, about),
        "Speed by length": _timed("speed", drawn, about),
        "Example answers": examples(rows),
        "What attention reads": "\n".join(drawn[name] for name in ("recall_maps", "recall_decoded") if name in drawn),
        **({f"Compared with {comparison.title}": _comparison(comparison)} if comparison else {}),
        **_tasks(rows, drawn),
    }
    parts = [f"<h1>{escape(about['title'])}</h1>", _facts(about)]
    parts += [_section(heading, body) for heading, body in sections.items() if body]
    parts.append(_provenance(about))
    body = "\n".join(parts)
    css, script = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(about["title"])}</title><style>{css}</style>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n<main>\n{body}\n</main>\n'
        f"<script>{script}</script></body></html>\n"
    )


def _section(heading: str, body: str) -> str:
    identifier = "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split()[:4])
    return f'<section id="{identifier}"><h2>{escape(heading)}</h2>\n{body}</section>'


def _said(sentences: list[str]) -> str:
    """Returns paragraphs in which no line breaks between a number and its percent sign."""
    return "".join(f"<p>{escape(sentence.replace(' %', UNBROKEN_PERCENT))}</p>" for sentence in sentences)


def _facts(about: dict[str, Any]) -> str:
    machine = about["machine"]
    where = "a CPU" if machine["device"] == "cpu" else machine["device"]
    return f'<p class="facts">{escape(about["created"])}, measured on {escape(where)} ({escape(machine["system"])})</p>'


def _notes(notes: list[str]) -> str:
    notes = [note for note in notes if note != CPU_NOTE]  # beside the times
    body = f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
    return folded(f"Notes ({len(notes)})", body, is_open=len(notes) <= MANY_NOTES) if notes else ""


def _timed(name: str, drawn: dict[str, str], about: dict[str, Any]) -> str:
    """Returns a figure of times; on a CPU with a note on them, before the first such figure."""
    first = next((each for each in OWN_SECTIONS if each in drawn), "") == name
    note = f'<p class="note">{escape(CPU_NOTE)}</p>' if first and about["machine"]["device"] == "cpu" else ""
    return note + drawn[name] if name in drawn else ""


def _tasks(rows: list[EvalRow], drawn: dict[str, str]) -> dict[str, str]:
    sections: dict[str, str] = {}
    for task in TASKS:
        own = [row for row in rows if row.task == task]
        if own:
            pictures = [html for name, html in drawn.items() if name not in OWN_SECTIONS and name.split("_")[0] == task]
            introduction = f"<p>{INTRODUCTION}</p>" if task != "analysis" and not sections else ""
            rendered = html_table(table(own), bold=[row.method.is_trained for row in own])
            if task == "analysis":  # its figures say more than its many rows
                rendered, pictures = "", [*pictures, folded(f"Table ({len(own)} rows)", rendered)]
            sections[caption(own)] = "\n".join([introduction, rendered, *pictures])
    return sections


def _comparison(comparison: Comparison) -> str:
    main = comparison.main()
    others = [each for each in comparison.rows if each not in main]
    shown = (html_table(scores(main)) if main else "") if comparison.rows else "<p>No row is in both.</p>"
    if others:
        shown += folded(f"Other methods ({len(others)} rows)", html_table(scores(others)), is_open=not main)
    unmatched = f"<p>{comparison.unmatched} rows are in one of the two evaluations only.</p>" if comparison.unmatched else ""
    here, there = ([values[side] for values in comparison.settings.values()] for side in (0, 1))
    settings = html_table({"key": list(comparison.settings), "here": here, "there": there})
    differ = f"<p>Settings that differ:</p>{settings}" if comparison.settings else "<p>No setting differs.</p>"
    return f"{differ}\n{shown}{unmatched}"


def _provenance(about: dict[str, Any]) -> str:
    facts = {
        "created": about["created"],
        "machine": ", ".join(f"{key} {value}" for key, value in about["machine"].items()),
        "versions": ", ".join(f"{key} {value}" for key, value in about["versions"].items()),
        "commit": about["commit"] or "not run from a checkout",
        "seed": str(about["config"].get("seed", "")),
    }
    for kind, artifact in about["artifacts"].items():
        facts[kind] = f"{artifact['path']} (sha256 {artifact['content_hash'][:16]}, created {artifact['created']})"
    lines = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    settings = f"<pre>{escape(json.dumps(about['config'], indent=2))}</pre>"
    return folded("Versions, hashes and configuration", f"<dl>{lines}</dl>{settings}")


def examples(rows: list[EvalRow]) -> str:
    """Returns the section's HTML; an empty string if no row has ``extra["examples"]``.

    Each example is ``{"prompt": str, "expected": str, "answer": str, "correct": bool}``, and examples of one index have the
    same prompt in all rows of a task and length. Without an expected answer, no answer is marked.
    """
    parts = []
    for task in dict.fromkeys(row.task for row in rows if row.extra.get("examples")):
        shown_rows = by_method(row for row in rows if row.task == task and row.extra.get("examples"))
        own = [min(points, key=_order) for _, points in shown_rows]
        parts.append(f"<p>{EXAMPLES}{NEEDLE_EXAMPLES if task == 'needle' else ''}</p>")
        prompts = list(zip(*(row.extra["examples"] for row in own), strict=True))
        if task == "needle":  # the prompts on which the methods agree least: about half of them are right
            prompts.sort(key=lambda answers: abs(2 * fmean(answer["correct"] for answer in answers) - 1))
            del prompts[MOST_NEEDLES:]
        parts += [_prompt(list(zip(own, answers, strict=True))) for answers in prompts]
    return "\n".join(parts)


def _order(row: EvalRow) -> tuple[int, float]:
    """Returns a key that puts the row of the longest prompts and the fewest keys read first."""
    return -row.extra.get("length", 0), 1.0 if row.selectivity is None else row.selectivity


def _prompt(answers: list[tuple[EvalRow, dict[str, Any]]]) -> str:
    first = answers[0][1]
    prompt, expected = first["prompt"], (first.get("expected") or "").strip()
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = f"… {prompt[-PROMPT_CHARACTERS:]}"
    parts = prompt.split(expected) if expected else [prompt]
    shown = f"<mark>{escape(expected)}</mark>".join(map(escape, parts))
    answers_by_method = {
        "method": [row.method.label for row, _ in answers],
        "setting": [str(row.setting) for row, _ in answers],
        "answer": [(("✗ ", "✓ ")[example["correct"]] if expected else "") + example["answer"] for _, example in answers],
    }
    wanted = f"<p>Expected answer: <mark>{escape(expected)}</mark></p>" if expected else ""
    body = html_table(answers_by_method, bold=[row.method.is_trained for row, _ in answers])
    return f'<blockquote>{shown}</blockquote>\n{wanted}\n<div class="answers">{body}</div>'


def html_table(columns: dict[str, list[str]], bold: Sequence[bool] = ()) -> str:
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
    """Returns the figure's SVG file, inline and in the colours of the page, with its explanation (HTML)."""
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

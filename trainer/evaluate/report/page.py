"""The report as one self-contained HTML file: the verdict first, then figures, examples, tables and provenance."""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from msattn.trainer.evaluate.report.captions import CAPTIONS, INTRODUCTION
from msattn.trainer.evaluate.report.compare import ComparedRow, Comparison
from msattn.trainer.evaluate.report.context import CPU_NOTE
from msattn.trainer.evaluate.report.elements import figure, folded, table
from msattn.trainer.evaluate.report.examples import examples
from msattn.trainer.evaluate.report.tables import HEADINGS, caption
from msattn.trainer.evaluate.report.tables import table as columns_of
from msattn.trainer.evaluate.report.verdict import Verdict, verdict
from msattn.trainer.evaluate.row import EvalRow

_FOLDER = files("msattn.trainer.evaluate.report")
OWN_SECTIONS = ("tradeoff", "speed", "recall_maps", "recall_decoded")  # figures that stand before the tables of the tasks
MANY_NOTES = 4  # more notes are folded


def page(rows: list[EvalRow], about: dict[str, Any], figures: dict[str, Path], comparison: Comparison | None = None) -> str:
    """Returns the page.

    Parameters
    ----------
    rows : rows of any tasks.
    about : the fields of :class:`~msattn.trainer.evaluate.report.context.Context`.
    figures : ``{name: PNG file}``, each with an SVG file beside it, which the page embeds.
    comparison : scores of another evaluation.
    """
    drawn = {name: figure(path, CAPTIONS[name]) for name, path in figures.items()}
    sections = {
        "Verdict": _verdict(verdict(rows)) + _notes(about["notes"]),
        "Speed beside quality": _timed("tradeoff", drawn, about),
        "Speed by length": _timed("speed", drawn, about),
        "Example answers": examples(rows),
        "What attention reads": _reads(drawn),
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


def _verdict(found: Verdict) -> str:
    sentences = "".join(f"<p>{escape(_unbroken(sentence))}</p>" for sentence in found.sentences)
    return (table(found.table()) if found.lines else "") + sentences


def _unbroken(sentence: str) -> str:
    """Returns a sentence in which no line breaks between a number and its percent sign."""
    return sentence.replace(" %", "\u00a0%")


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


def _reads(drawn: dict[str, str]) -> str:
    found = [drawn[name] for name in ("recall_maps", "recall_decoded") if name in drawn]
    return "\n".join(found)


def _tasks(rows: list[EvalRow], drawn: dict[str, str]) -> dict[str, str]:
    """Returns the heading and the figures and table of each task."""
    sections: dict[str, str] = {}
    for task in HEADINGS:
        own = [row for row in rows if row.task == task]
        if own:
            pictures = [html for name, html in drawn.items() if name not in OWN_SECTIONS and name.split("_")[0] == task]
            introduction = f"<p>{INTRODUCTION}</p>" if task != "analysis" and not sections else ""
            rendered = table(columns_of(own), bold=[row.method.is_trained for row in own])
            if task == "analysis":  # its figures say more than its many rows
                rendered, pictures = "", [*pictures, folded(f"Table ({len(own)} rows)", rendered)]
            sections[caption(own)] = "\n".join([introduction, rendered, *pictures])
    return sections


def _comparison(comparison: Comparison) -> str:
    main = comparison.main()
    shown = set(map(id, main))
    others = [each for each in comparison.rows if id(each) not in shown]
    scores = _scores(main) if comparison.rows else "<p>No row is in both.</p>"
    if others:
        scores += folded(f"Other methods ({len(others)} rows)", _scores(others), is_open=not main)
    unmatched = f"<p>{comparison.unmatched} rows are in one of the two evaluations only.</p>" if comparison.unmatched else ""
    here, there = ([values[side] for values in comparison.settings.values()] for side in (0, 1))
    settings = table({"key": list(comparison.settings), "here": here, "there": there})
    differ = f"<p>Settings that differ:</p>{settings}" if comparison.settings else "<p>No setting differs.</p>"
    return f"{differ}\n{scores}{unmatched}"


def _scores(rows: list[ComparedRow]) -> str:
    lines = [each.cells() for each in rows]
    return table({name: [line[name] for line in lines] for name in lines[0]}) if lines else ""


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

"""The report as one self-contained HTML file without scripts."""

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from msattn.trainer.evaluate.report.tables import HEADINGS, TRAINED_METHODS, caption, table
from msattn.trainer.evaluate.row import EvalRow

INTRODUCTION = (
    "All measurements use the sparse kernels of <code>msattn.attach</code> (on a CPU their references, which read only the "
    "selected keys), not masked dense attention. "
    "<i>Sparsity</i> is the share of the causally visible blocks that is not read. <i>Keys read</i> is the "
    "share of the visible keys that is read. <i>Recall</i> is the share of the attention mass in the keys that are read. "
    "<i>Latency</i> is the time of a prefill, or of a decoded token for routing. Latency on a CPU says little about a GPU."
)
CAPTIONS = {
    "perplexity": (
        "Increase of perplexity over dense attention, against sparsity. Lower is better. <i>Oracle</i> selects blocks by the "
        "true attention map. It is an upper bound for gates, but saves no time, because the map needs dense attention. Bars "
        "are 95 % intervals of the difference to dense attention on the same chunks. The scale is logarithmic above 0.1 %."
    ),
    "recall": (
        "Left: the share of the dense model's attention mass in the keys that are read, averaged over layers, heads and "
        "queries. Right: the relative squared error of the attention output. Block selections are measured on every query of "
        "a prefill, routing on decoding queries with its dense window, so compare block selections with each other and "
        "routings with each other. Every method gets the dense model's queries, keys and values."
    ),
    "recall_heads": (
        "Attention mass read by each head, at the setting of each method that reads the fewest keys. A dark cell is a head "
        "that loses most of its attention mass; retrieval may depend on a single head."
    ),
    "needle": (
        "Share of the hidden numbers that are found, against the share of keys read. The upper left corner is best. Bars are "
        "95 % Wilson intervals; every method runs the same prompts. A number counts as found if each of its tokens is the "
        "model's most likely token."
    ),
    "needle_grid": (
        "Share of the hidden numbers that are found, by depth of the needle (0 %: start of the context) and length of the "
        "context. A low value at one depth means that the method does not read that region."
    ),
    "latency": (
        "Left: speed-up of the time to the first token over the fastest dense attention, by length. Below 1 dense attention "
        "is faster; <code>msattn.attach</code> uses it for prompts shorter than <code>select.dense_below</code>. Right: the "
        "parts of the time at the longest prompt."
    ),
}
CSS = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 64rem;
  margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.25rem; margin-top: 2.6rem; border-bottom: 1px solid #ddd }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: .9rem }
dt { color: #555 } dd { margin: 0; overflow-wrap: anywhere }
.note { background: #fff8e5; padding: .5rem .8rem; margin: .4rem 0 }
figure { margin: 1.6rem 0 } figcaption { color: #555; font-size: .9rem } img { max-width: 100%; height: auto }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .22rem .8rem .22rem 0; text-align: right; white-space: nowrap } th { border-bottom: 1px solid #999 }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
tr.trained td { font-weight: 600 } tbody tr:hover { background: #f5f7fa }
pre { overflow-x: auto; background: #f6f6f6; padding: .8rem; font-size: .8rem }
""".strip()


def page(rows: list[EvalRow], about: dict[str, Any], figures: dict[str, Path]) -> str:
    """Returns the page.

    Parameters
    ----------
    rows : rows of any tasks.
    about : the fields of :class:`~msattn.trainer.evaluate.report.context.Context`.
    figures : ``{name: PNG file}``, embedded in the page.
    """
    parts = [f"<h1>{escape(about['title'])}</h1>", _facts(about), f"<p>{INTRODUCTION}</p>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in about["notes"]]
    for task in HEADINGS:
        own = [row for row in rows if row.task == task]
        if own:
            parts.append(f"<h2>{escape(caption(own))}</h2>")
            parts += [_figure(path, CAPTIONS[name]) for name, path in figures.items() if name.split("_")[0] == task]
            parts.append(_table(own))
    settings = escape(json.dumps(about["config"], indent=2))
    parts.append(f"<details><summary>Configuration of this run</summary><pre>{settings}</pre></details>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(about["title"])}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head><body>\n{body}\n</body></html>\n'


def _facts(about: dict[str, Any]) -> str:
    facts = {
        "created": about["created"],
        "machine": ", ".join(f"{key} {value}" for key, value in about["machine"].items()),
        "versions": ", ".join(f"{key} {value}" for key, value in about["versions"].items()),
        "commit": about["commit"] or "not run from a checkout",
        "seed": str(about["config"].get("seed", "")),
    }
    for kind, artifact in about["artifacts"].items():
        facts[kind] = f"{artifact['path']} (sha256 {artifact['content_hash'][:16]}, created {artifact['created']})"
    lines = (f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f"<dl>{''.join(lines)}</dl>"


def _figure(path: Path, explanation: str) -> str:
    picture = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{path.stem}" src="data:image/png;base64,{picture}">'
    return f"<figure>{image}<figcaption>{explanation}</figcaption></figure>"


def _table(rows: list[EvalRow]) -> str:
    columns = table(rows)
    lines = []
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        trained = ' class="trained"' if row.method in TRAINED_METHODS else ""
        lines.append(f"<tr{trained}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'

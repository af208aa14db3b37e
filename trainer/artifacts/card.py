"""Model cards: the ``README.md`` of an artifact and of a repository on the Hub, with YAML front
matter that the Hub reads.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msattn.trainer.artifacts.kinds import KINDS, ROUTER_KINDS
from msattn.trainer.storage.documents import checked, parse_yaml, read_json

PLACEHOLDER = "path/or/hub-id"  # in the example for an artifact that is not on the Hub
RESULTS = Path("eval", "results.json")  # beside the artifacts of a run
MAX_RESULTS_BYTES = 500_000_000  # includes the block maps of several methods
FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)


@dataclass(frozen=True)
class ResultRow:
    """The fields of an evaluation's row that a card shows."""

    task: str
    method: str
    setting: str
    score: float | None
    score_name: str
    ratio_to_dense: float | None = None
    sparsity: float | None = None
    selectivity: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The keys of ``results.json`` that a card needs."""

    artifacts: dict[str, dict[str, Any]]
    rows: list[ResultRow]
    # the record of each method, by its name in rows
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)

    def name_of(self, row: ResultRow) -> str | None:
        """Returns the name of a row's method without variants; None for a second artifact of the
        same kind.
        """
        method = self.methods.get(row.method, {"name": row.method})
        return None if method.get("source") else method.get("name")


def artifact_card(manifest: Mapping[str, Any]) -> str:
    """Returns the card of an artifact: front matter, a description, an example, and the metrics of
    its training.
    """
    kind, model = manifest["kind"], manifest["model"]
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model["id"]) and not os.path.exists(model["id"])
    base = f"base_model: {model['id']}\nbase_model_relation: adapter\n" if on_hub else ""
    figures = [
        (name, value)
        for name, value in manifest["metrics"].items()
        if isinstance(value, int | float | str)
    ]
    rows = "\n".join(
        f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |"
        for name, value in figures
    )
    results = f"\n## Measured\n\n| figure | value |\n| --- | --- |\n{rows}\n" if figures else ""
    return f"""---
library_name: msattn
tags: [sparse-attention, long-context, {kind}]
{base}---

# {KINDS[kind].title}

Made for `{model["id"]}` ({model["num_layers"]} layers, {model["num_heads"]} query heads, \
{model["num_kv_heads"]} key/value heads, head size {model["head_dim"]}) with msattn \
{manifest["versions"]["msattn"]}. `manifest.json` records the training data, the seed, the \
versions and the base model; `config.yaml` holds the resolved configuration of the run.

{_example({kind}, PLACEHOLDER)}
{results}"""


def run_card(cards: Mapping[str, str], repository: str) -> str:
    """Returns the card of a repository with one artifact of each kind; ``cards`` are the cards of
    the artifacts, by kind.

    Its front matter merges theirs: keys such as a license that the user added, and all tags.
    """
    import yaml

    parts = {kind: front_matter(card, f"{kind}/README.md") for kind, card in cards.items()}
    merged: dict[str, Any] = {}
    for part in parts.values():
        merged = part | merged
    tags = [
        tag for part in parts.values() if isinstance(part.get("tags"), list) for tag in part["tags"]
    ]
    merged["tags"] = list(dict.fromkeys(tags))
    rows = "\n".join(f"| [`{kind}`]({kind}) | {KINDS[kind].title} |" for kind in cards)
    return f"""---
{yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)}---

# Sparse attention for a frozen model

| folder | holds |
| --- | --- |
{rows}

{_example(set(cards), repository)}
"""


def front_matter(card: str, where: str) -> dict[str, Any]:
    """Returns the YAML at the beginning of a card, {} without; raises UserError if it is not
    valid.
    """
    match = FRONT_MATTER.match(card)
    return parse_yaml(match[1], f"{where}: front matter") if match else {}


def evaluation_section(folder: Path, hashes: Mapping[str, str]) -> str:
    """Returns a table of the evaluation in the folder of a run, or "" if it did not measure exactly
    these artifacts.

    ``hashes`` are the artifacts' content hashes, by kind. Only rows of their methods and of dense
    attention are shown.
    """
    path = folder / RESULTS
    if not os.path.exists(path):
        return ""
    results = checked(read_json(path, str(path), MAX_RESULTS_BYTES), Results, str(path))
    measured = {
        kind: entry.get("content_hash")
        for kind, entry in results.artifacts.items()
        if kind in hashes
    }
    if measured != {kind: hashes[kind] for kind in measured}:
        return ""
    methods = {KINDS[kind].method for kind in measured}
    rows = [row for row in results.rows if results.name_of(row) in {"dense", *methods}]
    if not any(results.name_of(row) in methods for row in rows):
        return ""
    lines = "\n".join(f"| {' | '.join(_cells(row))} |" for row in rows)
    return f"""
## Evaluated

By `msattn eval`, with exactly these weights.

| task | tokens | method | setting | measure | score | vs dense | not read |
| --- | ---: | --- | --- | --- | ---: | ---: | ---: |
{lines}
"""


def _cells(row: ResultRow) -> list[str]:
    left = (
        row.sparsity
        if row.sparsity is not None
        else None
        if row.selectivity is None
        else 1 - row.selectivity
    )
    length = row.extra.get("length")
    return [
        row.task,
        f"{length:,}" if isinstance(length, int) else "",
        *(text.replace("|", "\\|") for text in (row.method, row.setting, row.score_name)),
        "" if row.score is None else f"{row.score:.4g}",
        "" if row.ratio_to_dense is None else f"{row.ratio_to_dense:.3f}",
        "" if left is None else f"{left:.1%}",
    ]


def _example(kinds: set[str], path: str) -> str:
    """Returns a Python example that attaches artifacts of these kinds; a k-means routes only if
    there is no classifier.
    """
    router = {"qmodel"} if kinds & {*ROUTER_KINDS} else set()
    arguments = ", ".join(f'{name}="{path}"' for name in sorted(router | kinds & {"gate"}))
    return (
        f"```python\nimport msattn\n\nwith msattn.attach(model, {arguments}):\n    "
        f"model.generate(...)\n```"
    )

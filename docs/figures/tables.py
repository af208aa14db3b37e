"""Writes the tables of the documents from the CSV files in this folder; ``draw.py`` runs it, too.

A table stands between ``<!-- table: name -->`` and ``<!-- end -->``, a number of a sentence between ``<!-- number: name -->``
and ``<!-- end -->``. Each cell is a number of one row of a file, or its mean over the seeds::

    python docs/figures/tables.py
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

FOLDER = Path(__file__).parent
DOCUMENTS = [FOLDER.parents[1] / "README.md", *sorted(FOLDER.parent.rglob("*.md"))]
MARKED = re.compile(r"<!-- (table|number): (\S+) -->.*?<!-- end -->", flags=re.DOTALL)
Where = Mapping[str, str]


@cache
def rows(file: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV file."""
    with (FOLDER / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@dataclass(frozen=True)
class Cell:
    """A column of a table, or a number: the row of ``file`` with ``where``, written as ``form``.

    A form ends in ``%`` for shares, which are written in percent. Three names of ``numbers`` are a number and its interval.
    """

    head: str
    form: str
    numbers: tuple[str, ...]
    where: Where

    def write(self, file: str, where: Where) -> str:
        """Returns the cell, empty without a row. Raises LookupError if rows differ in more than their seed."""
        where = {**where, **self.where}
        found = [row for row in rows(file) if all(row[key] == value for key, value in where.items())]
        if len({row.get("seed") for row in found}) != len(found):
            raise LookupError(f"{file}.csv has several rows with {where}")
        if not found:
            return ""
        shown = [format(fmean(float(row[name]) for row in found), self.form).rstrip("%") for name in self.numbers]
        return f"{shown[0]} ({shown[1]} to {shown[2]})" if len(shown) == 3 else shown[0]


def cell(head: str, form: str, *numbers: str, **where: str) -> Cell:
    """Returns a column of a table."""
    return Cell(head, form, numbers, where)


@dataclass(frozen=True)
class Table:
    """A table of the rows of a file with ``where``: its lines by their first cells (divided by ``|``), and its columns."""

    file: str
    first: str
    lines: Mapping[str, Where]
    columns: list[Cell]
    where: Where

    def write(self) -> Iterator[str]:
        """Yields lines of Markdown. Raises LookupError for a line without numbers."""
        heads = [*self.first.split("|"), *(column.head for column in self.columns)]
        yield from ("", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}")
        for name, line in self.lines.items():
            cells = [column.write(self.file, {**self.where, **line}) for column in self.columns]
            if not any(cells):
                raise LookupError(f"{self.file}.csv has no row with {self.where} and {line}")
            yield f"| {' | '.join([*name.split('|'), *cells])} |"
        yield ""


def table(file: str, first: str, lines: Mapping[str, Where], columns: list[Cell], **where: str) -> Table:
    """Returns a table."""
    return Table(file, first, lines, columns, where)


SPARSITIES = ("0.5", "0.8", "0.9", "0.95")
SEEDS = ("0", "1", "2")
SHARES = ("about 2 % of keys", "about 5 % of keys", "about 10 % of keys")
SCORES = {  # title: method in the files
    "gate": "gate",
    "mean pooling": "mean_pool",
    "vertical-slash": "vertical_slash",
    "Quest bounds": "quest",
    "true block map": "oracle",
    "A-shape": "a_shape",
    "random": "random",
}
ROUTERS = {
    "classifier, calibrated": "classifier, calibrated",
    "classifier": "classifier",
    "Quest pages": "Quest pages",
    "LSH": "LSH",
    "k-means of keys before RoPE": "k-means",
    "window of first and last keys": "sink and window",
    "random buckets": "random buckets",
}
CALIBRATED = {title: {"method": method, "select": "calibrated"} for title, method in SCORES.items()}
TOP_K = {f"{title}, top-k": {"method": method, "select": "topk"} for title, method in SCORES.items()}
PUBLIC = {title: line for title, line in (CALIBRATED | TOP_K).items() if not title.startswith(("A-shape", "random"))}
RATIO = ("ratio_to_dense", "ratio_low", "ratio_high")
SCORE = ("score", "interval_low", "interval_high")


def by_sparsity(form: str, *numbers: str, sparsities: tuple[str, ...] = SPARSITIES) -> list[Cell]:
    """Returns a column for each sparsity."""
    heads = [f"{float(sparsity):.0%}".replace("%", " %") for sparsity in sparsities]
    heads[0] += " sparse"
    return [cell(head, form, *numbers, setting=f"sparsity {x}") for head, x in zip(heads, sparsities, strict=True)]


def by_length(first: str, lengths: tuple[str, ...], form: str, *numbers: str, **where: str) -> list[Cell]:
    """Returns a column for each length, followed by the share that is read."""
    return [
        column
        for length in lengths
        for column in (
            cell(f"{first}{int(length):,} tokens (%)", form, *numbers, length=length, **where),
            cell("read (%)", ".1%", "selectivity", length=length, **where),
        )
    ]


def of_seeds(title: str, **where: str) -> dict[str, Where]:
    """Returns a line for each seed."""
    return {f"{title}, seed {seed}": {**where, "seed": seed} for seed in SEEDS}


def keys(settings: Mapping[str, tuple[str, ...]]) -> dict[str, Where]:
    """Returns lines of routers and their settings."""
    return {f"{title}|{x}": {"method": ROUTERS[title], "setting": x} for title, found in settings.items() for x in found}


FAR = ("1.5 % of far keys", "3.5 % of far keys", "8.5 % of far keys")
PROBES = ("2 probes", "4 probes", "11 probes")
WITHOUT_TRAINING = {title: {"method": ROUTERS[title]} for title in list(ROUTERS)[2:] if not title.startswith("k-means")}
SMOLLM2 = {"model": "smollm2", "task": "ruler"}
RULER_BLOCKS = {"select": "topk", "length": "16384"}
NEEDLE_BLOCKS = [("gate", "0.9"), *((title, "0.95") for title in ("gate", "Quest bounds", "vertical-slash"))]
NEEDLE_BLOCKS += [("mean pooling", "0.9"), ("A-shape", "0.9")]
AT_80_AND_4K = {"setting": "sparsity 0.8", "length": "4096", **SMOLLM2}
TURNS = (8192, 24576, 57344, 122880)
SIZES = (("1", "8192"), ("1", "32768"), ("1", "131072"), ("1", "524288"), ("6", "131072"), ("32", "24576"))
MODELS = {"smollm2": "SmolLM2", "gemma3_270m": "Gemma 3", "tiny": "embedded"}
TITLES = {method: title for title, method in SCORES.items()}
TASKS = {"single": "niah_single", "multi-key": "niah_multikey"}

TABLES = {
    "first-token": table(
        "speed",
        "tokens",
        {f"{int(x):,}": {"length": x} for x in ("4096", "32768", "65536", "131072")},
        [
            cell("FA2 (s)", ".3f", "score", method="dense, flash"),
            cell("cuDNN (s)", ".3f", "score", method="dense, cuDNN"),
            *(cell(f"{100 * float(x):g} % sparse (s)", ".3f", "score", setting=f"sparsity {x}") for x in SPARSITIES[1:]),
            cell("95 %, faster than FA2 (x)", ".2f", "times_flash", setting="sparsity 0.95"),
            cell("than cuDNN (x)", ".2f", "times_cuDNN", setting="sparsity 0.95"),
        ],
        situation="",
    ),
    "first-token-ratios": table(
        "speed",
        "tokens",
        {f"{int(x):,}": {"length": x} for x in ("4096", "8192", "16384", "32768", "65536", "131072")},
        by_sparsity(".2f", "times_flash", sparsities=SPARSITIES[1:]),
        situation="",
    ),
    "passes": table(
        "speed",
        "passes",
        {"131,072 tokens in chunks of 8,192": {"situation": "chunks of 8192", "length": "131072"}}
        | {f"8,192 tokens after {x:,} cached ones": {"situation": f"8192 new after {x}"} for x in TURNS},
        [
            cell("dense (s)", ".3f", "score", method="dense, flash"),
            cell("gate (s)", ".3f", "score", method="gate, untrained"),
            cell("faster (x)", ".2f", "times_flash", method="gate, untrained"),
            cell("peak memory of the gate's run (MiB)", ",.0f", "peak_memory_mb", method="gate, untrained"),
        ],
    ),
    "decoding": table(
        "decode",
        "sequences x keys",
        {f"{batch} x {int(x):,}": {"batch": batch, "length": x} for batch, x in SIZES},
        [
            cell("cuDNN, a step", ",.1f", "score", method="dense, cuDNN"),
            cell("msattn, dense", ",.1f", "score", method="dense, same cache and graphs"),
            cell("msattn, classifier", ",.1f", "score", setting="32 probes"),
            cell("faster than msattn, dense (x)", ".2f", "times_same cache and graphs", setting="32 probes"),
            cell("keys read (%)", ".1%", "selectivity", setting="32 probes"),
        ],
    ),
    "smollm2-perplexity": table(
        "public",
        "blocks chosen by",
        {title: line for title, line in PUBLIC.items() if title in CALIBRATED or title == "gate, top-k"},
        [
            *by_sparsity(".4f", "ratio_to_dense", sparsities=SPARSITIES[:3]),
            cell("KL at 80 %", ".3f", "kl_divergence", setting="sparsity 0.8"),
            cell("same top token at 80 % (%)", ".1%", "same_top", setting="sparsity 0.8"),
            cell("read at 80 % (%)", ".1%", "selectivity", setting="sparsity 0.8"),
        ],
        model="smollm2",
        task="perplexity",
    ),
    **{
        f"{model}-intervals": table(
            "public",
            "blocks chosen by",
            PUBLIC,
            by_sparsity(".4f", *RATIO, sparsities=SPARSITIES[:3]),
            model=model,
            task="perplexity",
        )
        for model in ("smollm2", "gemma3_270m")
    },
    "smollm2-blocks": table(
        "public",
        "blocks chosen by, 80 % sparse",
        {title: line for title, line in PUBLIC.items() if title in CALIBRATED},
        by_length("", ("4096", "8192"), ".1%", "score"),
        setting="sparsity 0.8",
        **SMOLLM2,
    ),
    "public-blocks": table(
        "public",
        "blocks chosen by, 80 % sparse",
        {title: line for title, line in PUBLIC.items() if title in CALIBRATED or title == "gate, top-k"},
        by_length("SmolLM2, ", ("4096", "8192"), ".1%", *SCORE, model="smollm2")
        + by_length("Gemma 3, ", ("4096",), ".1%", *SCORE, model="gemma3_270m"),
        setting="sparsity 0.8",
        task="ruler",
    ),
    "smollm2-keys": table(
        "public",
        "new tokens read by|setting",
        keys({"classifier, calibrated": FAR[1:], "classifier": PROBES[1:], "Quest pages": PROBES[1:]}),
        by_length("", ("4096", "8192"), ".1%", "score"),
        **SMOLLM2,
    ),
    "smollm2-all-keys": table(
        "public",
        "new tokens read by|setting",
        keys({title: FAR if "calibrated" in title else PROBES for title in ROUTERS if title not in ("LSH", "random buckets")}),
        by_length("", ("4096", "8192"), ".1%", "score"),
        **SMOLLM2,
    ),
    "realised": table(
        "realised",
        "model, blocks chosen by|asked for (%)",
        {
            f"{MODELS[row['model']]}, {TITLES[row['scores']]}|{float(row['sparsity']):.0%}".rstrip("%"): {
                key: row[key] for key in ("model", "scores", "sparsity")
            }
            for row in rows("realised")
            if row["sparsity"] != "0.9"
        },
        [cell(f"{int(x):,} tokens", ".1%", "realised", length=x) for x in ("2048", "4096", "8192", "16384", "32768")],
    ),
    "teacher-perplexity": table(
        "teacher",
        "blocks chosen by",
        {
            title: {**line, "seed": "0" if line["method"] == "gate" else ""}
            for title, line in (CALIBRATED | TOP_K).items()
            if title in CALIBRATED or title == "gate, top-k"
        },
        by_sparsity(".4f", *RATIO),
        task="perplexity",
        dense_queries="0",
    ),
    "teacher-needles": table(
        "teacher",
        "20 needles, 32,768 tokens|setting",
        {
            f"{title}|{100 * float(x):g} % sparse": {**CALIBRATED[title], "setting": f"sparsity {x}"}
            for title, x in NEEDLE_BLOCKS
        }
        | keys({title: ("3 % of far keys",) if "calibrated" in title else SHARES[:1] for title in ROUTERS}),
        [
            *(cell(f"found, seed {seed} (%)", ".0%", "score", seed=seed) for seed in SEEDS),
            cell("found, untrained (%)", ".0%", "score", seed=""),
            cell("read (%)", ".1%", "selectivity"),
        ],
        task="needle",
    ),
    "teacher-first-token": table(
        "teacher",
        "90 %, calibrated where nothing else is said",
        {f"dense, {name}": {"method": f"dense, {kernel}"} for name, kernel in (("cuDNN", "cuDNN"), ("FA2", "flash"))}
        | {title: {**(CALIBRATED | TOP_K)[title], "setting": "sparsity 0.9"} for title in (*CALIBRATED, "gate, top-k")},
        [cell(f"{int(x):,} tokens (s)", ".4f", "score", length=x) for x in ("16384", "32768")],
        task="latency",
        situation="",
    ),
    "ruler-blocks": table(
        "ruler",
        "blocks chosen by",
        of_seeds("gate", method="gate") | {title: {"method": method} for title, method in SCORES.items() if method != "gate"},
        by_sparsity(".1%", "score"),
        dense_queries="0",
        **RULER_BLOCKS,
    ),
    "ruler-questions": table(
        "ruler",
        "blocks chosen by, last 64 queries dense",
        {title: {"method": method} for title, method in SCORES.items()},
        by_sparsity(".1%", "score"),
        dense_queries="64",
        **RULER_BLOCKS,
    ),
    "ruler-calibrated": table(
        "ruler",
        "new tokens read by",
        of_seeds("classifier, calibrated", method="classifier, calibrated"),
        [cell("keys read (%)", ".1%", "selectivity"), cell("RULER (%)", ".1%", "score")],
        length="16384",
    ),
    "ruler-keys": table(
        "ruler",
        "new tokens read by",
        of_seeds("classifier", method="classifier")
        | WITHOUT_TRAINING
        | of_seeds("k-means of keys before RoPE", method="k-means"),
        [
            column
            for setting in SHARES
            for column in (
                cell("keys read (%)", ".1%", "selectivity", setting=setting),
                cell("RULER (%)", ".1%", "score", setting=setting),
            )
        ],
        length="16384",
    ),
    "ruler-tasks": table(
        "ruler",
        "method",
        {
            "dense": {"method": "dense"},
            "gate, top-k, 90 % sparse": {"method": "gate", "setting": "sparsity 0.9", "select": "topk", "dense_queries": "0"},
            "vertical-slash, 90 % sparse": {"method": "vertical_slash", "setting": "sparsity 0.9", "dense_queries": "0"},
            "classifier, calibrated, 3.3 % of the keys": {"method": "classifier, calibrated"},
            "classifier, 5.8 %": {"method": "classifier", "setting": SHARES[1]},
            "Quest pages, 5.8 %": {"method": "Quest pages", "setting": SHARES[1]},
        },
        [cell(f"{name} {number}", ".0%", f"{task}_{number}") for name, task in TASKS.items() for number in (1, 2, 3)]
        + [cell("multi-value", ".0%", "niah_multivalue"), cell("multi-query", ".0%", "niah_multiquery")]
        + [cell(task, ".0%", task) for task in ("vt", "cwe", "fwe")],
        length="16384",
    ),
    "embedded-perplexity": table(
        "quality", "perplexity over dense", CALIBRATED | TOP_K, by_sparsity(".4f", "ratio_to_dense"), task="perplexity"
    ),
    "embedded-needles": table(
        "needles",
        "needles, blocks chosen by",
        {title: line for title, line in CALIBRATED.items() if title != "random"},
        [cell("found (%)", ".1%", *SCORE), cell("keys read (%)", ".1%", "selectivity")],
        setting="sparsity 0.8",
    ),
    "embedded-decoding": table(
        "quality",
        "decoding by|probes of 64 buckets",
        {
            "classifier|1": {"method": "classifier", "setting": "1 probe"},
            "classifier|2": {"method": "classifier", "setting": "2 probes"},
            "k-means of keys after RoPE|8": {"method": "k-means, RoPE", "setting": "8 probes"},
            "window of first and last keys|0": {"method": "window only", "setting": "0 probes"},
        },
        [cell("needles found (%)", ".1%", "score"), cell("keys read (%)", ".1%", "selectivity")],
        task="needle",
    ),
}

CLASSIFIER = {"method": "classifier, calibrated", "setting": "3.5 % of far keys", "length": "4096", **SMOLLM2}
PAGES = {"method": "Quest pages", "setting": "4 probes", "length": "4096", **SMOLLM2}
LAB_CLASSIFIER = {"method": "classifier, calibrated", "length": "16384"}
LAB_PAGES = {"method": "Quest pages", "setting": SHARES[0], "length": "16384"}
PERPLEXITY = {"model": "smollm2", "task": "perplexity", "setting": "sparsity 0.8", "select": "calibrated"}
GRAPHS = {"length": "524288", "batch": "1", "setting": "32 probes"}
TURN = {"situation": "8192 new after 122880", "length": "131072"}

NUMBERS = {
    "first-token": ("speed", cell("", ".2f", "times_flash", length="131072", situation="", setting="sparsity 0.95")),
    "turn": ("speed", cell("", ".1f", "times_flash", method="gate, untrained", **TURN)),
    "turn-seconds": ("speed", cell("", ".3f", "score", method="gate, untrained", **TURN)),
    "turn-dense-seconds": ("speed", cell("", ".3f", "score", method="dense, flash", **TURN)),
    "generate": ("decode", cell("", ".2f", "times_same cache and graphs", **GRAPHS)),
    "generate-batch": ("decode", cell("", ".1f", "times_cuDNN", length="131072", batch="6", setting="32 probes")),
    "gate-perplexity": ("public", cell("", ".3f", "ratio_to_dense", method="gate", **PERPLEXITY)),
    "pooling-perplexity": ("public", cell("", ".3f", "ratio_to_dense", method="mean_pool", **PERPLEXITY)),
    "dense-answers": ("public", cell("", ".1%", "score", method="dense", length="4096", **SMOLLM2)),
    "gate-answers": ("public", cell("", ".1%", "score", **CALIBRATED["gate"], **AT_80_AND_4K)),
    "slash-answers": ("public", cell("", ".1%", "score", **CALIBRATED["vertical-slash"], **AT_80_AND_4K)),
    "classifier-answers": ("public", cell("", ".1%", "score", **CLASSIFIER)),
    "classifier-read": ("public", cell("", ".1%", "selectivity", **CLASSIFIER)),
    "pages-answers": ("public", cell("", ".1%", "score", **PAGES)),
    "pages-read": ("public", cell("", ".1%", "selectivity", **PAGES)),
    "lab-dense-answers": ("ruler", cell("", ".1%", "score", method="dense", length="16384")),
    "lab-classifier-answers": ("ruler", cell("", ".1%", "score", **LAB_CLASSIFIER)),
    "lab-classifier-read": ("ruler", cell("", ".1%", "selectivity", **LAB_CLASSIFIER)),
    "lab-pages-answers": ("ruler", cell("", ".1%", "score", **LAB_PAGES)),
    "lab-pages-read": ("ruler", cell("", ".1%", "selectivity", **LAB_PAGES)),
}


def marked(match: re.Match[str]) -> str:
    """Returns a marked table or number, written anew."""
    kind, name = match[1], match[2]
    if kind == "table":
        text = "\n".join(TABLES[name].write())
    else:
        file, number = NUMBERS[name]
        text = number.write(file, {})
    return f"<!-- {kind}: {name} -->{text}<!-- end -->"


def written(document: str) -> str:
    """Returns the text of a document with its marked tables and numbers written anew."""
    return MARKED.sub(marked, document)


def main() -> None:
    """Writes the tables of all documents."""
    for document in DOCUMENTS:
        document.write_text(written(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

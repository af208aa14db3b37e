"""Writes the tables of the documents from the CSV files in this folder; ``draw.py`` runs it, too.

A table stands between ``<!-- table: name -->`` and ``<!-- end -->``, a number of a sentence between
``<!-- number: name -->`` and ``<!-- end -->``. Each cell is a number of one row of a file, or its
mean over the seeds::

    python docs/figures/tables.py
"""

import re
from collections.abc import Mapping

from cells import FOLDER, Cell, Table, Where, rows

DOCUMENTS = [FOLDER.parents[1] / "README.md", *sorted(FOLDER.parent.rglob("*.md"))]
MARKED = re.compile(r"<!-- (table|number): (\S+) -->.*?<!-- end -->", flags=re.DOTALL)

SPARSITIES = ("0.5", "0.8", "0.9", "0.95")
TITLES = {  # of the methods in the files that choose blocks
    "gate": "gate",
    "gate_question": "gate and question",
    "mean_pool": "mean pooling",
    "vertical_slash": "vertical-slash",
    "minference": "MInference",
    "flexprefill": "FlexPrefill",
    "xattention": "XAttention",
    "flashprefill": "FlashPrefill",
    "quest": "Quest bounds",
    "oracle": "true block map",
    "a_shape": "A-shape",
}
COMPARED_TITLES = {method: title for method, title in TITLES.items() if method != "a_shape"}
ROUTERS = {
    "classifier, calibrated": "classifier, calibrated",
    "clusters of own keys": "key clusters",
    "Quest pages": "Quest pages",
    "Twilight": "Twilight",
}
SCORE = ("score", "interval_low", "interval_high")


def by_sparsity(
    form: str,
    *numbers: str,
    head: str = "{}",
    sparsities: tuple[str, ...] = SPARSITIES,
    **where: str,
) -> list[Cell]:
    """Returns a column for each sparsity, which stands for ``{}`` in its head."""
    shown = [f"{100 * float(x):.0f} %" for x in sparsities]
    if head == "{}":
        shown[0] += " sparse"
    settings = [f"sparsity {x}" for x in sparsities]
    return [
        Cell(head.format(text), form, *numbers, setting=x, **where)
        for text, x in zip(shown, settings, strict=True)
    ]


def keys(settings: Mapping[str, tuple[str, ...]]) -> dict[str, Where]:
    """Returns lines of routers and their settings."""
    return {
        f"{title}|{x}": {"method": ROUTERS[title], "setting": x}
        for title, values in settings.items()
        for x in values
    }


SMOLLM2 = {"model": "smollm2", "task": "ruler"}
TURNS = (8192, 24576, 57344, 122880)
SIZES = (
    ("1", "8192"),
    ("1", "32768"),
    ("1", "131072"),
    ("1", "524288"),
    ("6", "131072"),
    ("32", "24576"),
)
AT_80_AND_90 = ("0.8", "0.9")
COMPARED = {title: {"method": method} for method, title in COMPARED_TITLES.items()}
SHORT, LONG = ({"task": "perplexity", "length": length} for length in ("8192", "32768"))


QWEN = {"model": "qwen25_coder_05b"}


def at_equal_reading(share: str, sparsity: str) -> Table:
    """Returns the table of Qwen2.5-Coder-0.5B: what selections that read the same share lose, and
    what they take.
    """
    columns = []
    for length in ("8192", "32768"):
        where = {"task": "perplexity", "length": length, "setting": f"{share} % of keys"}
        columns += [
            Cell(f"KL, {int(length):,} tokens", ".3f", "kl_divergence", **where),
            Cell("perplexity over dense", ".3f", "ratio_to_dense", **where),
        ]
    timed = {"task": "latency", "length": "32768", "setting": f"sparsity {sparsity}"}
    columns += [
        Cell("first token, 32,768 tokens (s)", ".3f", "score", **timed),
        Cell("speedup over cuDNN (x)", ".2f", "times_cuDNN", **timed),
        Cell("read there (%)", ".1%", "selectivity", **timed),
    ]
    lines = {
        COMPARED_TITLES[method]: {"method": method}
        for method in (
            "gate_question",
            "gate",
            "mean_pool",
            "xattention",
            "quest",
            "vertical_slash",
            "minference",
            "oracle",
        )
    }
    return Table("qwen", f"blocks chosen by, {share} % of the keys read", lines, columns)


def answers_and_speed() -> Table:
    """Returns the table of the first page: Qwen2.5-Coder-0.5B, 20 % of the keys read."""
    where = QWEN | {"text": "B", "blocks": "64 x 64", "setting": "20 % of keys"}
    columns = [
        Cell(head, form, number, task=task, length=length, **where)
        for head, form, number, task, length in (
            ("RULER, 8,192 tokens (%)", ".1%", "score", "ruler", "8192"),
            ("RULER, 32,768 tokens (%)", ".1%", "score", "ruler", "32768"),
            ("KL, 32,768 tokens", ".3f", "kl_divergence", "perplexity", "32768"),
            ("perplexity over dense", ".3f", "ratio_to_dense", "perplexity", "32768"),
        )
    ]
    timed = {"task": "latency", "length": "32768", "setting": "sparsity 0.8"}
    columns.append(Cell("speedup over cuDNN (x)", ".2f", "times_cuDNN", file="qwen", **timed))
    methods = ("gate_question", "gate", "minference", "mean_pool", "xattention")
    lines = {COMPARED_TITLES[method]: {"method": method} for method in methods}
    return Table("blocks", "blocks chosen by, 20 % of the keys read", lines, columns)


def at_share(task: str, length: str, head: str, form: str, *numbers: str) -> list[Cell]:
    """Returns a column for each share of the keys that is read; the first names the task."""
    where, shares = {"task": task, "length": length}, ("20", "10")
    heads = (f"{x} %" if place else f"{head}, {x} % read" for place, x in enumerate(shares))
    return [
        Cell(text, form, *numbers, setting=f"{x} % of keys", **where)
        for text, x in zip(heads, shares, strict=True)
    ]


def of_blocks(model: str, methods: tuple[str, ...], *columns: Cell) -> Table:
    """Returns the table of a model whose selections, ``gate_question`` and these methods over
    blocks of 64 x 64 and the measured ones over 64 x 16, read equal shares.
    """
    chosen = [("64 x 64", method) for method in ("gate_question", *methods)]
    chosen += [("64 x 16", method) for method in ("gate_question", "mean_pool", "xattention")]
    lines = {
        f"{blocks}|{COMPARED_TITLES[method]}": {"model": model, "blocks": blocks, "method": method}
        for blocks, method in chosen
    }
    return Table("blocks", "blocks, queries x keys|chosen by", lines, list(columns))


SELECTIONS = {  # of blocks, on the text on which answers were measured, too
    f"{blocks}|{COMPARED_TITLES[method]}": QWEN | {"text": "B", "blocks": blocks, "method": method}
    for blocks in ("64 x 64", "64 x 16")
    for method in ("gate_question", "gate", "mean_pool", "xattention", "minference")
    if (blocks, method) != ("64 x 16", "minference")
}
TABLES = {
    "qwen-blocks": Table(
        "blocks",
        "blocks, queries x keys|chosen by",
        SELECTIONS,
        [
            *at_share("perplexity", "32768", "KL, 32,768 tokens", ".3f", "kl_divergence"),
            *at_share("perplexity", "32768", "perplexity over dense", ".3f", "ratio_to_dense"),
            *at_share("perplexity", "8192", "KL, 8,192 tokens", ".3f", "kl_divergence"),
            *at_share("perplexity", "8192", "perplexity over dense", ".3f", "ratio_to_dense"),
            *at_share("leval", "8192", "L-Eval, 8,192 tokens", ".3f", "ratio_to_dense"),
        ],
    ),
    "qwen-answers": Table(
        "blocks",
        "blocks, queries x keys|chosen by",
        SELECTIONS,
        [
            *at_share("ruler", "8192", "RULER, 8,192 tokens (%)", ".1%", "score"),
            *at_share("ruler", "32768", "RULER, 32,768 tokens (%)", ".1%", "score"),
            *at_share("leval", "32768", "L-Eval over dense", ".3f", "ratio_to_dense"),
        ],
    ),
    "qwen-20": at_equal_reading("20", "0.8"),
    "qwen-first-page": answers_and_speed(),
    "qwen-10": at_equal_reading("10", "0.9"),
    "qwen-seeds": Table(
        "qwen",
        "tokens|keys read (%)|blocks chosen by",
        {
            f"{int(length):,}|{share}|{COMPARED_TITLES[method]}": {
                "length": length,
                "setting": f"{share} % of keys",
                "method": method,
            }
            for length in ("8192", "32768")
            for share in ("20", "10")
            for method in ("gate_question", "gate")
        },
        [
            Cell(f"{head}, seed {seed}", form, *numbers, seed=seed)
            for head, form, numbers in (
                ("KL", ".3f", ("kl_divergence",)),
                (
                    "perplexity over XAttention's (%)",
                    ".1%",
                    ("over_best", "over_best_low", "over_best_high"),
                ),
            )
            for seed in ("0", "1", "2")
        ],
        task="perplexity",
    ),
    "long-code": Table(
        "long_code",
        "blocks chosen by",
        {
            COMPARED_TITLES[method]: {"method": method}
            for method in ("gate_question", "mean_pool", "xattention", "minference")
        },
        [
            Cell(
                f"{share} %" if place else f"{head}, {share} % read",
                form,
                number,
                setting=f"{share} % of keys",
            )
            for head, form, number in (
                ("likelihood over dense", ".3f", "ratio_to_dense"),
                ("lines (%)", ".1%", "lines"),
            )
            for place, share in enumerate(("20", "10"))
        ],
    ),
    "smollm2-equal": of_blocks(
        "smollm2",
        ("gate", "mean_pool", "vertical_slash", "minference", "flexprefill", "xattention"),
        *at_share("perplexity", "8192", "KL", ".3f", "kl_divergence"),
        *at_share("perplexity", "8192", "perplexity over dense", ".3f", "ratio_to_dense"),
        *at_share("ruler", "8192", "RULER (%)", ".1%", "score"),
        *at_share("leval", "8192", "L-Eval over dense", ".3f", "ratio_to_dense"),
    ),
    "gemma-equal": of_blocks(
        "gemma3_270m",
        ("gate", "vertical_slash", "minference", "flexprefill"),
        *at_share("perplexity", "8192", "KL", ".3f", "kl_divergence"),
        *at_share("perplexity", "8192", "perplexity over dense", ".3f", "ratio_to_dense"),
        *at_share("ruler", "8192", "RULER (%)", ".1%", "score"),
        *at_share("perplexity", "32768", "KL, 32,768 tokens", ".3f", "kl_divergence"),
        *at_share("perplexity", "32768", "perplexity over dense", ".3f", "ratio_to_dense"),
    ),
    "first-token": Table(
        "speed",
        "tokens",
        {f"{int(x):,}": {"length": x} for x in ("4096", "32768", "65536", "131072")},
        [
            Cell("FA2 (s)", ".3f", "score", method="dense, flash"),
            Cell("cuDNN (s)", ".3f", "score", method="dense, cuDNN"),
            *(
                Cell(f"{100 * float(x):g} % sparse (s)", ".3f", "score", setting=f"sparsity {x}")
                for x in SPARSITIES[1:]
            ),
            Cell("95 %: speedup over FA2 (x)", ".2f", "times_flash", setting="sparsity 0.95"),
            Cell("over cuDNN (x)", ".2f", "times_cuDNN", setting="sparsity 0.95"),
        ],
        situation="",
    ),
    "passes": Table(
        "speed",
        "passes",
        {"131,072 tokens in chunks of 8,192": {"situation": "chunks of 8192", "length": "131072"}}
        | {
            f"8,192 tokens after {x:,} cached ones": {"situation": f"8192 new after {x}"}
            for x in TURNS
        },
        [
            Cell("dense (s)", ".3f", "score", method="dense, flash"),
            Cell("gate (s)", ".3f", "score", method="gate, untrained"),
            Cell("speedup (x)", ".2f", "times_flash", method="gate, untrained"),
            Cell(
                "peak memory with the gate (MiB)",
                ",.0f",
                "peak_memory_mb",
                method="gate, untrained",
            ),
        ],
    ),
    "decoding": Table(
        "decode",
        "sequences x keys",
        {f"{batch} x {int(x):,}": {"batch": batch, "length": x} for batch, x in SIZES},
        [
            Cell("cuDNN, one step", ",.1f", "score", method="dense, cuDNN"),
            Cell("msattn, dense", ",.1f", "score", method="dense, same cache and graphs"),
            Cell("msattn, classifier", ",.1f", "score", setting="32 probes"),
            Cell(
                "speedup over msattn, dense (x)",
                ".2f",
                "times_same cache and graphs",
                setting="32 probes",
            ),
            Cell("keys read (%)", ".1%", "selectivity", setting="32 probes"),
        ],
    ),
    "gemma3_270m-blocks": Table(
        "comparison",
        "blocks chosen by",
        {
            f"{COMPARED_TITLES[method]}, `mean_mass`{title}": {
                "method": f"{method} mean_mass{name}"
            }
            for title, name in ((", 640 steps", " 640"), ("", ""))
            for method in ("gate", "gate_question")
        }
        | COMPARED,
        [
            *by_sparsity(
                ".3f",
                "ratio_to_dense",
                head="perplexity over dense, 8,192 tokens, {}",
                sparsities=SPARSITIES[:3],
                **SHORT,
            ),
            *by_sparsity(
                ".3f",
                "ratio_to_dense",
                head="perplexity over dense, 32,768 tokens, {}",
                sparsities=AT_80_AND_90,
                **LONG,
            ),
            *by_sparsity(
                ".1%",
                "score",
                head="RULER, 8,192 tokens, {} (%)",
                sparsities=AT_80_AND_90,
                task="ruler",
                length="8192",
            ),
            *by_sparsity(
                ".1%",
                "selectivity",
                head="read at {}, 8,192 tokens (%)",
                sparsities=("0.8",),
                **SHORT,
            ),
        ],
        model="gemma3_270m",
    ),
    "smollm2-keys": Table(
        "public",
        "keys chosen by|setting",
        keys(
            {
                "classifier, calibrated": ("5 % of far keys", "10 % of far keys"),
                "clusters of own keys": ("6 probes", "13 probes"),
                "Quest pages": ("6 probes", "20 probes"),
                "Twilight": ("6 probes",),
            }
        ),
        [
            Cell("RULER (%)", ".1%", *SCORE),
            Cell("over dense", ".2f", "ratio_to_dense"),
            Cell("read (%)", ".1%", "selectivity"),
        ],
        length="4096",
        **SMOLLM2,
    ),
    "qwen-keys": Table(
        "public",
        "keys chosen by|asked for",
        {
            f"{title}|{share} %": {"method": method, "setting": f"about {share} % of keys"}
            for title, method in (
                ("classifier, fixed probes", "classifier"),
                ("k-means", "k-means"),
                ("clusters of own keys", "key clusters"),
                ("Quest pages", "Quest pages"),
                ("Twilight", "Twilight"),
            )
            for share in ("5", "10")
        }
        | {
            "classifier, calibrated|5 % of far keys": {
                "method": "classifier, calibrated",
                "setting": "5 % of far keys",
            }
        },
        [
            Cell("RULER (%)", ".1%", *SCORE),
            Cell("over dense", ".2f", "ratio_to_dense"),
            Cell("read (%)", ".1%", "selectivity"),
        ],
        **QWEN,
    ),
    "kvpress": Table(
        "kvpress",
        "press",
        {row["method"]: {"method": row["method"]} for row in rows("kvpress") if row["setting"]},
        [
            Cell(f"{share} of the keys (%)", ".1%", "score", setting=f"{share} of keys")
            for share in ("5 %", "10 %", "20 %")
        ],
    ),
    "embedded-needles": Table(
        "needles",
        "needles, blocks chosen by",
        {
            TITLES[method]: {"method": method, "select": "calibrated"}
            for method in ("gate", "mean_pool", "vertical_slash", "quest", "oracle", "a_shape")
        },
        [Cell("found (%)", ".1%", *SCORE), Cell("keys read (%)", ".1%", "selectivity")],
        setting="sparsity 0.8",
    ),
}

GRAPHS = {"length": "524288", "batch": "1", "setting": "32 probes"}
BATCH = {"length": "131072", "batch": "6", "setting": "32 probes"}
TURN = {"situation": "8192 new after 122880", "length": "131072"}
FIRST_TOKEN = {"length": "131072", "situation": "", "setting": "sparsity 0.95"}

NUMBERS = {
    "first-token": ("speed", Cell("", ".2f", "times_flash", **FIRST_TOKEN)),
    "first-token-cudnn": ("speed", Cell("", ".2f", "times_cuDNN", **FIRST_TOKEN)),
    "turn": ("speed", Cell("", ".1f", "times_flash", method="gate, untrained", **TURN)),
    "turn-seconds": ("speed", Cell("", ".3f", "score", method="gate, untrained", **TURN)),
    "turn-dense-seconds": ("speed", Cell("", ".3f", "score", method="dense, flash", **TURN)),
    "generate": ("decode", Cell("", ".2f", "times_same cache and graphs", **GRAPHS)),
    "generate-batch": ("decode", Cell("", ".2f", "times_same cache and graphs", **BATCH)),
}


def marked(match: re.Match[str]) -> str:
    """Returns a marked table or number, written anew."""
    kind, name = match[1], match[2]
    text = (
        "\n".join(TABLES[name].write())
        if kind == "table"
        else NUMBERS[name][1].write(NUMBERS[name][0], {})
    )
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

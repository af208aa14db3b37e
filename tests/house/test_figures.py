"""The figures of README.md and docs/results.md are those of the CSV files that the drawings are made from."""

import csv
import re
from functools import cache

import pytest

from tests.house.modules import ROOT

FILES = ROOT / "docs/figures"
METHODS = {  # of the tables of quality: policy and method in the files
    "gate": ("calibrated", "gate"),
    "mean pooling": ("calibrated", "mean_pool"),
    "A-shape": ("calibrated", "a_shape"),
    "vertical-slash": ("calibrated", "vertical_slash"),
    "Quest bounds": ("calibrated", "quest"),
    "true block map": ("calibrated", "oracle"),
    "gate, top-k": ("topk", "gate"),
}
ROUTERS = {
    "classifier": "classifier",
    "k-means of keys after RoPE": "k-means, RoPE",
    "window of first and last keys": "window only",
}
SPARSITIES = ("0.5", "0.8", "0.9", "0.95")


@cache
def rows(file: str) -> list[dict[str, str]]:
    with (FILES / file).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def value(file: str, column: str, **where: str) -> float:
    """Returns ``column`` of the only row of a file whose columns are ``where``."""
    (row,) = [row for row in rows(file) if all(row[key] == wanted for key, wanted in where.items())]
    return float(row[column])


def lines(document: str, heading: str, section: str = "") -> list[list[str]]:
    """Returns the cells of the table whose first line begins with ``heading``, without that line and the next.

    It is the only one of the document, or the first one after ``section``.
    """
    text = (ROOT / document).read_text(encoding="utf-8")
    text = text[text.index(section) :]
    start, *others = [match.start() for match in re.finditer(rf"^{re.escape(heading)}", text, flags=re.MULTILINE)]
    assert section or not others, f"{document}: several tables begin with {heading}"
    table = text[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def cells(document: str, heading: str, section: str = "") -> dict[str, list[str]]:
    """Returns the lines of a table by their first cells."""
    return {first: rest for first, *rest in lines(document, heading, section)}


def prose(document: str) -> str:
    """Returns a document without line breaks."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def assert_rounded(shown: str, exact: float) -> None:
    """Asserts that the number in a cell is ``exact``, rounded to as many decimals."""
    number = re.sub(r"[^\d.]", "", shown)
    assert float(number) == pytest.approx(exact, abs=0.5001 * 10 ** -len(number.partition(".")[2])), shown


def test_times_to_the_first_token() -> None:
    table = cells("docs/results.md", "| tokens | FA2 (s)")
    for length in ("4096", "32768", "65536", "131072"):
        dense = [
            value("speed.csv", "score", length=length, situation="", method=f"dense, {name}") for name in ("flash", "cuDNN")
        ]
        sparse = [value("speed.csv", "score", length=length, situation="", setting=f"sparsity {x}") for x in SPARSITIES[1:]]
        for shown, exact in zip(table[f"{int(length):,}"], dense + sparse, strict=True):
            assert_rounded(shown, exact)
    fastest = {"length": "131072", "situation": "", "setting": "sparsity 0.95"}
    ratios = [value("speed.csv", f"times_{name}", **fastest) for name in ("flash", "cuDNN")]
    stated = f"95 % sparse is {ratios[0]:.2f} x faster than FA2 at 131,072 tokens, {ratios[1]:.2f} x faster than cuDNN"
    assert stated in prose("docs/results.md")


def test_tokens_per_second() -> None:
    table = cells("docs/results.md", "| sequences x keys |")
    for batch, length in (("1", "8192"), ("1", "32768"), ("1", "131072"), ("1", "524288"), ("6", "131072"), ("32", "24576")):
        at = {"batch": batch, "length": length}
        cudnn = value("decode.csv", "score", method="dense, cuDNN", **at)
        dense = value("decode.csv", "score", method="dense, same cache and graphs", **at)
        routed, read = (value("decode.csv", column, setting="32 probes", **at) for column in ("score", "selectivity"))
        exact = [cudnn, dense, routed, routed / dense, 100 * read]
        for shown, number in zip(table[f"{batch} x {int(length):,}"], exact, strict=True):
            assert_rounded(shown, number)


def quality(file: str, name: str, task: str, sparsity: str, column: str) -> float:
    select, method = METHODS[name]
    return value(file, column, select=select, task=task, method=method, setting=f"sparsity {sparsity}")


PUBLIC = {name: METHODS[name] for name in METHODS if name != "A-shape"} | {
    f"{name}, top-k": ("topk", METHODS[name][1]) for name in METHODS if name not in ("A-shape", "gate, top-k")
}


def public(name: str, task: str, setting: str, length: str, model: str = "smollm2") -> dict[str, str]:
    """Returns the row of a public model; ``name`` is that of the tables."""
    select, method = PUBLIC.get(name, ("", name))
    where = {"model": model, "select": select, "task": task, "method": method, "setting": setting, "length": length}
    (row,) = [row for row in rows("public.csv") if all(row[key] == wanted for key, wanted in where.items())]
    return row


def test_perplexities_of_a_public_model() -> None:
    for name, *shown in lines("docs/results.md", "| blocks chosen by | 50 % sparse |", section="**SmolLM2"):
        found = [public(name, "perplexity", f"sparsity {x}", "8192") for x in SPARSITIES[:3]]
        exact = [float(row["ratio_to_dense"]) for row in found]
        exact += [float(found[1]["kl_divergence"]), 100 * float(found[1]["same_top"]), 100 * float(found[1]["selectivity"])]
        for cell, number in zip(shown, exact, strict=True):
            assert_rounded(cell, number)
    for name, *shown in lines("docs/measurements.md", "| blocks chosen by | 50 % sparse |", section="## Public models"):
        for cell, sparsity in zip(shown, SPARSITIES[:3], strict=True):
            row = public(name, "perplexity", f"sparsity {sparsity}", "8192")
            for number, column in zip(re.findall(r"[\d.]+", cell), ("ratio_to_dense", "ratio_low", "ratio_high"), strict=True):
                assert_rounded(number, float(row[column]))


def test_answers_of_a_public_model() -> None:
    for name, *shown in lines("docs/results.md", "| blocks chosen by, 80 % sparse |"):
        for place, cell in enumerate(shown):
            row = public(name, "ruler", "sparsity 0.8", ("4096", "8192")[place // 2])
            assert_rounded(cell, 100 * float(row[("score", "selectivity")[place % 2]]))
    names = {"k-means of keys before RoPE": "k-means", "window of first and last keys": "sink and window"}
    for document in ("docs/results.md", "docs/measurements.md"):
        for name, setting, *shown in lines(document, "| new tokens read by | setting |"):
            for place, cell in enumerate(shown):
                row = public(names.get(name, name), "ruler", setting, ("4096", "8192")[place // 2])
                assert_rounded(cell, 100 * float(row[("score", "selectivity")[place % 2]]))


def test_realised_sparsities() -> None:
    models = {"SmolLM2": "smollm2", "Gemma 3": "gemma3_270m", "embedded": "tiny"}
    for first, asked, *shown in lines("docs/measurements.md", "| model, blocks chosen by | asked for (%) |"):
        model, name = first.split(", ")
        for length, cell in zip(("2048", "4096", "8192", "16384", "32768"), shown, strict=True):
            where = {"model": models[model], "scores": METHODS[name][1], "sparsity": f"{int(asked) / 100:g}", "length": length}
            if cell:
                assert_rounded(cell, 100 * value("realised.csv", "realised", **where))


def test_intervals_of_the_perplexities_of_the_lab_teacher() -> None:
    table = cells("docs/measurements.md", "| blocks chosen by | 50 % sparse |", section="### Perplexity, needles and times")
    assert set(table) == {*METHODS, "random"}
    for name, shown in table.items():
        select, method = METHODS.get(name, ("calibrated", name))
        where = {"select": select, "task": "perplexity", "method": method, "dense_queries": "0"}
        where["seed"] = "0" if method == "gate" else ""
        for cell, sparsity in zip(shown, SPARSITIES, strict=True):
            numbers = re.findall(r"[\d.]+", cell)
            for number, column in zip(numbers, ("ratio_to_dense", "ratio_low", "ratio_high"), strict=True):
                assert_rounded(number, value("teacher.csv", column, setting=f"sparsity {sparsity}", **where))


def test_perplexities_of_the_embedded_model() -> None:
    table = cells("docs/measurements.md", "| perplexity over dense, calibrated | 80 % sparse |")
    assert set(table) == set(METHODS) - {"gate, top-k"}
    for name, perplexities in table.items():
        for cell, sparsity in zip(perplexities, SPARSITIES[1:], strict=True):
            assert_rounded(cell, quality("quality.csv", name, "perplexity", sparsity, "ratio_to_dense"))


def test_needles_found_in_prefill() -> None:
    table = cells("docs/measurements.md", "| needles, blocks chosen by |")
    for name, (found, interval, read) in table.items():
        where = {"task": "needle", "method": METHODS[name][1], "setting": "sparsity 0.8"}
        shown = [found, *interval.split(" to "), read]
        for cell, column in zip(shown, ("score", "interval_low", "interval_high", "selectivity"), strict=True):
            assert_rounded(cell, 100 * value("needles.csv", column, **where))
    assert "Dense attention finds all." in prose("docs/measurements.md")
    assert value("needles.csv", "score", method="dense") == 1


def test_needles_by_probes() -> None:
    table = lines("docs/measurements.md", "| decoding by | probes of 64 buckets |")
    assert {name for name, *_ in table} == set(ROUTERS)
    for name, probes, found, read in table:
        setting = f"{probes} probe{'s' * (probes != '1')}"
        for cell, column in ((found, "score"), (read, "selectivity")):
            assert_rounded(cell, 100 * value("quality.csv", column, task="needle", method=ROUTERS[name], setting=setting))


ROUTERS_OF_RULER = {  # of the tables of RULER: method in the file
    "classifier, calibrated": "classifier, calibrated",
    "classifier": "classifier",
    "Quest pages": "Quest pages",
    "LSH": "LSH",
    "k-means of keys before RoPE": "k-means",
    "window of first and last keys": "sink and window",
    "random buckets": "random buckets",
}
KEYS = {  # the keys that are read, with the window (%)
    "3 % of far keys": (3.2, 3.4),
    "about 2 % of keys": (2.6, 3.3),
    "about 5 % of keys": (5.3, 6.2),
    "about 10 % of keys": (9.8, 10.9),
}


def ruler(column: str, **where: str) -> float:
    """Returns the mean of a column over the seeds of one method and setting, at 16,384 tokens."""
    found = [row for row in rows("ruler.csv") if row["length"] == "16384" and all(row[key] == x for key, x in where.items())]
    assert len(found) == len({row["seed"] for row in found}) > 0, where
    return sum(float(row[column]) for row in found) / len(found)


def assert_blocks(name: str, shown: list[str], dense_queries: str = "0") -> None:
    """Asserts a line of RULER's scores by sparsity; a name may end in a seed, else the seeds' mean is meant."""
    method, _, seed = name.partition(", seed ")
    where = {"select": "topk", "method": METHODS.get(method, ("", method))[1], "dense_queries": dense_queries}
    for cell, sparsity in zip(shown, SPARSITIES, strict=True):
        assert_rounded(cell, 100 * ruler("score", setting=f"sparsity {sparsity}", **where, **({"seed": seed} if seed else {})))


def test_answers_to_ruler_by_blocks() -> None:
    for name, *shown in lines("docs/measurements.md", "| blocks chosen by | 50 % sparse |", "### RULER"):
        assert_blocks(name, shown)
    for name, *shown in lines("docs/measurements.md", "| blocks chosen by, last 64 queries dense |"):
        assert_blocks(name, shown, dense_queries="64")
    assert f"dense attention {100 * ruler('score', method='dense'):.1f}" in prose("docs/results.md")


def settings(method: str) -> list[str]:
    """Returns the settings of a router, by the keys that it reads."""
    return [setting for setting in KEYS if ("far" in setting) == ("calibrated" in method)]


def test_answers_to_ruler_by_keys_of_each_seed() -> None:
    for name, *shown in lines("docs/measurements.md", "| new tokens read by | keys read (%) |"):
        router, _, seed = name.replace("the same", "classifier, calibrated").partition(", seed ")
        method, shown = ROUTERS_OF_RULER[router], list(filter(None, shown))
        for read, score, setting in zip(shown[::2], shown[1::2], settings(method), strict=True):
            assert_rounded(read, 100 * ruler("selectivity", method=method, setting=setting, seed=seed))
            assert_rounded(score, 100 * ruler("score", method=method, setting=setting, seed=seed))


def needles(method: str, setting: str) -> float:
    return 100 * value("quality.csv", "score", select="calibrated", task="needle", method=method, setting=setting)


def second_turn(method: str) -> float:
    return value("speed.csv", "score", method=method, length="131072", situation="8192 new after 122880")


METHODS_OF_SMOL = ("gate", "mean pooling", "vertical-slash")
DENSE_RULER = ("dense", "smollm2", "4096")


def test_the_figures_of_the_readme() -> None:
    """Those of the rows that come from the files; the others are results of ``bench``."""
    table = cells("README.md", "| measured | setting | result |")
    first_token = value("speed.csv", "times_flash", length="131072", situation="", setting="sparsity 0.95")
    long = value("decode.csv", "times_same cache and graphs", length="524288", batch="1", setting="32 probes")
    batch = value("decode.csv", "times_cuDNN", length="131072", batch="6", setting="32 probes")
    routed = {"method": "classifier, calibrated"}
    pages = ruler("score", method="Quest pages", setting="about 2 % of keys")
    perplexity = {name: float(public(name, "perplexity", "sparsity 0.8", "8192")["ratio_to_dense"]) for name in METHODS_OF_SMOL}
    answers = {name: 100 * float(public(name, "ruler", "sparsity 0.8", "4096")["score"]) for name in METHODS_OF_SMOL}
    (dense,) = [row for row in rows("public.csv") if (row["method"], row["model"], row["length"]) == DENSE_RULER]
    found = public("classifier, calibrated", "ruler", "3.5 % of far keys", "4096")
    other = public("Quest pages", "ruler", "4 probes", "4096")
    shown, read = (f"{100 * float(other[column]):.1f} %" for column in ("score", "selectivity"))
    pooled, quest = (
        f"mean pooling, untrained: {perplexity['mean pooling']:.3f} x",
        f"Quest's pages: {shown} with {read} of the keys",
    )
    others = f"dense: {100 * float(dense['score']):.1f} %, vertical-slash: {answers['vertical-slash']:.1f} %"
    of_routers = f"RULER's answers, calibrated query classifiers (Quest's pages: {100 * pages:.1f} % with 2.7 % of the keys)"
    expected = {
        f"Perplexity relative to dense, calibrated gates ({pooled})": perplexity["gate"],
        f"RULER's answers, calibrated gates ({others})": answers["gate"],
        f"RULER's answers, calibrated query classifiers ({quest})": 100 * float(found["score"]),
        of_routers: 100 * ruler("score", **routed),
        "A second turn of 8k tokens, speedup over dense attention": second_turn("dense, flash")
        / second_turn("gate, untrained"),
        "Time to first token, speedup over FlashAttention-2": first_token,
        "Tokens per second of `generate`, speedup over dense attention with the same cache and graphs": long,
        "Tokens per second of `generate`, speedup over a step with PyTorch's fastest kernel as a CUDA graph": batch,
    }
    for name, exact in expected.items():
        assert_rounded(table[name][1], exact)
    assert f"{100 * ruler('selectivity', **routed):.1f} % of keys read" in table[of_routers][0]


def test_the_figures_of_the_text() -> None:
    text = prose("docs/results.md")
    sparse, dense = second_turn("gate, untrained"), second_turn("dense, flash")
    assert f"take {sparse:.3f} s at 90 % sparsity, {dense:.3f} dense" in text

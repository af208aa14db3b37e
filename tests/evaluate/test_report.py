"""Confidence intervals, tables, figures and files of the report."""

import csv
import json
import mmap
import re
from dataclasses import asdict, replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from msattn.trainer.config import RULER_TASKS
from msattn.trainer.evaluate.intervals import mean_interval, stratified_interval, student_t, wilson
from msattn.trainer.evaluate.report import files as report
from msattn.trainer.evaluate.report import speed, style, tables
from msattn.trainer.evaluate.report.context import context
from msattn.trainer.evaluate.report.page import page
from msattn.trainer.evaluate.report.tables import leaderboard
from msattn.trainer.evaluate.row import WINDOW, EvalRow, Setting
from msattn.trainer.evaluate.tasks.timing import cost
from tests.evaluate.named import named
from tests.evaluate.runs import terminal

TWO_PROBES = Setting("probes", 2)


def perplexity_row(method: str, ratio: float, sparsity: float) -> EvalRow:
    extra = {
        "length": 4096,
        "bits_per_byte": 2.1 * ratio,
        "ratio_interval": [ratio - 0.01, ratio + 0.01],
    }
    extra |= {
        "kl_divergence": 0.0123,
        "kl_interval": [0.0119, 0.0127],
        "same_top": 0.951,
        "same_top_interval": [0.948, 0.954],
    }
    extra["losses"] = [ratio, 1.1 * ratio]
    setting = Setting() if method == "dense" else Setting("sparsity", sparsity)
    read = {
        "ratio_to_dense": ratio,
        "sparsity": sparsity,
        "selectivity": 1 - sparsity,
        "recall": 0.9,
    }
    figures = {
        "interval": (8.0, 12.0),
        **read,
        "latency_s": 0.25,
        "peak_memory_mb": 512.0,
        "samples": 16,
    }
    return EvalRow(
        "perplexity", named(method), setting, 9.0 * ratio, "perplexity", **figures, extra=extra
    )


def recall_row(method: str, score: float, selectivity: float) -> EvalRow:
    heads = [[score] * 4, [score - 0.1] * 4]
    extra = {
        "output_error": 1 - score,
        "layers": [0, 1],
        "heads": heads,
        "output_error_heads": heads,
    }
    figures = {"selectivity": selectivity, "samples": 2, "extra": extra}
    return EvalRow("recall", named(method), TWO_PROBES, score, "attention mass read", **figures)


def needle_row(method: str, found: int, length: int) -> EvalRow:
    answer = {
        "prompt": "The number of <b>it</b> is 42. … is",
        "expected": "42",
        "answer": "42",
        "correct": found > 0,
    }
    examples = [answer, answer | {"answer": "<script>alert(1)</script>", "correct": False}]
    extra = {
        "length": length,
        "by_depth": {"0": found / 20, "1": 1.0},
        "question": "sparse",
        "examples": examples,
    }
    extra |= {"correct": [number < found for number in range(20)]}
    setting = Setting() if method == "dense" else TWO_PROBES
    figures = {
        "ratio_to_dense": found / 20,
        "selectivity": 0.1,
        "latency_s": 2.0,
        "samples": 20,
        "extra": extra,
    }
    return EvalRow(
        "needle",
        named(method),
        setting,
        found / 20,
        "needles found",
        interval=wilson(found, 20),
        **figures,
    )


def test_rulers_scores_in_the_layout_of_a_leaderboard() -> None:
    """The best method first after dense attention; settings without a share of their own follow in
    columns of their own.
    """
    found = [
        EvalRow(
            "ruler",
            named(method),
            setting,
            score,
            "average",
            selectivity=read,
            samples=40,
            extra={"length": length},
        )
        for method, setting, score, read, length in (
            ("dense", Setting(), 0.35, 1.0, 4096),
            *(
                ("classifier", Setting("probes", probes), 0.1, 0.04, 4096)
                for probes in (2, 4, 8, 16)
            ),
            ("Quest pages", Setting("about keys", 0.125), 0.2, 0.13, 4096),
            ("gate", Setting("sparsity", 0.875), 0.3, 0.21, 4096),
            ("gate", Setting("sparsity", 0.5), 0.345, 0.52, 4096),
            ("classifier", Setting("far keys", 0.5), 0.32, 0.51, 4096),
            ("dense", Setting(), 0.3, 1.0, 8192),
        )
    ]
    first, second = leaderboard(found).split("RULER, ")[1:]
    assert first.splitlines() == [
        "40 prompts of 4,096 tokens: score (keys read), both in %, by the share left out",
        "",
        "| method | 0 % | 50 % | 87.5 % | 2 probes | 4 probes | 8 probes | 16 probes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| {named('dense').label} | 35.0 (100.0) |  |  |  |  |  |  |",
        f"| {named('gate').label} |  | 34.5 (52.0) | 30.0 (21.0) |  |  |  |  |",
        f"| {named('Quest pages').label} |  |  | 20.0 (13.0) |  |  |  |  |",
        f"| {named('classifier').label} |  | 32.0 (51.0) |  | 10.0 (4.0) | 10.0 (4.0) | 10.0 "
        f"(4.0) | 10.0 (4.0) |",
        "",
    ]
    assert second.startswith("40 prompts of 8,192 tokens")


@pytest.fixture(scope="module")
def rows() -> list[EvalRow]:
    return [
        perplexity_row("dense", 1.0, 0.0),
        perplexity_row("gate", 1.004, 0.5),
        perplexity_row("gate", 1.03, 0.9),
        perplexity_row("random", 40.0, 0.9),
        recall_row(WINDOW, 0.4, 0.06),
        recall_row("classifier", 0.9, 0.11),
        needle_row("dense", 20, 2048),
        needle_row("classifier", 19, 2048),
        needle_row("dense", 20, 4096),
        needle_row("classifier", 0, 4096),
    ]


@pytest.fixture(scope="module")
def about() -> report.Context:
    manifest = {
        "path": "outputs/tiny/base/gate",
        "content_hash": "f" * 64,
        "created": "2026-11-20",
        "model": {"id": "x"},
    }
    return context(
        "A <title>", {"seed": 7}, {"gate": manifest}, ["No qmodel here."], torch.device("cpu")
    )


def test_stratified_intervals_cover_the_mean() -> None:
    draw = np.random.default_rng(0)
    shares = [0.2, 0.5, 0.9]
    covered = 0
    for _ in range(400):
        bounds = stratified_interval(
            [draw.binomial(1, share, size=40).tolist() for share in shares]
        )
        assert bounds is not None
        covered += bounds[0] <= sum(shares) / 3 <= bounds[1]
    assert 0.92 < covered / 400 < 0.98
    assert stratified_interval([[1.0, 1.0], [0.0, 0.0]]) == (0.5, 0.5)
    assert stratified_interval([[1.0, 1.0], [0.0]]) is None


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    published = (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    )
    for found, trials, low, high in published:
        assert wilson(found, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(20, 20)[1] == 1.0
    with pytest.raises(ValueError, match="successes=3"):
        wilson(3, 2)


def test_mean_intervals_use_students_t() -> None:
    for degrees, exact in (
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (5, 2.5706),
        (10, 2.2281),
        (30, 2.0423),
    ):
        assert student_t(degrees) == pytest.approx(exact, rel=0.01)
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0]) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(2.5)
    assert high - low == pytest.approx(2 * 3.1824 * 1.29099 / 2, rel=0.01)
    assert mean_interval([1.0]) is None


def test_cost_measures_memory_and_time() -> None:
    with cost(torch.device("cpu")) as before:
        pass
    with cost(torch.device("cpu")) as spent:
        # torch.empty may reuse freed memory
        torch.frombuffer(mmap.mmap(-1, 2**28), dtype=torch.uint8).fill_(1)
    assert spent.seconds > 0
    assert spent.peak_mb > before.peak_mb + 150


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[EvalRow], about: report.Context
) -> tuple[Path, list[str]]:
    """The folder of a report, and the names of its figures."""
    folder = tmp_path_factory.mktemp("report")
    return folder, list(report.write(folder, rows, about))


def test_all_files_are_written(written: tuple[Path, list[str]], rows: list[EvalRow]) -> None:
    tmp_path, names = written
    figures = {name: tmp_path / f"{name}.png" for name in names}
    assert names == ["tradeoff", "perplexity", "recall", "recall_heads", "needle", "needle_grid"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.values())
    assert all(
        path.with_suffix(".svg").read_text().startswith("<?xml") for path in figures.values()
    )
    clips = [
        set(re.findall(r'<clipPath id="(.*?)"', (tmp_path / f"{name}.svg").read_text()))
        for name in ("tradeoff", "perplexity")
    ]
    assert clips[0].isdisjoint(clips[1]), "a browser takes the first of two elements with one id"

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["artifacts"]["gate"] == {
        "path": "outputs/tiny/base/gate",
        "content_hash": "f" * 64,
        "created": "2026-11-20",
    }
    assert torch.__version__.startswith(results["versions"]["torch"])
    assert results["machine"]["device"] == "cpu"
    assert [row["score"] for row in results["rows"]] == [row.score for row in rows]

    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == [str(row.method) for row in rows]
    assert "examples" not in lines[0]
    assert float(lines[1]["bits_per_byte"]) == rows[1].extra["bits_per_byte"]
    assert float(lines[1]["interval_low"]) == 8.0
    ratio = float(lines[1]["ratio_to_dense"])
    assert [float(lines[1][f"ratio_{end}"]) for end in ("low", "high")] == [
        ratio - 0.01,
        ratio + 0.01,
    ]
    assert lines[4]["interval_low"] == ""


def test_page_is_self_contained_and_well_formed(written: tuple[Path, list[str]]) -> None:
    opened: list[str] = []
    sources: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                opened.append(tag)
            sources.extend(
                value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
            )

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    page = (written[0] / "report.html").read_text()
    Check().feed(page)
    assert not opened
    assert page.count("<svg") == 6
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert "A &lt;title&gt;" in page
    assert "No qmodel here." in page
    assert "f" * 16 in page


def test_figures_without_data_are_left_out(
    tmp_path: Path, rows: list[EvalRow], about: report.Context
) -> None:
    assert list(report.write(tmp_path, rows[:2], about)) == ["tradeoff", "perplexity"]
    assert report.write(tmp_path, rows[:1], about) == {}  # dense alone is a number, not a curve


def test_answers_are_escaped_and_marked(rows: list[EvalRow], about: report.Context) -> None:
    text = page(rows, asdict(about), {})
    assert "✗ &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text
    assert "The number of &lt;b&gt;it&lt;/b&gt; is <mark>42</mark>." in text
    assert "✓ 42" in text
    own = {"prompt": "What's 20 & 7? It is 2", "expected": "2", "answer": "2", "correct": True}
    row = EvalRow("prompts", named("dense"), Setting(), 1.0, "answers", extra={"examples": [own]})
    text = page([row], asdict(about), {})
    assert "What&#39;s <mark>2</mark>0 &amp; 7? It is <mark>2</mark>" in text, (
        "marked in the text, not in its escapes"
    )


def speed_rows() -> list[EvalRow]:
    """Times to the first token and rates of decoding at two lengths, also in chunks and with two
    batches.
    """
    rows = []
    for length in (1024, 4096):
        for method, setting, seconds in (
            ("dense, cuDNN", "", 2.0),
            ("dense, flash", "", 1.0),
            ("gate", "sparsity 0.9", 0.5),
        ):
            for situation in ("", "chunks of 512"):
                shares = {
                    "selection_share": 0.1,
                    "attention_share": 0.2,
                    "selection_s": 0.1,
                    "attention_s": 0.2,
                }
                extra = {
                    "length": length,
                    "situation": situation,
                    "break_even": None,
                    "times_flash": 1 / seconds,
                    **shares,
                }
                label = ", ".join(filter(None, (setting, situation)))
                timed = {
                    "ratio_to_dense": seconds,
                    "selectivity": 0.1,
                    "samples": 1,
                    "latency_s": seconds,
                }
                rows.append(
                    EvalRow(
                        "latency",
                        named(method),
                        Setting(label),
                        seconds,
                        "seconds",
                        extra=extra,
                        **timed,
                    )
                )
        for batch in (1, 16):
            for method, by, rate in (
                ("dense, transformers", "generate", 20.0),
                ("dense, cuDNN", "CUDA graph", 70.0),
                ("dense, flash", "CUDA graph", 80.0),
                ("dense, same cache and graphs", "generate", 75.0),
                ("classifier", "generate", 110.0),
            ):
                speedups = {
                    "times_transformers": rate / 20,
                    "times_same cache and graphs": rate / 75,
                }
                extra = {"length": length, "batch": batch, "launched_by": by, **speedups}
                setting = TWO_PROBES if method == "classifier" else Setting()
                rows.append(
                    EvalRow(
                        "decoding",
                        named(method),
                        setting,
                        batch * rate,
                        "tokens a second",
                        samples=4,
                        extra=extra,
                    )
                )
    return rows


def test_speed_by_length_is_of_one_prompt() -> None:
    figure = speed.speed(speed_rows())
    assert figure is not None
    prompts, decoded = figure.axes
    assert {line.get_label(): list(line.get_ydata()) for line in prompts.lines} == {
        "dense, fastest kernel": [1.0, 1.0], "gate, sparsity 0.9": [0.5, 0.5]
    }  # fmt: skip
    assert {line.get_label(): list(line.get_ydata()) for line in decoded.lines} == {
        "dense, transformers": [20.0, 20.0],
        "dense, same cache and graphs": [75.0, 75.0],
        "dense, fastest kernel (CUDA graph)": [80.0, 80.0],
        "classifier, 2 probes": [110.0, 110.0],
    }
    assert [text.get_text() for text in decoded.get_xticklabels()] == ["1k", "4k"]
    alone = speed.speed([row for row in speed_rows() if row.task == "decoding"])
    assert alone is not None
    assert len(alone.axes) == 1
    assert speed.speed([]) is None


@pytest.mark.parametrize("rises", [[0.1, 3.0, 3900.0], [-1.0, -0.5], [5.0, 80.0]])
def test_perplexity_axis_shows_zero_and_every_value_within_its_limits(rises: list[float]) -> None:
    _, (axes,) = style.subplots(1, 1, (4, 4))
    style.perplexity_axis(axes, rises)
    low, high = axes.get_ylim()
    assert low < min(0.0, *rises)
    assert (
        max(0.0, *(rise for rise in rises if rise < style.HIGHEST_RISE))
        < high
        <= style.HIGHEST_RISE
    )
    shown = [text.get_text() for text in axes.texts]
    assert shown == (["▲ 1 beyond, up to 3,900 %"] if 3900.0 in rises else [])


def test_a_terminal_of_80_columns_cuts_no_number(rows: list[EvalRow]) -> None:
    """Long prompts, large batches and long names: text wraps, numbers do not."""
    both = Setting("sparsity 0.9, 5 % of far keys")
    names = ("dense, same cache and graphs", "gate and classifier (embedded), calibrated")
    long = [
        replace(row, extra=row.extra | {"length": 131072})
        for row in (*rows, *speed_rows())
        if "length" in row.extra
    ]
    shares = {"ratio_interval": [0.9, 1.1], **dict.fromkeys(RULER_TASKS, 0.3)}
    rates = {
        "batch": 64,
        "first_token_p50_s": 123.45,
        "first_token_p99_s": 223.45,
        "times_same cache and graphs": 3.45,
    }
    for name in names:
        extra = {"length": 131072, **shares, **rates}
        figures = {"ratio_to_dense": 0.912, "selectivity": 0.123, "samples": 132, "extra": extra}
        for task, score in (("ruler", 0.345), ("throughput", 1234.5)):
            long.append(
                EvalRow(task, named(name), both, score, "score", interval=(0.3, 0.4), **figures)
            )
    long += [
        replace(row, task="documents", method=row.method.of("calibrated", source="embedded"))
        for row in long[:3]
    ]
    text = terminal(partial(tables.show, long, []))
    assert "…" not in text
    for number in ("131,072", "123.45 s", "34.5%", "0.912", "0.0123", "1.0300", "1234", "1760"):
        assert number in text


def test_many_sparse_lines_become_one_of_each_method() -> None:
    own = [
        (0.5, "sparsity 0.5"),
        (0.1, "sparsity 0.9"),
        (0.05, "sparsity 0.95"),
        (0.2, "sparsity 0.8"),
    ]
    rows = [
        EvalRow(
            "latency",
            named(method),
            Setting(setting),
            1.0,
            "seconds",
            selectivity=reads,
            extra={"length": 64},
        )
        for method in ("gate", "quest")
        for reads, setting in own
    ]
    assert [(str(row.method), str(row.setting)) for row in style.few_lines(rows, 6)] == [
        ("gate", "sparsity 0.95"), ("quest", "sparsity 0.95")
    ]  # fmt: skip
    assert len(style.few_lines(rows[:4], 6)) == 4

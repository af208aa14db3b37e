"""Comparison of two evaluations: scores, settings that differ, and folders that are refused."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.report import compare
from msattn.trainer.evaluate.report import files as report
from msattn.trainer.evaluate.report.context import Context, context
from msattn.trainer.evaluate.report.page import page
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.storage.documents import finite
from tests.evaluate.named import named
from tests.evaluate.runs import terminal


def needle(method: str, score: float) -> EvalRow:
    setting = Setting() if method == "dense" else Setting("sparsity", 0.9)
    extra = {
        "length": 96,
        "by_depth": {"0": score},
        "correct": [number < 10 * score for number in range(10)],
    }
    return EvalRow(
        "needle",
        named(method),
        setting,
        score,
        "needles found",
        ratio_to_dense=score,
        selectivity=0.1,
        extra=extra,
    )


ROWS = [needle("dense", 1.0), needle("gate", 0.9), needle("quest", 0.8)]


def about(seed: int) -> Context:
    return context(
        "title",
        {"seed": seed, "eval": {"tasks": ["needle"]}, "compare": None},
        {},
        [],
        torch.device("cpu"),
    )


@pytest.fixture
def earlier(tmp_path: Path) -> str:
    """The folder of an evaluation in which the gate found half of the needles."""
    folder = tmp_path / "<eval>"
    folder.mkdir()
    document = asdict(about(1)) | {
        "rows": [ROWS[0].plain(), replace(ROWS[1], score=0.5).plain(), ROWS[2].plain()]
    }
    (folder / "results.json").write_text(json.dumps(finite(document)))
    return str(folder)


def test_scores_and_differing_settings(earlier: str) -> None:
    here = [
        *ROWS,
        EvalRow("perplexity", named("dense"), Setting(), 4.0, "perplexity", extra={"length": 96}),
    ]
    found = compare.compare(earlier, here, asdict(about(2)), compare.read_results(earlier))
    assert found.settings == {"seed": ("2", "1")}
    assert found.unmatched == 1
    assert [list(each.cells().values()) for each in found.main()] == [
        ["needle, 96", "dense", "", "100.0%", "100.0%", "+0.0 points"],
        ["needle, 96", "gate", "sparsity 0.9", "90.0%", "50.0%", "+40.0 points"],
    ]
    shown = terminal(partial(compare.show, found))
    assert "+40.0 points" in shown
    assert "seed: 2 here, 1 there" in shown
    text = page(ROWS, asdict(about(2)), {}, found)
    assert "&lt;eval&gt; of" in text
    assert text.index("Compared with") < text.index("Needles in a haystack")
    assert "Other methods (1 rows)" in text


def test_batches_are_compared_apart(earlier: str) -> None:
    def decoded(batch: int, score: float) -> EvalRow:
        extra = {"length": 4096, "batch": batch, "launched_by": "generate"}
        return EvalRow(
            "decoding",
            named("classifier"),
            Setting("probes", 2),
            score,
            "tokens a second",
            extra=extra,
        )

    here = [decoded(1, 10.0), decoded(6, 50.0)]
    there = compare.read_results(earlier) | {
        "rows": [decoded(6, 40.0).plain(), decoded(1, 8.0).plain()]
    }
    found = compare.compare(earlier, here, asdict(about(2)), there)
    assert [(each.cells()["task"], each.cells()["difference"]) for each in found.rows] == [
        ("decoding, 4,096", "+25.0 %"), ("decoding, 4,096, batch 6", "+25.0 %")
    ]  # fmt: skip


def test_a_table_of_all_evaluations_of_a_sweep(
    earlier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name / "eval" for name in ("one", "two")]
    for folder, score in zip(folders, (0.9, 0.7), strict=True):
        folder.mkdir(parents=True)
        report.write(folder, [ROWS[0], replace(ROWS[1], score=score), ROWS[2]], about(1))
    assert compare.tabulate(folders) == tmp_path / "sweep.csv"
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("gate", "90.0%", "70.0%"))
    assert "quest" not in shown, "only trained methods"
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 2 * 3
    assert compare.tabulate(folders[:1] * 2) is None


@pytest.mark.parametrize(
    ("task", "difference"),
    [("perplexity", "-1.000"), ("latency", "-25.0 %"), ("decoding", "-25.0 %")],
)
def test_differences_have_the_units_of_their_task(task: str, difference: str) -> None:
    row = EvalRow(task, named("gate"), Setting(), 3.0, "score")
    assert compare.ComparedRow(row, 4.0).cells()["difference"] == difference


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"rows": []}', '{"rows": [{"task": "needle"}]}']
)
def test_other_folders_are_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(
        UserError, match=r"^compare=.*expected the folder of an earlier msattn eval"
    ) as caught:
        compare.read_results(str(tmp_path))
    assert "\n" not in str(caught.value)

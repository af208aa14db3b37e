"""The verdict's table and sentence, for evaluations with and without trained methods."""

from functools import partial
from typing import Any

from msattn.trainer.evaluate.report.verdict import sentences, show, verdict
from msattn.trainer.evaluate.row import WINDOW, EvalRow, Setting
from msattn.trainer.methods.base import Method
from tests.evaluate.named import named
from tests.evaluate.runs import terminal


def row(
    task: str, method: str | Method, setting: str, score: float, keys: float, **others: Any
) -> EvalRow:
    routed = "probe" in setting or "keys" in setting
    values = {
        "ratio_to_dense": score,
        "sparsity": None if routed else 1 - keys,
        "selectivity": keys,
        "samples": 10,
    }
    extra = {"length": 4096, **others.pop("extra", {})}
    return EvalRow(
        task, named(method), Setting(setting), score, task, **(values | others), extra=extra
    )


def needle(
    method: str | Method, setting: str, found: int, keys: float, length: int = 4096, **others: Any
) -> EvalRow:
    """A row of ten prompts, of which the first ``found`` are answered."""
    extra = {"correct": [number < found for number in range(10)], "length": length}
    return row("needle", method, setting, found / 10, keys, extra=extra, **others)


def perplexity(method: str, ratio: float, keys: float, losses: list[float]) -> EvalRow:
    return row("perplexity", method, "sparsity 0.9", ratio, keys, extra={"losses": losses})


PREFILL = [
    needle("dense", "", 10, 1.0),
    needle("gate", "sparsity 0.8", 10, 0.2),
    needle("gate", "sparsity 0.9", 9, 0.1),
    needle("gate, top-k", "sparsity 0.9", 5, 0.1),
    needle("gate (embedded)", "sparsity 0.9", 10, 0.1),
    needle("oracle", "sparsity 0.9", 10, 0.1),
    needle("random", "sparsity 0.9", 3, 0.1),
    needle("quest", "sparsity 0.9", 9, 0.12),
    perplexity("gate", 1.034, 0.1, [2.0, 3.0, 4.0]),
    perplexity("quest", 1.074, 0.1, [2.04, 3.05, 4.03]),
    perplexity("random", 1.8, 0.1, [3.0, 4.0, 5.0]),
]
DECODING = [
    needle(WINDOW, "0 probes", 2, 0.06),
    needle("classifier", "2 probes", 9, 0.11),
    needle("classifier", "4 probes", 10, 0.2),
    needle("k-means", "2 probes", 3, 0.11),
]


def test_the_best_methods_of_both_kinds_and_ties() -> None:
    """One prompt of ten is a tie; the differences of each chunk are nearly the same, so a small one
    counts.
    """
    lines = verdict(PREFILL + DECODING)
    assert {line.cells["quality"]: (*line.cells.values(),)[1:] for line in lines} == {
        "perplexity above dense (prefill), sparsity 0.9": ("gate: +3.4%", "Quest bounds: "
        "+7.4%", "-3.9%", "-6.3% to -1.5%"),
        "needles found (prefill), sparsity 0.9": (
            "gate (embedded): 100.0%", "Quest bounds: 90.0% (12.0% of keys)", "+10.0%",
            "-19.6% to +36.2%",
        ),
        "needles found (decoding), 2 probes": ("classifier: 90.0%", "k-means: 30.0%", "+60.0%",
            "+13.5% to +86.5%"),
    }  # fmt: skip
    assert [line.outcome for line in lines] == [1, 0, 1]
    (sentence,) = sentences([], lines)
    assert (
        "wins on perplexity above dense (prefill) and needles found (decoding); ties (" in sentence
    )
    text = terminal(partial(show, PREFILL + DECODING))
    assert "…" not in text
    assert all(
        number in text
        for number in ("+3.4%", "-3.9%", "-6.3% to -1.5%", "100.0%", "-19.6% to +36.2%")
    )


def test_other_scores_of_the_served_gate_are_comparisons() -> None:
    """The first rows of a gate are those of the scores that are served; better ones of its other
    scores do not win.
    """
    both = [
        needle("gate_question", "sparsity 0.9", 8, 0.1),
        needle("gate", "sparsity 0.9", 10, 0.1),
    ]
    quest = needle("quest", "sparsity 0.9", 2, 0.1)
    for rows, best in (
        (both, "gate and question: 80.0%"),
        (both[::-1], "gate: 100.0%"),
        (both[1:], "gate: 100.0%"),
    ):
        (line,) = verdict([*rows, quest])
        assert line.cells["best trained"] == best


def test_scores_of_the_same_samples_are_compared_in_pairs() -> None:
    def ruler(method: str, scores: list[float]) -> EvalRow:
        return row(
            "ruler",
            method,
            "sparsity 0.9",
            sum(scores) / 4,
            0.1,
            extra={"scores": {"vt": scores, "cwe": scores}},
        )

    gate = ruler("gate", [0.9, 0.1, 0.8, 0.2])
    for one, other, outcome in (
        (gate, ruler("quest", [0.8, 0.0, 0.7, 0.0]), 1),
        (gate, ruler("quest", [1.0, 0.0, 0.2, 0.4]), 0),
        (perplexity("gate", 1.02, 0.5, [2.0, 3.0]), perplexity("quest", 1.01, 0.5, [1.9, 2.9]), -1),
        # a single sample
        (perplexity("gate", 1.02, 0.5, [2.0]), perplexity("quest", 1.9, 0.5, [3.0]), None),
    ):
        (line,) = verdict([one, other])
        assert line.outcome == outcome


def test_methods_are_compared_where_they_read_about_as_much() -> None:
    """Settings of calibrated classifiers are shares of the keys, which no other method has."""
    (line,) = verdict(
        [needle("gate", "sparsity 0.9", 5, 0.1), needle("quest", "threshold 0.01", 10, 0.3)]
    )
    assert line.cells["best untrained"] == "none"
    shares = [needle("classifier, calibrated", f"{share} % of far keys", found, keys)
              for share, found, keys in ((1, 8, 0.07), (5, 10, 0.12), (20, 10, 0.26))]  # fmt: skip
    (line,) = verdict(DECODING + shares)
    assert line.cells["best trained"] == "classifier, calibrated: 100.0%"
    (line, other) = verdict([each for each in PREFILL if each.method.name != "gate"])
    assert (line.cells["best trained"], line.cells["best untrained"]) == (
        "none",
        "Quest bounds: +7.4%",
    )
    assert other.outcome is None


def test_dense_attention_that_finds_nothing_judges_nothing() -> None:
    lost = [needle("dense", "", 0, 1.0, ratio_to_dense=1.0)]
    lost += [
        needle(name, "sparsity 0.9", 0, 0.1, ratio_to_dense=None) for name in ("gate", "quest")
    ]
    assert verdict(lost) == []
    assert sentences(lost, []) == [
        "needle, 4,096 tokens: dense attention finds nothing, so this task is not judged."
    ]
    longer = needle("gate", "sparsity 0.9", 0, 0.1, length=32768, ratio_to_dense=None)
    (line,) = verdict([needle("gate", "sparsity 0.9", 9, 0.1), longer])
    assert line.cells["best trained"] == "gate: 90.0%"
    assert verdict([needle("dense", "", 10, 1.0)]) == []

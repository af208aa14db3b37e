"""The verdict's table and sentences, for evaluations with and without trained methods."""

from typing import Any

import pytest
from rich.console import Console

from msattn.trainer.evaluate.report.verdict import Verdict, show, verdict
from msattn.trainer.evaluate.row import WINDOW, EvalRow
from tests.evaluate.named import named


def row(task: str, method: str, setting: str, score: float, keys: float, **others: Any) -> EvalRow:
    routed = "probe" in setting or "keys" in setting
    values = {"ratio_to_dense": score, "sparsity": None if routed else 1 - keys, "selectivity": keys, "samples": 10}
    extra = {"length": 4096, **others.pop("extra", {})}
    return EvalRow(task, named(method), setting, score, task, **(values | others), extra=extra)


def needle(method: str, setting: str, found: int, keys: float, **others: Any) -> EvalRow:
    """A row of ten prompts, of which the first ``found`` are answered."""
    extra = {"correct": [number < found for number in range(10)], **others.pop("extra", {})}
    return row("needle", method, setting, found / 10, keys, extra=extra, **others)


def perplexity(method: str, setting: str, ratio: float, keys: float, losses: list[float], **others: Any) -> EvalRow:
    return row("perplexity", method, setting, ratio, keys, extra={"losses": losses, **others.pop("extra", {})}, **others)


PREFILL = [
    needle("dense", "", 10, 1.0),
    needle("gate", "sparsity 0.8", 10, 0.2),
    needle("gate", "sparsity 0.9", 9, 0.1),
    needle("gate, top-k", "sparsity 0.9", 5, 0.1),
    needle("gate (embedded)", "sparsity 0.9", 10, 0.1),
    needle("oracle", "sparsity 0.9", 10, 0.1),
    needle("random", "sparsity 0.9", 3, 0.1),
    needle("quest", "sparsity 0.9", 9, 0.12),
    perplexity("gate", "sparsity 0.9", 1.034, 0.1, [2.0, 3.0, 4.0]),
    perplexity("quest", "sparsity 0.9", 1.074, 0.1, [2.04, 3.05, 4.03]),
    perplexity("random", "sparsity 0.9", 1.8, 0.1, [3.0, 4.0, 5.0]),
]
DECODING = [
    needle(WINDOW, "0 probes", 2, 0.06),
    needle("classifier", "2 probes", 9, 0.11),
    needle("classifier", "4 probes", 10, 0.2),
    needle("k-means", "2 probes", 3, 0.11),
]


def by_quality(found: Verdict) -> dict[str, tuple[str, ...]]:
    return {line.cells["quality"]: (*line.cells.values(),)[1:] for line in found.lines}


def test_the_best_methods_of_both_kinds_and_ties() -> None:
    """One prompt of ten is a tie; the differences of each chunk are nearly the same, so a small one counts."""
    found = verdict(PREFILL + DECODING)
    assert by_quality(found) == {
        "perplexity above dense (prefill), sparsity 0.9": ("gate: +3.4%", "Quest bounds: +7.4%", "-3.9%", "-6.3% to -1.5%"),
        "needles found (prefill), sparsity 0.9": (
            "gate (embedded): 100.0%", "Quest bounds: 90.0% (12.0% of keys)", "+10.0%", "-19.6% to +36.2%",
        ),
        "needles found (decoding), 2 probes": ("classifier: 90.0%", "k-means: 30.0%", "+60.0%", "+13.5% to +86.5%"),
    }  # fmt: skip
    assert found.sentences == [
        "Against the best method without training, the best trained one wins in perplexity above dense (prefill) and needles "
        "found (decoding); ties (the interval includes 0) in needles found (prefill)."
    ]


def test_a_training_free_method_that_is_better_wins() -> None:
    rows = [
        perplexity("gate", "sparsity 0.5", 1.02, 0.5, [2.0, 3.0]),
        perplexity("quest", "sparsity 0.5", 1.01, 0.5, [1.9, 2.9]),
    ]
    assert verdict(rows).sentences == [
        "Against the best method without training, the best trained one loses in perplexity above dense (prefill)."
    ]


def test_a_single_sample_claims_nothing() -> None:
    rows = [perplexity(name, "sparsity 0.5", ratio, 0.5, [ratio]) for name, ratio in (("gate", 1.02), ("quest", 1.9))]
    (line,) = verdict(rows).lines
    assert line.cells["95 % interval"] == "one sample"
    assert verdict(rows).sentences == []


def test_methods_that_read_many_more_keys_are_not_compared() -> None:
    rows = [needle("gate", "sparsity 0.9", 5, 0.1), needle("quest", "threshold 0.01", 10, 0.3)]
    (line,) = verdict(rows).lines
    assert line.cells["best untrained"] == "none"


def test_calibrated_classifiers_are_compared_where_they_read_as_much() -> None:
    """Their settings are shares of the keys, which no other method has."""
    shares = [needle("classifier, calibrated", f"{share} % of far keys", found, keys)
              for share, found, keys in ((1, 8, 0.07), (5, 10, 0.12), (20, 10, 0.26))]  # fmt: skip
    (line,) = verdict(DECODING + shares).lines
    assert line.cells["best trained"] == "classifier, calibrated: 100.0%"


def test_no_trained_gate() -> None:
    (line, other) = verdict([each for each in PREFILL if each.method.name != "gate"]).lines
    assert (line.cells["best trained"], line.cells["best untrained"]) == ("none", "Quest bounds: +7.4%")
    assert other.outcome is None


def test_dense_attention_that_finds_nothing_judges_nothing() -> None:
    lost = [needle("dense", "", 0, 1.0, ratio_to_dense=1.0), needle("gate", "sparsity 0.9", 0, 0.1, ratio_to_dense=None)]
    lost.append(needle("quest", "sparsity 0.9", 0, 0.1, ratio_to_dense=None))
    found = verdict(lost)
    assert found.lines == []
    assert found.sentences == ["needle, 4,096 tokens: dense finds nothing; this task says nothing here."]


def test_needles_of_one_length_that_dense_attention_misses_are_left_out() -> None:
    rows = [needle("gate", "sparsity 0.9", 9, 0.1)]
    rows.append(needle("gate", "sparsity 0.9", 0, 0.1, ratio_to_dense=None, extra={"length": 32768}))
    (line,) = verdict(rows).lines
    assert line.cells["best trained"] == "gate: 90.0%"


def test_scores_of_the_same_prompts_are_compared_in_pairs() -> None:
    def ruler(method: str, scores: list[float]) -> EvalRow:
        return row("ruler", method, "sparsity 0.9", sum(scores) / 4, 0.1, extra={"scores": {"vt": scores, "cwe": scores}})

    gate = ruler("gate", [0.9, 0.1, 0.8, 0.2])
    assert [line.outcome for line in verdict([gate, ruler("quest", [0.8, 0.0, 0.7, 0.0])]).lines] == [1]
    assert [line.outcome for line in verdict([gate, ruler("quest", [1.0, 0.0, 0.2, 0.4])]).lines] == [0]


@pytest.mark.parametrize(
    ("ratio", "machine", "expected"),
    [
        (1.6, "cpu", "On this CPU, whose times say nothing about GPUs, a prefill of 4,096 tokens with gate (sparsity 0.9) "
            "takes 1.6 times as long as with dense attention."),
        (0.25, "cuda", "A prefill of 4,096 tokens with gate (sparsity 0.9) is 4 times as fast as with dense attention."),
        (1.01, "cuda", "A prefill of 4,096 tokens with gate (sparsity 0.9) takes as long as with dense attention."),
    ],
)  # fmt: skip
def test_speed(ratio: float, machine: str, expected: str) -> None:
    extra = {"device": machine}
    dense = perplexity("dense", "", 1.0, 1.0, [2.0], latency_s=2.0, extra=extra)
    gate = perplexity("gate", "sparsity 0.9", 1.0, 0.1, [2.0], latency_s=2.0 * ratio, extra=extra)
    assert verdict([dense, gate]).sentences == [expected]


def test_speed_is_that_of_one_prompt() -> None:
    latencies = {"latency_s": 2.0, "ratio_to_dense": 1.0}
    decoded = {"ratio_to_dense": 4.0, "latency_s": 0.02, "extra": {"batch": 8, "length": 8192}}
    rows = [
        row("latency", "dense, SDPA", "", 2.0, 1.0, **latencies),
        row("latency", "gate", "sparsity 0.9", 1.0, 0.1, **latencies | {"latency_s": 1.0}),
        row("latency", "dense, SDPA", "64 new after 4032", 0.1, 1.0, latency_s=0.1, extra={"situation": "64 new after 4032"}),
        row("latency", "gate", "sparsity 0.9, 64 new", 0.2, 0.05, latency_s=0.2, extra={"situation": "64 new after 4032"}),
        row("decoding", "classifier", "2 probes", 90.0, 0.1, ratio_to_dense=0.5, latency_s=0.01, extra={"batch": 1}),
        row("decoding", "classifier", "2 probes", 400.0, 0.1, **decoded),
    ]
    assert verdict(rows).sentences == [
        "A prefill of 4,096 tokens with gate (sparsity 0.9) is 2 times as fast as with dense attention; a decoded token "
        "after 4,096 keys with classifier (2 probes) takes 2 times as long as with dense attention."
    ]
    assert verdict(rows[-1:]) == Verdict([], [])


def test_the_time_of_prompts_is_no_prefill() -> None:
    timed = [row("prompts", "dense", "", 1.0, 1.0, latency_s=1.0)]
    timed.append(row("prompts", "gate", "sparsity 0.9", 1.0, 0.1, latency_s=2.0, extra={"correct": [True]}))
    assert verdict(timed).sentences == []


def test_dense_attention_alone_has_no_verdict() -> None:
    assert verdict([needle("dense", "", 10, 1.0)]) == Verdict([], [])
    assert verdict([]) == Verdict([], [])


def test_a_terminal_of_80_columns_shows_every_number() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(verdict(PREFILL + DECODING), console)
    text = console.export_text()
    for number in ("+3.4%", "+7.4%", "-3.9%", "-6.3% to -1.5%", "100.0%", "90.0%", "-19.6% to +36.2%"):
        assert number in text
    assert "…" not in text

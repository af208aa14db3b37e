"""The verdict's sentences, word by word, for evaluations with and without trained methods."""

from typing import Any

import pytest

from msattn.trainer.evaluate.report.verdict import verdict
from msattn.trainer.evaluate.row import WINDOW, EvalRow


def row(task: str, method: str, setting: str, score: float, keys: float, **others: Any) -> EvalRow:
    routed = "probe" in setting
    values = {"ratio_to_dense": score, "sparsity": None if routed else 1 - keys, "selectivity": keys, "samples": 10}
    extra = {"length": 4096, **others.pop("extra", {})}
    return EvalRow(task, method, setting, score, task, **(values | others), extra=extra)


def needle(method: str, setting: str, found: float, keys: float, **others: Any) -> EvalRow:
    return row("needle", method, setting, found, keys, **others)


def perplexity(method: str, setting: str, ratio: float, keys: float, **others: Any) -> EvalRow:
    return row("perplexity", method, setting, ratio, keys, **others)


PREFILL = [
    needle("dense", "", 1.0, 1.0),
    needle("gate", "sparsity 0.8", 1.0, 0.2),
    needle("gate", "sparsity 0.9", 0.98, 0.1),
    needle("gate, top-k", "sparsity 0.9", 0.5, 0.1),
    needle("oracle", "sparsity 0.9", 1.0, 0.1),
    needle("random", "sparsity 0.9", 0.3, 0.1),
    needle("mean_pool", "sparsity 0.9", 0.6, 0.1),
    needle("quest", "sparsity 0.9", 1.0, 0.1),
    perplexity("gate", "sparsity 0.9", 1.034, 0.1),
    perplexity("quest", "sparsity 0.9", 1.041, 0.1),
    perplexity("random", "sparsity 0.9", 1.8, 0.1),
]
DECODING = [
    needle("dense", "", 1.0, 1.0),
    needle(WINDOW, "0 probes", 0.2, 0.06),
    needle("classifier", "2 probes", 1.0, 0.11),
    needle("classifier", "4 probes", 1.0, 0.2),
    needle("k-means", "2 probes", 0.7, 0.11),
]


def test_gate_and_classifier() -> None:
    assert verdict(PREFILL + DECODING) == [
        "At 90 % sparsity and 4,096 tokens the gate reads 10 % of the keys, finds 98 % of the needles of dense attention and "
        "raises perplexity by 3.4 %; Quest, which is not trained but scores every query instead of blocks of queries, finds "
        "more (100 %) and raises perplexity by more (4.1 %); random selection finds 30 %.",
        "With 2 probes and 4,096 tokens the classifier reads 11 % of the keys and finds 100 % of the needles of dense "
        "attention; the k-means alone, which needs no classifier, finds fewer (70 %); the window of first and last keys alone "
        "finds 20 % with 6 % of the keys.",
    ]


def test_calibrated_classifiers_are_compared_where_they_read_as_much() -> None:
    """Their settings are shares of the keys, which no other method has."""
    shares = [needle("classifier, calibrated", f"{share} % of far keys", found, keys, sparsity=None)
              for share, found, keys in ((1, 0.8, 0.07), (5, 1.0, 0.12), (20, 1.0, 0.26))]  # fmt: skip
    (sentence,) = verdict(DECODING + shares)
    assert "the classifier, calibrated finds as many (100 %); the k-means" in sentence


def test_a_training_free_method_that_is_as_good_is_named() -> None:
    rows = [perplexity("gate", "sparsity 0.5", 1.02, 0.5), perplexity("quest", "sparsity 0.5", 1.01, 0.5)]
    assert verdict(rows) == [
        "At 50 % sparsity and 4,096 tokens the gate reads 50 % of the keys and raises perplexity by 2 %; Quest, which is not "
        "trained but scores every query instead of blocks of queries, raises perplexity by less (1 %), so training gains "
        "nothing here."
    ]


def test_prompts_that_every_method_reads_whole() -> None:
    assert verdict([needle("gate", "sparsity 0.9", 1.0, 1.0), needle("quest", "sparsity 0.9", 1.0, 1.0)]) == [
        "At 90 % sparsity and 4,096 tokens the gate reads every key, so the methods cannot be compared."
    ]


def test_no_trained_gate() -> None:
    (sentence,) = verdict([each for each in PREFILL if not each.method.startswith("gate")])
    assert sentence == (
        "No trained gate was measured; at 90 % sparsity and 4,096 tokens Quest reads 10 % of the keys, finds 100 % of the "
        "needles of dense attention and raises perplexity by 4.1 %; random selection finds 30 %."
    )


def test_the_shipped_gate_beside_ones_own() -> None:
    rows = [needle("gate", "sparsity 0.9", 0.5, 0.1), needle("gate (embedded)", "sparsity 0.9", 0.8, 0.3)]
    (sentence,) = verdict(rows)
    assert sentence.endswith("the needles of dense attention; the shipped gate finds more (80 %) with 30 % of the keys.")


def test_needles_that_dense_attention_misses() -> None:
    lost = [needle("dense", "", 0.0, 1.0, ratio_to_dense=1.0), needle("gate", "sparsity 0.9", 0.0, 0.1, ratio_to_dense=None)]
    (sentence,) = verdict([*lost, perplexity("gate", "sparsity 0.9", 0.99, 0.1)])
    assert sentence == (
        "At 90 % sparsity and 4,096 tokens the gate reads 10 % of the keys and lowers perplexity by 1 %; the needles judge no "
        "method, because dense attention finds none."
    )


def test_recall_and_prompts_where_there_is_nothing_else() -> None:
    recall = row("recall", "gate", "threshold 0.01", 0.9, 0.25, extra={})
    assert verdict([recall]) == [
        "With threshold 0.01 and 4,096 tokens the gate reads 25 % of the keys and covers 90 % of the attention mass."
    ]
    prompts = [row("prompts", "gate", "sparsity 0.9", 0.8, 0.1), row("prompts", "quest", "sparsity 0.9", 0.9, 0.1)]
    (sentence,) = verdict(prompts)
    assert "answers 8 of 10 prompts as expected; Quest, which is not trained but scores every query" in sentence
    assert "answers more (9)" in sentence


@pytest.mark.parametrize(
    ("ratio", "machine", "expected"),
    [
        (1.6, "cpu", "On this CPU, whose times say nothing about GPUs, a prefill of 4,096 tokens with the gate (sparsity 0.9) "
            "takes 1.6 times as long as with dense attention."),
        (0.25, "cuda", "A prefill of 4,096 tokens with the gate (sparsity 0.9) is 4 times as fast as with dense attention."),
        (1.01, "cuda", "A prefill of 4,096 tokens with the gate (sparsity 0.9) takes as long as with dense attention."),
    ],
)  # fmt: skip
def test_speed(ratio: float, machine: str, expected: str) -> None:
    extra = {"device": machine}
    dense = perplexity("dense", "", 1.0, 1.0, latency_s=2.0, extra=extra)
    gate = perplexity("gate", "sparsity 0.9", 1.0, 0.1, latency_s=2.0 * ratio, extra=extra)
    assert verdict([dense, gate])[-1] == expected


def test_routers_without_training() -> None:
    found = {"classifier": (0.8, 0.1), "Quest pages": (0.9, 0.1), "LSH": (0.2, 0.1), "random buckets": (0.1, 0.1)}
    rows = [needle(name, "2 probes", *numbers, sparsity=None) for name, numbers in found.items()]
    assert verdict(rows) == [
        "With 2 probes and 4,096 tokens the classifier reads 10 % of the keys and finds 80 % of the needles of dense "
        "attention; Quest's choice of pages, which is not trained, finds more (90 %), so training gains nothing here; a random "
        "choice of buckets finds 10 %."
    ]


def test_speed_of_decoding_comes_from_its_task() -> None:
    timed = row("decoding", "classifier", "2 probes", 90.0, 0.1, ratio_to_dense=0.5, latency_s=0.01)
    assert verdict([timed]) == [
        "A decoded token after 4,096 keys with the classifier (2 probes) takes 2 times as long as with dense attention."
    ]


def test_speed_is_that_of_one_prompt() -> None:
    latencies = {"latency_s": 2.0, "ratio_to_dense": 1.0}
    rows = [
        row("latency", "dense, SDPA", "", 2.0, 1.0, **latencies),
        row("latency", "gate", "sparsity 0.9", 1.0, 0.1, **latencies | {"latency_s": 1.0}),
        row("latency", "dense, SDPA", "64 new after 4032", 0.1, 1.0, latency_s=0.1, extra={"situation": "64 new after 4032"}),
        row("latency", "gate", "sparsity 0.9, 64 new", 0.2, 0.05, latency_s=0.2, extra={"situation": "64 new after 4032"}),
        row("decoding", "classifier", "2 probes", 90.0, 0.1, ratio_to_dense=0.5, latency_s=0.01, extra={"batch": 1}),
        row(
            "decoding",
            "classifier",
            "2 probes",
            400.0,
            0.1,
            ratio_to_dense=4.0,
            latency_s=0.02,
            extra={"batch": 8, "length": 8192},
        ),
    ]
    assert verdict(rows) == [
        "A prefill of 4,096 tokens with the gate (sparsity 0.9) is 2 times as fast as with dense attention; a decoded token "
        "after 4,096 keys with the classifier (2 probes) takes 2 times as long as with dense attention."
    ]
    assert verdict(rows[-1:]) == []


def test_dense_attention_alone_has_no_verdict() -> None:
    assert verdict([needle("dense", "", 1.0, 1.0), perplexity("dense", "", 1.0, 1.0)]) == []
    assert verdict([]) == []


def test_prompts_that_dense_attention_does_not_answer_judge_no_method() -> None:
    lost = [row("prompts", "dense", "", 0.0, 1.0, ratio_to_dense=1.0)]
    lost += [row("prompts", name, "sparsity 0.9", 0.0, 0.1, ratio_to_dense=None) for name in ("gate", "quest")]
    assert verdict(lost) == []


def test_needles_of_one_length_that_dense_attention_misses_are_left_out() -> None:
    rows = [needle("gate", "sparsity 0.9", 0.9, 0.1)]
    rows.append(needle("gate", "sparsity 0.9", 0.0, 0.1, ratio_to_dense=None, extra={"length": 32768}))
    assert verdict(rows) == [
        "At 90 % sparsity and 4,096 tokens the gate reads 10 % of the keys and finds 90 % of the needles of dense attention."
    ]


def test_tasks_of_different_lengths_name_their_own() -> None:
    rows = [needle("gate", "sparsity 0.9", 0.9, 0.1, extra={"length": 32768}), perplexity("gate", "sparsity 0.9", 1.03, 0.1)]
    assert verdict(rows) == [
        "At 90 % sparsity the gate reads 10 % of the keys, finds 90 % of the needles of dense attention at 32,768 tokens and "
        "raises perplexity by 3 % at 4,096 tokens."
    ]


def test_names_of_variants() -> None:
    rows = [needle("classifier", "2 probes", 1.0, 0.1), needle("k-means (named), RoPE", "2 probes", 0.7, 0.1)]
    assert "; the named k-means, RoPE, which needs no classifier, finds fewer (70 %)" in verdict(rows)[0]


def test_the_time_of_prompts_is_no_prefill() -> None:
    timed = [
        row("prompts", "dense", "", 1.0, 1.0, latency_s=1.0),
        row("prompts", "gate", "sparsity 0.9", 1.0, 0.1, latency_s=2.0),
    ]
    assert not any("prefill" in sentence for sentence in verdict(timed))


def test_differences_within_the_intervals_are_called_so() -> None:
    gate = needle("gate", "sparsity 0.9", 0.8, 0.1, interval=(0.5, 0.95))
    (sentence,) = verdict([gate, needle("mean_pool", "sparsity 0.9", 0.9, 0.1, interval=(0.6, 0.98))])
    assert "finds more (90 %), within the 95 % intervals" in sentence
    (sentence,) = verdict([gate, needle("mean_pool", "sparsity 0.9", 0.2, 0.1, interval=(0.05, 0.4))])
    assert "intervals" not in sentence


def losses(method: str, ratio: float, values: list[float]) -> EvalRow:
    extra = {"losses": values, "ratio_interval": [ratio - 0.1, ratio + 0.1]}
    return perplexity(method, "sparsity 0.9", ratio, 0.1, extra=extra)


def test_rows_of_the_same_samples_are_compared_in_pairs() -> None:
    """The intervals overlap; the differences of each sample are nearly the same, or differ in sign."""
    gate = losses("gate", 1.02, [2.0, 3.0, 4.0])
    (sentence,) = verdict([gate, losses("mean_pool", 1.06, [2.05, 3.04, 4.05])])
    assert "intervals" not in sentence
    (sentence,) = verdict([gate, losses("mean_pool", 1.06, [2.5, 2.9, 4.0])])
    assert "within the 95 % intervals" in sentence


def test_scores_of_the_same_prompts_are_compared_in_pairs() -> None:
    def ruler(method: str, scores: list[float]) -> EvalRow:
        extra = {"scores": {"vt": scores, "cwe": scores}}
        return row("ruler", method, "sparsity 0.9", sum(scores) / 4, 0.1, interval=(0.1, 0.9), extra=extra)

    gate = ruler("gate", [0.9, 0.1, 0.8, 0.2])
    (sentence,) = verdict([gate, ruler("quest", [0.8, 0.0, 0.7, 0.0])])
    assert "intervals" not in sentence
    (sentence,) = verdict([gate, ruler("quest", [1.0, 0.0, 0.2, 0.4])])
    assert "within the 95 % intervals" in sentence

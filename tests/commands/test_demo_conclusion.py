"""The sentence that ends the demo, from rows of an evaluation."""

from typing import Any

from msattn.trainer.commands.demo_conclusion import conclusion


def row(task: str, method: str, ratio: float | None) -> dict[str, Any]:
    return {"task": task, "method": method, "setting": "any", "ratio_to_dense": ratio}


PERPLEXITY = [row("perplexity", "gate", 1.018), row("perplexity", "quest", 1.149)]
DECODING = [row("needle", "classifier", 1.0), row("needle", "k-means", 0.3), row("needle", "window only", 0.0)]
NEEDLES = [row("needle", "gate", 0.3), row("needle", "gate (embedded)", 0.8), row("needle", "quest", 1.0)]


def test_where_training_wins_and_where_not() -> None:
    assert conclusion(PERPLEXITY + DECODING + NEEDLES, chunks=80) == (
        "Training wins in perplexity (new gate: +1.8%, Quest: +14.9%) and in needles in decoding (new classifier: 100%, "
        "k-means alone: 30%, window of first and last keys: 0%), but it does not win in needles in prefill (new gate: 30%, "
        "shipped gate: 80%, Quest: 100%), probably because Quest scores every query, gates most queries in blocks, and the "
        "new gate saw only 80 chunks."
    )


def test_wins_alone_and_losses_alone() -> None:
    assert conclusion(PERPLEXITY, 80) == "Training wins in perplexity (new gate: +1.8%, Quest: +14.9%)."
    assert conclusion(NEEDLES, 80).startswith("Training does not win in needles in prefill (")


def test_needles_that_dense_attention_misses_judge_nothing() -> None:
    lost = [row("needle", "gate", None), row("needle", "quest", None)]
    assert conclusion(PERPLEXITY + lost, 80) == conclusion(PERPLEXITY, 80)


def test_a_tie_is_no_win_and_has_no_reason() -> None:
    tie = [row("needle", "classifier", 1.0), row("needle", "k-means", 1.0)]
    equal = "equals the best method without training in needles in decoding (new classifier: 100%, k-means alone: 100%)"
    assert conclusion(tie, 80) == f"Training only {equal}."
    assert conclusion(PERPLEXITY + tie, 80).endswith(f", but it only {equal}.")
    assert f"{equal}, but it does not win in needles in prefill (" in conclusion(tie + NEEDLES, 80)
    assert conclusion([], 80) == "Nothing was compared."

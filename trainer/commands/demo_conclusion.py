"""The sentence that ends ``msattn demo``: where training wins over methods without training, and where it does not and why."""

from typing import Any, NamedTuple

NAMES = {
    "gate": "new gate",
    "gate (embedded)": "shipped gate",
    "classifier": "new classifier",
    "k-means": "k-means alone",
    "window only": "window of first and last keys",
    "quest": "Quest",
    "random": "random blocks",
}


class Comparison(NamedTuple):
    """A quality by which the ``trained`` methods are compared with the ``untrained`` ones, in rows of ``task``."""

    name: str
    task: str
    trained: tuple[str, ...]
    untrained: tuple[str, ...]


WHY_QUEST = (
    ", probably because Quest scores every query, gates most queries in blocks, and the new gate saw only {chunks} chunks"
)
GATES, BASELINES = ("gate", "gate (embedded)"), ("quest", "random")
COMPARISONS = (
    Comparison("perplexity", "perplexity", GATES, BASELINES),
    Comparison("needles in decoding", "needle", ("classifier",), ("k-means", "window only")),
    Comparison("needles in prefill", "needle", GATES, BASELINES),
)


def conclusion(rows: list[dict[str, Any]], chunks: int) -> str:
    """Returns the sentence.

    Parameters
    ----------
    rows : rows of an evaluation at one sparsity and one number of probes.
    chunks : number of chunks that the new gate was trained on.
    """
    wins, ties, losses = [], [], []
    for comparison in COMPARISONS:
        scores = _scores(rows, comparison)
        trained, untrained = ([scores[name] for name in group if name in scores] for group in comparison[2:])
        if trained and untrained:
            said = f"{comparison.name} ({_listed(scores, comparison)})"
            if max(trained) > max(untrained):
                wins.append(said)
            elif max(trained) == max(untrained):
                ties.append(said)
            else:
                quest_wins = comparison.trained == GATES and scores.get("quest") == max(untrained)
                losses.append(said + (WHY_QUEST.format(chunks=chunks) if quest_wins else ""))
    parts = [f"training wins in {' and in '.join(wins)}"] if wins else []
    if ties:
        parts.append(f"{'it' if parts else 'training'} only equals the best method without training in {' and in '.join(ties)}")
    if losses:
        parts.append(f"{'it' if parts else 'training'} does not win in {' and in '.join(losses)}")
    said = ", but ".join(parts) or "nothing was compared"
    return f"{said[:1].upper()}{said[1:]}."


def _scores(rows: list[dict[str, Any]], comparison: Comparison) -> dict[str, float]:
    """Returns the score of each method relative to dense attention; larger is better."""
    sign = -1 if comparison.task == "perplexity" else 1
    methods = (*comparison.trained, *comparison.untrained)
    own = {row["method"]: row["ratio_to_dense"] for row in rows if row["task"] == comparison.task and row["setting"]}
    return {method: sign * own[method] for method in methods if own.get(method) is not None}


def _listed(scores: dict[str, float], comparison: Comparison) -> str:
    if comparison.task == "perplexity":
        return ", ".join(f"{NAMES[method]}: {-score - 1:+.1%}" for method, score in scores.items())
    return ", ".join(f"{NAMES[method]}: {score:.0%}" for method, score in scores.items())

"""One line of a result: quality, what was read, and what it cost, together."""

from dataclasses import dataclass, field
from typing import Any

WINDOW = "window only"  # the method's name of routing that visits no bucket: sink and recent keys alone


@dataclass(frozen=True)
class EvalRow:
    """What one method scored in one setting.

    Attributes
    ----------
    task : ``perplexity``, ``recall``, ``needle``, ``latency`` or ``decoding``.
    method : ``dense`` (with the kernel that ran, where several do), ``gate``, a baseline, or a way of routing.
    setting : what was asked for, e.g. ``sparsity 0.9`` or ``2 probes``.
    score, score_name : the figure of the task, and what it is.
    interval : 95 % confidence interval of the score; None when there is one sample.
    ratio_to_dense : score over dense attention's score on the same samples.
    sparsity : share of the causally visible blocks that was not read; None for routing.
    selectivity : share of the visible keys that was read.
    recall : share of the attention mass in what was read, where measured.
    latency_s, peak_memory_mb : cost of one sample; None where the figure was not taken through the serving path alone.
    samples : over how many the score is a mean.
    extra : figures of this task alone (plain numbers, strings, lists and dicts).
    """

    task: str
    method: str
    setting: str
    score: float
    score_name: str
    interval: tuple[float, float] | None = None
    ratio_to_dense: float | None = None
    sparsity: float | None = None
    selectivity: float | None = None
    recall: float | None = None
    latency_s: float | None = None
    peak_memory_mb: float | None = None
    samples: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

"""A row of the results: score, share of blocks or keys that was read, and cost."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from msattn.trainer.methods.base import Method

# Routing with 0 probes: sink and recent keys alone.
WINDOW = Method(
    "window only", style={"color": "#A0695C", "marker": "*", "linestyle": "none", "markersize": 9}
)
# in percent
KEYS = {
    "keys": "{:g} % of keys",
    "about keys": "about {:.3g} % of keys",
    "far keys": "{:g} % of far keys",
}


@dataclass(frozen=True)
class Setting:
    """The share or number of blocks, keys or buckets that a method is to read; without ``unit``
    that of dense attention.

    Attributes
    ----------
    unit : ``sparsity``, ``probes``, ``keys``, ``about keys``, ``far keys`` or a policy; without
        ``value`` a text of its own.
    value : number in this unit, shares from 0 to 1.
    situation : state of the cache, for ``latency``.
    """

    unit: str = ""
    value: float | None = None
    situation: str = ""

    @property
    def left_out(self) -> float | None:
        """Share of the blocks or keys that is to be left out; None for other units."""
        if self.value is None or not (self.unit == "sparsity" or self.unit in KEYS):
            return None
        return self.value if self.unit == "sparsity" else 1 - self.value

    def __str__(self) -> str:
        return ", ".join(filter(None, (self._text(), self.situation)))

    def _text(self) -> str:
        if self.value is None:
            return self.unit
        if self.unit in KEYS:
            return KEYS[self.unit].format(100 * self.value)
        if self.unit == "probes":
            return "1 probe" if self.value == 1 else f"{self.value} probes"
        return f"{self.unit} {self.value:g}"


@dataclass(frozen=True)
class EvalRow:
    """Result of one method in one setting of a task.

    Attributes
    ----------
    task : name of the task, one of ``eval.tasks``.
    method : dense attention (in variants by the kernel that ran, where several do), a gate, a
        baseline, or a router.
    setting : requested setting.
    score, score_name : main metric of the task, and its name.
    interval : 95 % confidence interval of the score; None with one sample.
    ratio_to_dense : score divided by the score of dense attention on the same samples.
    sparsity : share of the causally visible blocks that was not read; None for routing.
    selectivity : share of the visible keys that was read.
    recall : share of the attention mass in what was read; None if not measured.
    latency_s, peak_memory_mb : seconds and peak MiB of one sample (``decoding``: a token of each
        sequence); None if the task runs more than serving would.
    samples : number of samples that the score averages over.
    extra : metrics of this task alone (plain numbers, strings, lists and dicts). Every task:
        ``length`` of the prompts, if it has one, and ``device``, the type of device. Tasks with
        answers: ``examples``, each a ``prompt`` with ``expected``, ``answer`` and ``correct``, of
        the same prompts in all rows of a task and length. ``needle`` and ``prompts``: ``correct``,
        of each prompt. One row each: ``maps`` and ``decoded``, see
        :mod:`~msattn.trainer.evaluate.tasks.reads`. ``perplexity``, ``documents``, ``ruler`` and
        ``leval``: ``ratio_interval``, of ``ratio_to_dense``, from differences on the same samples.
        ``perplexity`` and ``documents``: ``losses``, of each sample in nats; ``kl_divergence`` from
        dense predictions, in nats a token, and ``same_top``, the share of tokens whose most likely
        prediction is the same, both with intervals. ``ruler``: the score of each task, under its
        name, and ``scores``, of each prompt by task. ``leval``: the likelihood of each file, under
        its name, ``logs``, of each question by file, ``choices``, and ``answers`` and ``scores`` of
        generated answers. ``harness``: ``benchmark``, the name of lm_eval's task, and ``length``
        only if it makes prompts of given lengths. ``latency``: ``situation``, that of the cache.
        ``decoding``: ``batch``, and what each token is ``launched_by``. ``throughput``: ``batch``,
        the number of requests, and percentiles of the seconds to the first token.
    """

    task: str
    method: Method
    setting: Setting
    score: float
    score_name: str
    _: KW_ONLY
    interval: tuple[float, float] | None = None
    ratio_to_dense: float | None = None
    sparsity: float | None = None
    selectivity: float | None = None
    recall: float | None = None
    latency_s: float | None = None
    peak_memory_mb: float | None = None
    samples: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def is_of_one_prompt(self) -> bool:
        """Returns False for rows of several sequences, of chunked prefill and of tokens after
        cached ones.
        """
        return self.extra.get("batch", 1) == 1 and not self.extra.get("situation")

    def plain(self) -> dict[str, Any]:
        """Returns the fields of the row for a file, method and setting as text."""
        return asdict(self) | {"method": str(self.method), "setting": str(self.setting)}


def ratio_to(dense: float | None, score: float) -> float | None:
    """Returns ``score`` relative to that of dense attention, 1 for dense attention itself (None);
    None if that is 0.
    """
    return 1.0 if dense is None else score / dense if dense else None


def flat(rows: Sequence[EvalRow]) -> list[dict[str, Any]]:
    """Returns a table: the fields of each row, each interval as two columns, and the numbers and
    strings of ``extra``.
    """
    lines = []
    for row in rows:
        line = row.plain()
        extra = line.pop("extra")
        line["interval_low"], line["interval_high"] = line.pop("interval") or (None, None)
        for name in [key.removesuffix("_interval") for key in extra if key.endswith("_interval")]:
            line[f"{name}_low"], line[f"{name}_high"] = extra[f"{name}_interval"] or (None, None)
        lines.append(
            line
            | {key: value for key, value in extra.items() if isinstance(value, int | float | str)}
        )
    return lines

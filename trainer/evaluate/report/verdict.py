"""The verdict: the best trained method beside the best one without training, with the interval of their difference.

A line judges one task in prefill (block selection) or decoding (bucket routing), at the longest prompts, in the setting in
which the first trained method reads the fewest keys. Both methods read the same samples, so the interval is that of the paired
differences; one that includes 0 is a tie. A last sentence compares times.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from msattn.trainer.evaluate.intervals import Interval, mean_interval, paired_proportions, stratified_interval
from msattn.trainer.evaluate.report.style import is_of_one_prompt
from msattn.trainer.evaluate.report.terminal import with_columns
from msattn.trainer.evaluate.row import EvalRow

if TYPE_CHECKING:
    from rich.console import Console

SAME_READS = 0.25  # relative difference of the keys read up to which two methods are compared
SHOWN_READS = 0.1  # relative difference of the keys read from which it is shown
SAME_TIME = 0.03  # relative difference of times that counts as equal


Difference = tuple[float, Interval | None]  # of two rows, with its interval; None for a single sample


class Quality(NamedTuple):
    """A task that judges methods, by a share.

    Attributes
    ----------
    better : 1 if larger values are better, else -1.
    value, form : of a row, and its format.
    difference : the value of a row less that of another one on the same samples, or relative to it.
    """

    task: str
    name: str
    better: int
    value: Callable[[EvalRow], float]
    form: str
    difference: Callable[[EvalRow, EvalRow], Difference]


class Line(NamedTuple):
    """A row of the verdict's table; ``outcome`` is 1 if the trained method wins, 0 for a tie, None if nothing can be said."""

    quality: str
    cells: dict[str, str]
    outcome: int | None


class Verdict(NamedTuple):
    """The table's lines and the sentences below it."""

    lines: list[Line]
    sentences: list[str]

    def table(self) -> dict[str, list[str]]:
        """Returns ``{column: cells}``."""
        return {name: [line.cells[name] for line in self.lines] for name in (self.lines[0].cells if self.lines else ())}


def verdict(rows: Sequence[EvalRow]) -> Verdict:
    """Returns what ``rows`` have numbers for, e.g. nothing for dense attention alone."""
    sparse = [row for row in rows if not row.method.is_dense]
    prefill = [row for row in sparse if row.sparsity is not None]
    decoding = [row for row in sparse if row.sparsity is None]
    found = [_line(quality, kind, own) for quality in QUALITIES for kind, own in (("prefill", prefill), ("decoding", decoding))]
    lines = [line for line in found if line]
    return Verdict(lines, [each for each in (_outcome(lines), *_silent(rows), _speed(rows)) if each])


def show(found: Verdict, console: "Console") -> None:
    """Prints the table and the sentences."""
    if found.lines:
        columns = found.table()
        table = with_columns(
            "Verdict", list(columns), [name for name in columns if name not in ("difference", "95 % interval")]
        )
        table.leading = 1
        for line in found.lines:
            table.add_row(*line.cells.values())
        console.print(table)
    for sentence in found.sentences:
        console.print(sentence, style="bold", highlight=False, markup=False)


def _line(quality: Quality, kind: str, rows: Iterable[EvalRow]) -> Line | None:
    """Returns the line of a task; None if no method was measured, or dense attention scores nothing."""
    own = [row for row in rows if row.task == quality.task and row.ratio_to_dense is not None]
    longest = max((row.extra.get("length", 0) for row in own), default=0)
    own = [row for row in own if row.extra.get("length", 0) == longest and row.method.is_served]
    trained = [row for row in own if row.method.is_trained]
    subjects = [row for row in trained or own if row.method == (trained or own)[0].method]
    if not subjects:
        return None
    reference = min(subjects, key=_reads)
    near = [
        _in_setting([row for row in own if row.method == name], reference) for name in dict.fromkeys(row.method for row in own)
    ]
    near = [row for row in near if _reads(row) <= (1 + SAME_READS) * _reads(reference)]
    best = [
        max(
            (row for row in near if row.method.is_trained == chosen),
            key=lambda row: quality.better * quality.value(row),
            default=None,
        )
        for chosen in (True, False)
    ]
    name = f"{quality.name} ({kind})"
    cells = {"quality": f"{name}, {reference.setting}"}
    for column, row in zip(("best trained", "best untrained"), best, strict=True):
        cells[column] = "none" if row is None else _cell(quality, row, reference)
    if best[0] is None or best[1] is None:
        return Line(name, cells | {"difference": "", "95 % interval": ""}, None)
    difference, bounds = quality.difference(best[0], best[1])
    cells["difference"] = f"{difference:+.1%}"
    cells["95 % interval"] = f"{bounds[0]:+.1%} to {bounds[1]:+.1%}" if bounds else "one sample"
    return Line(name, cells, quality.better * ((bounds[0] > 0) - (bounds[1] < 0)) if bounds else None)


def _cell(quality: Quality, row: EvalRow, reference: EvalRow) -> str:
    """Returns a method and its value, with the share of the keys that it reads if that differs from ``reference``'s."""
    theirs, mine = _reads(row), _reads(reference)
    reads = "" if abs(theirs - mine) <= SHOWN_READS * mine else f" ({theirs:.1%} of keys)"
    return f"{row.method.label}: {quality.value(row):{quality.form}}{reads}"


def _outcome(lines: Sequence[Line]) -> str:
    """Returns the sentence on the outcomes of all lines; an empty string if there are none."""
    verbs = {1: "wins in", -1: "loses in", 0: "ties (the interval includes 0) in"}
    said = []
    for outcome, verb in verbs.items():
        if names := [line.quality for line in lines if line.outcome == outcome]:
            said.append(f"{verb} {' and '.join(names)}")
    return f"Against the best method without training, the best trained one {'; '.join(said)}." if said else ""


def _silent(rows: Sequence[EvalRow]) -> list[str]:
    """Returns a sentence for each task and length that judges nothing, because dense attention scores 0."""
    lost = [row for row in rows if row.method.is_dense and row.score == 0 and row.task in ("needle", "ruler", "prompts")]
    return [f"{row.task}, {row.extra['length']:,} tokens: dense finds nothing; this task says nothing here." for row in lost]


def _in_setting(rows: list[EvalRow], reference: EvalRow) -> EvalRow:
    """Returns the row of a method in the setting of ``reference``, else the one that reads most nearly as many keys."""
    same = [row for row in rows if row.setting == reference.setting]
    return same[0] if same else min(rows, key=lambda row: abs(_reads(row) - _reads(reference)))


def _reads(row: EvalRow) -> float:
    return 1.0 if row.selectivity is None else row.selectivity


def _perplexity(one: EvalRow, other: EvalRow) -> Difference:
    differences = [a - b for a, b in zip(one.extra["losses"], other.extra["losses"], strict=True)]
    bounds = mean_interval(differences)
    return math.expm1(fmean(differences)), bounds and (math.expm1(bounds[0]), math.expm1(bounds[1]))


def _correct(one: EvalRow, other: EvalRow) -> Difference:
    return one.score - other.score, paired_proportions(one.extra["correct"], other.extra["correct"])


def _task_scores(one: EvalRow, other: EvalRow) -> Difference:
    tasks = [zip(scores, other.extra["scores"][task], strict=True) for task, scores in one.extra["scores"].items()]
    return one.score - other.score, stratified_interval([[a - b for a, b in pairs] for pairs in tasks])


def _above_dense(row: EvalRow) -> float:
    return (row.ratio_to_dense or math.inf) - 1


def _score(row: EvalRow) -> float:
    return row.score


QUALITIES = (
    Quality("perplexity", "perplexity above dense", -1, _above_dense, "+.1%", _perplexity),
    Quality("documents", "perplexity of documents above dense", -1, _above_dense, "+.1%", _perplexity),
    Quality("needle", "needles found", 1, _score, ".1%", _correct),
    Quality("ruler", "RULER's average", 1, _score, ".1%", _task_scores),
    Quality("prompts", "own prompts as expected", 1, _score, ".1%", _correct),
)


def _speed(rows: Sequence[EvalRow]) -> str:
    """Returns the sentence on the measured times of prefill and decoding, relative to dense attention."""
    rows = [row for row in rows if is_of_one_prompt(row)]
    prefill = _timed(rows, ("latency", "perplexity", "needle"), ("gate",))
    decoding = _timed(rows, ("decoding",), ("classifier", "decode gate"))
    parts = []
    if prefill and (ratio := _time_ratio(rows, prefill)):
        length = f" of {prefill.extra['length']:,} tokens" if "length" in prefill.extra else ""
        parts.append(f"a prefill{length} with {prefill.method.label} ({prefill.setting}) {_times(ratio)}")
    if decoding and decoding.ratio_to_dense:
        after = f" after {decoding.extra['length']:,} keys"
        ratio, name = 1 / decoding.ratio_to_dense, decoding.method.label
        parts.append(f"a decoded token{after} with {name} ({decoding.setting}) {_times(ratio)}")
    if not parts:
        return ""
    said = "; ".join(parts)
    if any(row.extra.get("device") == "cpu" for row in rows):
        return f"On this CPU, whose times say nothing about GPUs, {said}."
    return f"{said[0].upper()}{said[1:]}."


def _timed(rows: Sequence[EvalRow], tasks: tuple[str, ...], trained: tuple[str, ...]) -> EvalRow | None:
    """Returns the row with the longest prompt and the fewest keys, in the first of ``tasks`` that has one.

    Trained methods come first, then untrained gates and classifiers, then Quest and the k-means. Settings in which quality was
    measured are preferred to others.
    """
    judged = {row.setting for row in rows if row.task in (quality.task for quality in QUALITIES)}
    for task in tasks:
        own = [row for row in rows if row.task == task and row.latency_s and (row.sparsity is not None or task == "decoding")]
        own = [row for row in own if row.method.name in (*trained, "quest", "k-means")]
        own = [row for row in own if row.setting in judged] or own
        if own:
            return min(
                own,
                key=lambda row: (
                    -row.extra.get("length", 0),
                    not row.method.is_trained,
                    row.method.name not in trained,
                    _reads(row),
                ),
            )
    return None


def _time_ratio(rows: Sequence[EvalRow], sparse: EvalRow) -> float | None:
    """Returns the time of ``sparse`` over that of the fastest dense attention on the same prompts."""
    same = (row for row in rows if row.task == sparse.task and row.method.is_dense)
    dense = [row.latency_s for row in same if row.latency_s and row.extra.get("length") == sparse.extra.get("length")]
    return sparse.latency_s / min(dense) if sparse.latency_s and dense else None


def _times(ratio: float) -> str:
    if abs(ratio - 1) <= SAME_TIME:
        return "takes as long as with dense attention"
    if ratio > 1:
        return f"takes {ratio:.3g} times as long as with dense attention"
    return f"is {1 / ratio:.3g} times as fast as with dense attention"

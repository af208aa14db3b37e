"""The verdict: the best trained and the best untrained method, with the interval of their
difference.

A line judges one task in prefill (block selection) or decoding (bucket routing), at the longest
prompts, in the setting in which the first trained method reads the fewest keys. Of the scores of a
gate, only those that are served take part: the first ones. Both methods use the same samples, so
the interval is that of paired differences; if it includes 0, the line is a tie.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from msattn.trainer.config import TASKS
from msattn.trainer.config.select import GATE_SCORES
from msattn.trainer.evaluate.report.style import longest
from msattn.trainer.evaluate.report.tables import columns_of, filled
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import Quality, task_of

SAME_READS = 0.25  # relative difference of the keys read up to which two methods are compared
SHOWN_READS = 0.1  # relative difference of the keys read from which it is shown
TEXT_COLUMNS = ("quality", "best trained", "best untrained")
NUMBERS = ("difference", "95 % interval")


class Line(NamedTuple):
    """A row of the table; ``outcome`` is 1 if the trained method wins, -1 if it loses, 0 for a tie,
    None if unknown.
    """

    quality: str
    cells: dict[str, str]
    outcome: int | None


def verdict(rows: Sequence[EvalRow]) -> list[Line]:
    """Returns the lines that ``rows`` have numbers for, e.g. none for dense attention alone."""
    lines, measured = [], {row.task for row in rows}
    judged = [
        (task, quality) for task in TASKS if task in measured and (quality := task_of(task).quality)
    ]
    # perplexities, then shares
    for task, quality in sorted(judged, key=lambda pair: pair[1].better):
        own = longest([row for row in rows if row.task == task and row.ratio_to_dense is not None])
        own = [row for row in own if row.method.is_served and not row.method.is_dense]
        for kind, routed in (("prefill", False), ("decoding", True)):
            if of_kind := [row for row in own if (row.sparsity is None) == routed]:
                lines.append(_line(quality, f"{quality.name} ({kind})", of_kind))
    return lines


def sentences(rows: Sequence[EvalRow], lines: Sequence[Line]) -> list[str]:
    """Returns a sentence on the outcomes, and one for each task that judges nothing, because dense
    attention scores 0.
    """
    verbs = {1: "wins on", -1: "loses on", 0: "ties (the interval includes 0) on"}
    by_outcome = {
        verb: [line.quality for line in lines if line.outcome == outcome]
        for outcome, verb in verbs.items()
    }
    said = "; ".join(f"{verb} {' and '.join(names)}" for verb, names in by_outcome.items() if names)
    shares = {
        row.task for row in rows if (quality := task_of(row.task).quality) and quality.better == 1
    }
    lost = [row for row in rows if row.method.is_dense and row.score == 0 and row.task in shares]
    compared = (
        [f"Compared with the best untrained method, the best trained one {said}."] if said else []
    )
    return compared + [
        f"{row.task}, {row.extra['length']:,} tokens: dense attention finds nothing, so this task "
        f"is not judged."
        for row in lost
    ]


def show(rows: Sequence[EvalRow], console: Console) -> None:
    lines = verdict(rows)
    if lines:
        table = filled("Verdict", columns_of([line.cells for line in lines]), TEXT_COLUMNS)
        table.leading = 1
        console.print(table)
    for sentence in sentences(rows, lines):
        console.print(sentence, style="bold", highlight=False, markup=False)


def _line(quality: Quality, name: str, rows: list[EvalRow]) -> Line:
    first = next((row for row in rows if row.method.is_trained), rows[0])
    # rows of the gate's other scores are comparisons with these
    if first.method.name in GATE_SCORES:
        rows = [row for row in rows if row.method.name not in {*GATE_SCORES} - {first.method.name}]
    reference = min((row for row in rows if row.method == first.method), key=_reads)
    near = [
        _in_setting([row for row in rows if row.method == method], reference)
        for method in dict.fromkeys(row.method for row in rows)
    ]
    near = [row for row in near if _reads(row) <= (1 + SAME_READS) * _reads(reference)]
    near.sort(key=lambda row: -quality.better * quality.value(row))
    trained, untrained = (
        next((row for row in near if row.method.is_trained == kind), None) for kind in (True, False)
    )
    cells = {"quality": f"{name}, {reference.setting}"}
    for column, row in zip(TEXT_COLUMNS[1:], (trained, untrained), strict=True):
        cells[column] = "none" if row is None else _cell(quality, row, reference)
    cells |= dict.fromkeys(NUMBERS, "")
    if trained is None or untrained is None:
        return Line(name, cells, None)
    difference, bounds = quality.difference(trained, untrained)
    interval = f"{bounds[0]:+.1%} to {bounds[1]:+.1%}" if bounds else "one sample"
    outcome = quality.better * ((bounds[0] > 0) - (bounds[1] < 0)) if bounds else None
    return Line(
        name, cells | dict(zip(NUMBERS, (f"{difference:+.1%}", interval), strict=True)), outcome
    )


def _cell(quality: Quality, row: EvalRow, reference: EvalRow) -> str:
    """Returns a method and its value, with the share of the keys that it reads if that differs from
    ``reference``'s.
    """
    theirs, mine = _reads(row), _reads(reference)
    reads = "" if abs(theirs - mine) <= SHOWN_READS * mine else f" ({theirs:.1%} of keys)"
    return f"{row.method.label}: {quality.value(row):{quality.form}}{reads}"


def _in_setting(rows: list[EvalRow], reference: EvalRow) -> EvalRow:
    """Returns the row of a method in the setting of ``reference``, else the one that reads most
    nearly as many keys.
    """
    return min(
        rows,
        key=lambda row: (row.setting != reference.setting, abs(_reads(row) - _reads(reference))),
    )


def _reads(row: EvalRow) -> float:
    return 1.0 if row.selectivity is None else row.selectivity

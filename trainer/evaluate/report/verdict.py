"""The verdict: up to three sentences with the numbers that a reader decides by, from rows alone.

One sentence judges block selection (prefill), one bucket routing (decoding), one speed. Each takes the setting in which the
trained method reads the fewest keys, at the longest prompt, and names the method without training that does best there.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msattn.trainer.evaluate.intervals import mean_interval, stratified_interval
from msattn.trainer.evaluate.report.style import is_of_one_prompt, is_trained, method_title
from msattn.trainer.evaluate.row import WINDOW, EvalRow

NAMES = {
    "quest": "Quest",
    "sink_local": "reading the first and the nearest blocks",
    "random": "random selection",
    "oracle": "the oracle",
    "k-means": "the k-means alone",
    "oracle routing": "the oracle routing",
    "random buckets": "a random choice of buckets",
    "Quest pages": "Quest's choice of pages",
    "sink and window": "a longer window of last keys",
    WINDOW: "the window of first and last keys alone",
}
SAME_READS = 0.1  # relative difference of the keys read up to which two methods count as reading the same share
SAME_TIME = 0.03  # relative difference of times that counts as equal


class Measure(NamedTuple):
    """Words for the score of a task.

    Attributes
    ----------
    task : name of the task.
    value : score of a row as it is shown; larger is better.
    states : predicate about one method, e.g. ``finds 98 %``, and ``of`` what, for the first method of a sentence.
    compares : predicate about a method whose value is larger than (1), as large as (0) or smaller than (-1) the one stated.
    """

    task: str
    value: Callable[[EvalRow], float]
    states: Callable[[EvalRow], str]
    of: str
    compares: Callable[[EvalRow, int], str]


def verdict(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the sentences that ``rows`` have numbers for, e.g. none for dense attention alone."""
    sparse = [row for row in rows if row.method.split(",")[0] != "dense"]
    prefill = _quality([row for row in sparse if row.sparsity is not None], "gate")
    decoding = _quality([row for row in sparse if row.sparsity is None], _trained_router(rows))
    return [sentence for sentence in (prefill, decoding, _speed(rows)) if sentence]


def _trained_router(rows: Sequence[EvalRow]) -> str:
    """Returns the beginning of the names of the trained routers: decode gates count if there are no classifiers."""
    kinds = ("classifier", "decode gate")
    return next((kind for kind in kinds if any(row.method.startswith(kind) for row in rows)), kinds[0])


def _quality(rows: list[EvalRow], trained: str) -> str:
    """Returns the sentence on the quality of the methods in ``rows``; ``trained`` begins the names of the trained ones."""
    measures = _measures(rows)
    shown = [row for measure in measures for row in _comparable(rows, measure.task)]
    first = [row for row in shown if row.task == measures[0].task]
    main = _main_method(first, trained) if first else None
    if main is None:
        return ""
    fewest = min((row for row in first if row.method == main), key=_reads)
    setting, calibrated = fewest.setting, _calibrated_settings(first, _reads(fewest))
    own: dict[str, dict[str, EvalRow]] = {}
    for row in shown:
        if row.setting == calibrated.get(row.method, setting):
            own.setdefault(row.method, {})[row.task] = row
    subject = own.pop(main)
    reads = _reads(subject[first[0].task])
    if reads == 1:
        return f"{_opening(setting)}{_scope(shown)} {_name(main)} reads every key, so the methods cannot be compared."
    stated = [measure for measure in measures if measure.task in subject]
    said = [measure.states(subject[measure.task]) + measure.of + _own_length(shown, measure.task) for measure in stated]
    opening = _opening(setting) + _scope(shown)
    clauses = [f"{opening} {_name(main)} {_joined([f'reads {_percent(reads)} of the keys', *said])}"]
    if is_trained(main):
        clauses += [_against(method, own[method], subject, measures) for method in _rivals(own, measures)]
    else:
        clauses[0] = f"No trained {trained} was measured; {clauses[0][0].lower()}{clauses[0][1:]}"
    clauses += _floors(first, measures[0], setting, reads)
    if any(row.task == "needle" for row in rows) and not _comparable(rows, "needle"):
        clauses.append("the needles judge no method, because dense attention finds none")
    return "; ".join(filter(None, clauses)) + "."


def _calibrated_settings(rows: list[EvalRow], reads: float) -> dict[str, str]:
    """Returns, for methods whose settings are shares of the keys, the setting whose reads are nearest to ``reads``."""
    found: dict[str, EvalRow] = {}
    for row in rows:
        nearest = found.get(row.method, row)
        if row.method.endswith(", calibrated") and abs(_reads(row) - reads) <= abs(_reads(nearest) - reads):
            found[row.method] = row
    return {method: row.setting for method, row in found.items()}


def _measures(rows: list[EvalRow]) -> list[Measure]:
    """Returns the measures that ``rows`` have; recall, which explains the other scores, only where it is alone."""
    found = [measure for measure in MEASURES if _comparable(rows, measure.task)]
    return [measure for measure in found if measure.task != "recall"] or found


def _rivals(own: dict[str, dict[str, EvalRow]], measures: list[Measure]) -> list[str]:
    """Returns the other trained methods and the best one that needs no training."""
    untrained = [method for method in own if _needs_no_training(method)]
    best = [max(untrained, key=lambda method: _rank(own[method], measures))] if untrained else []
    return [method for method in own if is_trained(method)] + best


def _floors(rows: list[EvalRow], measure: Measure, setting: str, reads: float) -> list[str]:
    """Returns clauses on what any method should exceed: random blocks or buckets, and the window, which has no setting."""
    random = ("random", "random buckets")
    floors = [row for row in rows if row.method == WINDOW or (row.method in random and row.setting == setting)]
    return [f"{_name(row.method)} {measure.states(row)}{_other_reads(_reads(row), reads)}" for row in floors]


def _comparable(rows: list[EvalRow], task: str) -> list[EvalRow]:
    """Returns the rows of ``task`` at its longest prompts that can be compared with dense attention."""
    own = [row for row in rows if row.task == task and row.selectivity is not None]
    if task in ("needle", "ruler", "prompts"):
        own = [row for row in own if row.ratio_to_dense is not None]
    longest = max((row.extra.get("length", 0) for row in own), default=0)
    return [row for row in own if row.extra.get("length", 0) == longest]


def _main_method(rows: list[EvalRow], trained: str) -> str | None:
    """Returns the method that the sentence is about: a trained one, else the best one that needs no training."""
    methods = list(dict.fromkeys(row.method for row in rows))
    named = [method for method in methods if method.startswith(trained)]
    named = [method for method in named if is_trained(method)] or named
    if named:
        return named[0]
    measure = next(measure for measure in MEASURES if measure.task == rows[0].task)
    untrained = [method for method in methods if _needs_no_training(method)]
    fewest = [min((row for row in rows if row.method == method), key=_reads) for method in untrained]
    return max(fewest, key=measure.value).method if fewest else None


def _against(method: str, found: dict[str, EvalRow], subject: dict[str, EvalRow], measures: list[Measure]) -> str:
    """Returns the clause that compares ``method`` with the subject of the sentence; an empty string without common tasks."""
    both = [measure for measure in measures if measure.task in found and measure.task in subject]
    if not both:
        return ""
    signs = [_sign(measure.value(found[measure.task]), measure.value(subject[measure.task])) for measure in both]
    said = _joined([measure.compares(found[measure.task], sign) for measure, sign in zip(both, signs, strict=True)])
    mine, theirs = _reads(next(iter(subject.values()))), _reads(next(iter(found.values())))
    said += _other_reads(theirs, mine)
    if any(signs) and not any(_told_apart(found[measure.task], subject[measure.task]) for measure in both):
        said += ", within the 95 % intervals"
    if is_trained(method):
        return f"{_name(method)} {said}"
    good = min(signs) >= 0 and theirs <= (1 + SAME_READS) * mine
    needs = "which needs no classifier" if method.startswith("k-means") else "which is not trained"
    if method == "quest" and signs[0] > 0:
        needs += " but scores every query instead of blocks of queries"
    return f"{_name(method)}, {needs}, {said}{', so training gains nothing here' if good else ''}"


def _told_apart(one: EvalRow, other: EvalRow) -> bool:
    """Returns whether two rows differ by more than chance; True if a row has no interval.

    The 95 % interval of the differences on the same samples decides, else whether the intervals of the rows overlap.
    """
    if (difference := _difference(one.extra, other.extra)) is not None:
        return not difference[0] <= 0 <= difference[1]
    bounds = [row.extra.get("ratio_interval") or row.interval for row in (one, other)]
    if bounds[0] is None or bounds[1] is None:
        return True
    return bounds[0][1] < bounds[1][0] or bounds[1][1] < bounds[0][0]


def _difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float] | None:
    """Returns the 95 % interval of differences on the same samples, from ``extra`` of two rows; None without such."""
    if "losses" in one and "losses" in other:
        return mean_interval([a - b for a, b in zip(one["losses"], other["losses"], strict=True)])
    if "scores" in one and "scores" in other:
        tasks = [zip(scores, other["scores"][task], strict=True) for task, scores in one["scores"].items()]
        return stratified_interval([[a - b for a, b in pairs] for pairs in tasks])
    return None


def _other_reads(theirs: float, mine: float) -> str:
    """Returns the share of keys that another method reads, if it differs."""
    return "" if abs(theirs - mine) <= SAME_READS * mine else f" with {_percent(theirs)} of the keys"


def _rank(found: dict[str, EvalRow], measures: list[Measure]) -> tuple[float, ...]:
    return tuple(measure.value(found[measure.task]) if measure.task in found else float("-inf") for measure in measures)


def _speed(rows: Sequence[EvalRow]) -> str:
    """Returns the sentence on the measured times of prefill and decoding, relative to dense attention."""
    rows = [row for row in rows if is_of_one_prompt(row)]
    prefill = _timed(rows, ("latency", "perplexity", "needle"), "gate")
    decoding = _timed(rows, ("decoding",), _trained_router(rows))
    parts = []
    if prefill and (ratio := _time_ratio(rows, prefill)):
        length = f" of {prefill.extra['length']:,} tokens" if "length" in prefill.extra else ""
        parts.append(f"a prefill{length} with {_name(prefill.method)} ({prefill.setting}) {_times(ratio)}")
    if decoding and decoding.ratio_to_dense:
        after = f" after {decoding.extra['length']:,} keys"
        ratio, name = 1 / decoding.ratio_to_dense, _name(decoding.method)
        parts.append(f"a decoded token{after} with {name} ({decoding.setting}) {_times(ratio)}")
    if not parts:
        return ""
    said = "; ".join(parts)
    if any(row.extra.get("device") == "cpu" for row in rows):
        return f"On this CPU, whose times say nothing about GPUs, {said}."
    return f"{said[0].upper()}{said[1:]}."


def _timed(rows: Sequence[EvalRow], tasks: tuple[str, ...], trained: str) -> EvalRow | None:
    """Returns the row with the longest prompt and the fewest keys, in the first of ``tasks`` that has one.

    Trained methods come first, then untrained gates and classifiers, then Quest and the k-means. Settings in which quality was
    measured are preferred to others.
    """
    for task in tasks:
        own = [row for row in rows if row.task == task and row.latency_s and (row.sparsity is not None or task == "decoding")]
        own = [row for row in own if row.method.startswith((trained, "quest", "k-means"))]
        judged = {row.setting for row in rows if row.task in (measure.task for measure in MEASURES)}
        own = [row for row in own if row.setting in judged] or own
        if own:
            order = [(not is_trained(row.method), not row.method.startswith(trained)) for row in own]
            keys = [(-row.extra.get("length", 0), rank, _reads(row)) for row, rank in zip(own, order, strict=True)]
            return own[keys.index(min(keys))]
    return None


def _time_ratio(rows: Sequence[EvalRow], sparse: EvalRow) -> float | None:
    """Returns the time of ``sparse`` over that of the fastest dense attention on the same prompts."""
    same = (row for row in rows if row.task == sparse.task and row.method.split(",")[0] == "dense")
    dense = [row.latency_s for row in same if row.latency_s and row.extra.get("length") == sparse.extra.get("length")]
    return sparse.latency_s / min(dense) if sparse.latency_s and dense else None


def _times(ratio: float) -> str:
    if abs(ratio - 1) <= SAME_TIME:
        return "takes as long as with dense attention"
    if ratio > 1:
        return f"takes {ratio:.3g} times as long as with dense attention"
    return f"is {1 / ratio:.3g} times as fast as with dense attention"


def _rise(row: EvalRow) -> float:
    """Returns the percentage by which perplexity rises, as it is shown."""
    rise = 100 * ((row.ratio_to_dense or 1.0) - 1)
    return round(rise, 1) if abs(rise) < 10 else round(rise)


def _raises(row: EvalRow, sign: int | None = None) -> str:
    rise = _rise(row)
    if rise == 0:
        return "leaves perplexity unchanged"
    if rise < 0:
        return f"lowers perplexity by {-rise:g} %"
    amounts = {None: f"{rise:g} %", 1: f"less ({rise:g} %)", 0: f"as much ({rise:g} %)", -1: f"more ({rise:g} %)"}
    return f"raises perplexity by {amounts[sign]}"


MEASURES = (
    Measure(
        "needle",
        lambda row: _shown_percent(row.ratio_to_dense),
        lambda row: f"finds {_percent(row.ratio_to_dense)}",
        " of the needles of dense attention",
        lambda row, sign: f"finds {('as many', 'more', 'fewer')[sign]} ({_percent(row.ratio_to_dense)})",
    ),
    Measure(
        "ruler",
        lambda row: _shown_percent(row.score),
        lambda row: f"scores {_percent(row.score)}",
        " in RULER",
        lambda row, sign: f"scores {('as much', 'more', 'less')[sign]} ({_percent(row.score)})",
    ),
    Measure("perplexity", lambda row: -_rise(row), _raises, "", _raises),
    Measure(
        "prompts",
        lambda row: round(row.score, 2),
        lambda row: f"answers {round(row.score * row.samples)} of {row.samples}",
        " prompts as expected",
        lambda row, sign: f"answers {('as many', 'more', 'fewer')[sign]} ({round(row.score * row.samples)})",
    ),
    Measure(
        "recall",
        lambda row: _shown_percent(row.score),
        lambda row: f"covers {_percent(row.score)}",
        " of the attention mass",
        lambda row, sign: f"covers {('as much', 'more', 'less')[sign]} ({_percent(row.score)})",
    ),
)


def _needs_no_training(method: str) -> bool:
    blocks, routers = (
        ("quest", "vertical_slash", "mean_pool", "sink_local", "a_shape"),
        ("Quest pages", "LSH", "sink and window"),
    )
    return method in (*blocks, *routers) or (method.startswith("k-means") and "independent" not in method)


def _name(method: str) -> str:
    """Returns a method as the subject of a singular verb."""
    if named := re.fullmatch(r"(.+?) \((\w+)\)(.*)", method):
        base, origin, variant = named.groups()
        return f"the {'shipped' if origin == 'embedded' else origin} {base}{variant}"
    if method.endswith(", untrained"):
        return f"an untrained {method.removesuffix(', untrained')} of the same cost"
    article = "the " if method.startswith(("gate", "classifier", "decode gate", "k-means")) else ""
    return NAMES.get(method) or article + method_title(method)


def _opening(setting: str) -> str:
    kind, _, value = setting.partition(" ")
    return f"At {_percent(float(value))} sparsity" if kind == "sparsity" else f"With {setting}"


def _scope(rows: list[EvalRow]) -> str:
    """Returns the length of the prompts, if all tasks have the same one."""
    lengths = _lengths(rows)
    return f" and {lengths[0]:,} tokens" if len(set(lengths)) == 1 else ""


def _own_length(rows: list[EvalRow], task: str) -> str:
    """Returns the length of the task's prompts, if other tasks have another one."""
    own = _lengths([row for row in rows if row.task == task])
    return f" at {max(own):,} tokens" if own and len(set(_lengths(rows))) > 1 else ""


def _lengths(rows: list[EvalRow]) -> list[int]:
    """Returns the lengths of the rows; prompts of the user differ in length."""
    return [row.extra["length"] for row in rows if "length" in row.extra and row.task != "prompts"]


def _reads(row: EvalRow) -> float:
    return 1.0 if row.selectivity is None else row.selectivity


def _sign(theirs: float, mine: float) -> int:
    return (theirs > mine) - (theirs < mine)


def _percent(share: float | None) -> str:
    """Returns a share in percent, with a decimal place below 10 % where it is not zero."""
    return f"{_shown_percent(share):g} %"


def _shown_percent(share: float | None) -> float:
    value = 100 * (share or 0.0)
    return round(value) if value >= 10 else round(value, 1)


def _joined(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))

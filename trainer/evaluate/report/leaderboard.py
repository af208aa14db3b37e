"""RULER's scores in the layout of kvpress' leaderboard: a line for each method, a column for each share of keys left out."""

from collections.abc import Sequence
from statistics import fmean

from msattn.trainer.evaluate.row import EvalRow


def leaderboard(rows: Sequence[EvalRow]) -> str:
    """Returns a table in Markdown for each length of the prompts; empty without rows."""
    lengths = sorted({row.extra["length"] for row in rows})
    return "\n".join(_table([row for row in rows if row.extra["length"] == length], length) for length in lengths)


def _table(rows: list[EvalRow], length: int) -> str:
    found = dict.fromkeys(map(_column, rows))
    columns = sorted(found, key=lambda name: (0, float(name[:-2])) if name.endswith(" %") else (1, 0))
    methods = {row.method: {_column(own): own for own in rows if own.method == row.method} for row in rows}
    best_first = sorted(methods, key=lambda method: fmean(row.score for row in methods[method].values()), reverse=True)
    lines = [
        [method.label, *(_cell(methods[method].get(name)) for name in columns)]
        for method in sorted(best_first, key=lambda method: not method.is_dense)
    ]
    table = [["method", *columns], ["---"] * (1 + len(columns)), *lines]
    title = f"RULER, {rows[0].samples} prompts of {length:,} tokens: score (keys read), both in %, by the share left out"
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in table), ""])


def _column(row: EvalRow) -> str:
    """Returns the requested share of blocks or keys to leave out (kvpress' compression ratio), or else the setting."""
    if row.method.is_dense:
        return "0 %"
    left_out = row.setting.left_out
    return str(row.setting) if left_out is None else f"{100 * left_out:.4g} %"


def _cell(row: EvalRow | None) -> str:
    return f"{100 * row.score:.1f} ({100 * (row.selectivity or 0):.1f})" if row else ""

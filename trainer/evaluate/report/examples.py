"""Example answers: one table for each prompt, with the answer of every method."""

from collections.abc import Iterable
from html import escape
from typing import Any

from msattn.trainer.evaluate.report.captions import EXAMPLES, NEEDLE_EXAMPLES
from msattn.trainer.evaluate.report.elements import table
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.methods.base import Method

MOST_NEEDLES = 2  # prompts with needles that are shown
PROMPT_CHARACTERS = 700  # the end of a longer prompt is shown


def examples(rows: list[EvalRow]) -> str:
    """Returns the section's HTML; an empty string if no row has ``extra["examples"]``.

    Each example is ``{"prompt": str, "expected": str, "answer": str, "correct": bool}``, and examples of one index have the
    same prompt in all rows of a task and length. Without an expected answer, no answer is marked.
    """
    parts = []
    for task in dict.fromkeys(row.task for row in rows if row.extra.get("examples")):
        own = _one_row_per_method(row for row in rows if row.task == task and row.extra.get("examples"))
        parts.append(f"<p>{EXAMPLES}{NEEDLE_EXAMPLES if task == 'needle' else ''}</p>")
        prompts = list(zip(*(row.extra["examples"] for row in own), strict=True))
        shown = sorted(prompts, key=_agreement)[:MOST_NEEDLES] if task == "needle" else prompts
        parts += [_prompt(list(zip(own, answers, strict=True))) for answers in shown]
    return "\n".join(parts)


def _agreement(answers: tuple[dict[str, Any], ...]) -> float:
    """Returns how far the methods agree on a prompt: 0 if half of them are right, 1 if all are right or all are wrong."""
    right = sum(answer["correct"] for answer in answers) / len(answers)
    return abs(2 * right - 1)


def _one_row_per_method(rows: Iterable[EvalRow]) -> list[EvalRow]:
    """Returns the row of each method with the longest prompts and the fewest keys read."""
    best: dict[Method, EvalRow] = {}
    for row in rows:
        best[row.method] = min(best.get(row.method, row), row, key=_order)
    return list(best.values())


def _order(row: EvalRow) -> tuple[int, float]:
    return -row.extra.get("length", 0), 1.0 if row.selectivity is None else row.selectivity


def _prompt(answers: list[tuple[EvalRow, dict[str, Any]]]) -> str:
    first = answers[0][1]
    prompt, expected = first["prompt"], (first.get("expected") or "").strip()
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = f"… {prompt[-PROMPT_CHARACTERS:]}"
    parts = prompt.split(expected) if expected else [prompt]
    shown = f"<mark>{escape(expected)}</mark>".join(map(escape, parts))
    columns = {
        "method": [row.method.label for row, _ in answers],
        "setting": [row.setting for row, _ in answers],
        "answer": [f"{_mark(example, expected)}{example['answer']}" for _, example in answers],
    }
    wanted = f"<p>Expected answer: <mark>{escape(expected)}</mark></p>" if expected else ""
    body = table(columns, bold=[row.method.is_trained for row, _ in answers])
    return f'<blockquote>{shown}</blockquote>\n{wanted}\n<div class="answers">{body}</div>'


def _mark(example: dict[str, Any], expected: str) -> str:
    return ("✓ " if example["correct"] else "✗ ") if expected else ""

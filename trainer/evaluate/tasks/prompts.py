"""The user's own prompts: whether dense and sparse attention give the expected answers."""

from statistics import fmean
from typing import Any

from torch import Tensor

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.prompts import Prompt, read_prompts
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.intervals import wilson
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, ratio_to
from msattn.trainer.evaluate.task import BOUNDS, SHARE, Quality, Task
from msattn.trainer.evaluate.tasks.answers import Answers, Question, answer, paired_answers
from msattn.trainer.models.chat import common_prefix, encode_prompt
from msattn.trainer.models.families import check_length
from msattn.trainer.models.loading import Described, Loaded

MOST_EXAMPLES = 20  # prompts whose answers the report shows


def run(job: Job) -> list[EvalRow]:
    """Returns rows of dense attention, of each block selection, and of each routing with its own
    number of probes.
    """
    loaded, settings = job.loaded, job.cfg.eval.prompts
    prompts, encoded = read_prompts(settings.path), job.prepared["prompts"]
    tried = job.compared.with_independent(settings.independent).cases(
        loaded.model, settings.sparsities
    )
    advance = job.bar("prompts", len(tried) * len(prompts))
    questions = [Question(ids, settings.max_new_tokens) for ids in encoded]
    rows: list[EvalRow] = []
    dense: Answers | None = None
    for case in tried:
        answers = answer(loaded, questions, case, advance)
        dense = dense or answers
        rows.append(as_row(case, prompts, encoded, answers, dense, rows[0].score if rows else None))
    return rows


def check_config(cfg: EvalRunConfig) -> None:
    """Raises UserError if there is no such file, or it is malformed."""
    read_prompts(cfg.eval.prompts.path)


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> list[Tensor]:
    """Returns the tokens ``[1, N]`` of each prompt; raises UserError for one that is longer than
    the model's positions.
    """
    settings = cfg.eval.prompts
    encoded = [
        encode_prompt(model.tokenizer, entry.prompt, cfg.chat)
        for entry in read_prompts(settings.path)
    ]
    for number, ids in enumerate(encoded, start=1):
        given = (
            f"prompt {number} of {settings.path}, with {ids.shape[1]} tokens, and "
            f"max_new_tokens={settings.max_new_tokens}"
        )
        check_length(model.config, ids.shape[1] + settings.max_new_tokens, given)
    return encoded


def as_row(
    case: MethodSetting,
    prompts: list[Prompt],
    encoded: list[Tensor],
    answers: Answers,
    dense: Answers,
    dense_score: float | None,
) -> EvalRow:
    """Returns the row of a method; ``dense_score`` is that of dense attention, None for dense
    attention itself.
    """
    correct = [
        prompt.is_answered_by(text) for prompt, text in zip(prompts, answers.texts, strict=True)
    ]
    score = sum(correct) / len(correct)
    extra = {
        "length": max(ids.shape[1] for ids in encoded),
        "latency_of": "a prompt and its answer",
        "correct": correct,
        "same_as_dense": fmean(map(share_of_equal_tokens, answers.tokens, dense.tokens)),
        "examples": [
            {"prompt": prompt.text, "expected": prompt.answer, "answer": text, "correct": right}
            for prompt, text, right in zip(prompts, answers.texts, correct, strict=True)
        ][:MOST_EXAMPLES],
    }
    interval, ratio = wilson(sum(correct), len(correct)), ratio_to(dense_score, score)
    fields: dict[str, Any] = {
        "ratio_to_dense": ratio,
        "samples": len(correct),
        "extra": extra,
        **answers.spent,
    }
    return EvalRow(
        "prompts",
        case.method,
        case.setting,
        score,
        "answers as expected",
        interval=interval,
        **fields,
    )


def share_of_equal_tokens(tokens: list[int], dense: list[int]) -> float:
    """Returns the share of the dense answer's tokens before the first one that differs."""
    return common_prefix(tokens, dense) / len(dense) if dense else 1.0


TASK = Task(
    heading="Own prompts",
    unit="prompts per row",
    columns={
        "as expected": SHARE,
        "95 % interval": BOUNDS,
        "tokens as dense": ("same_as_dense", "{:.1%}"),
    },
    quality=Quality("own prompts as expected", paired_answers),
)

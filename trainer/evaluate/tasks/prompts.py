"""The user's own prompts: whether dense and sparse attention give the expected answers."""

from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.prompts import Prompt, read_prompts
from msattn.trainer.evaluate.intervals import wilson
from msattn.trainer.evaluate.methods import ComparedMethods, with_independent
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.tasks.answers import Answers, MethodSetting, Question, answer, cases
from msattn.trainer.models.chat import encode_prompt
from msattn.trainer.models.families import check_length

if TYPE_CHECKING:
    from msattn.trainer.models.loading import Loaded
    from msattn.trainer.progress import Progress

MOST_EXAMPLES = 20  # prompts whose answers the report shows


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: ComparedMethods, progress: "Progress") -> list[EvalRow]:
    """Returns rows of dense attention, of each block selection, and of each routing with its own number of probes.

    Raises
    ------
    UserError : as :func:`msattn.trainer.data.prompts.read_prompts`, or a prompt is longer than the model's positions.
    """
    settings = cfg.eval.prompts
    prompts, encoded = read_prompts(settings.path), encoded_prompts(loaded, cfg)
    if settings.independent:
        methods = replace(methods, bucket_routings=with_independent(methods.bucket_routings))
    tried = cases(loaded, methods, settings.sparsities)
    advance = partial(progress.advance, progress.add_task("prompts", total=len(tried) * len(prompts)))
    questions = [Question(ids, settings.max_new_tokens) for ids in encoded]
    found = [answer(loaded, questions, case, advance) for case in tried]
    dense = as_row(tried[0], prompts, encoded, found[0], found[0], None)
    sparse = zip(tried[1:], found[1:], strict=True)
    return [dense, *(as_row(case, prompts, encoded, answers, found[0], dense) for case, answers in sparse)]


def encoded_prompts(loaded: "Loaded", cfg: EvalRunConfig) -> list[Tensor]:
    """Returns the tokens ``[1, N]`` of each prompt; raises UserError as :func:`run`."""
    settings = cfg.eval.prompts
    encoded = [encode_prompt(loaded.tokenizer, each.prompt, cfg.chat) for each in read_prompts(settings.path)]
    for number, ids in enumerate(encoded, start=1):
        given = f"prompt {number} of {settings.path}, with {ids.shape[1]} tokens, and max_new_tokens={settings.max_new_tokens}"
        check_length(loaded.model.config, ids.shape[1] + settings.max_new_tokens, given)
    return encoded


def as_row(
    case: MethodSetting,
    prompts: list[Prompt],
    encoded: list[Tensor],
    answers: Answers,
    dense: Answers,
    dense_row: EvalRow | None,
) -> EvalRow:
    """Returns the row of a method; ``dense_row`` is that of dense attention, None for dense attention itself."""
    correct = [prompt.is_answered_by(text) for prompt, text in zip(prompts, answers.texts, strict=True)]
    score = sum(correct) / len(correct)
    ratio = None if dense_row is None or not dense_row.score else score / dense_row.score
    return EvalRow(
        task="prompts",
        method=case.method,
        setting=case.setting,
        score=score,
        score_name="answers as expected",
        interval=wilson(sum(correct), len(correct)),
        ratio_to_dense=1.0 if dense_row is None else ratio,
        sparsity=answers.sparsity,
        selectivity=answers.selectivity,
        latency_s=answers.seconds,
        peak_memory_mb=answers.peak_mb,
        samples=len(correct),
        extra={
            "length": max(ids.shape[1] for ids in encoded),
            "latency_of": "a prompt and its answer",
            "correct": correct,
            "same_as_dense": fmean(map(share_of_equal_tokens, answers.tokens, dense.tokens)),
            "examples": [
                {"prompt": prompt.text, "expected": prompt.answer, "answer": text, "correct": right}
                for prompt, text, right in zip(prompts, answers.texts, correct, strict=True)
            ][:MOST_EXAMPLES],
        },
    )


def share_of_equal_tokens(tokens: list[int], dense: list[int]) -> float:
    """Returns the share of the dense answer's tokens before the first one that differs."""
    equal = next((i for i, (one, other) in enumerate(zip(tokens, dense, strict=False)) if one != other), len(dense))
    return min(equal, len(tokens)) / len(dense) if dense else 1.0

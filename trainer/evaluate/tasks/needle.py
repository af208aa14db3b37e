"""Needle in a haystack: retrieval of a number that the context states once.

A sample is correct if each token of the number is the most likely one after the correct tokens
before it. White space that some tokenizers make a token of its own before the number is given,
since it does not depend on the needle.

Block selections read the prompt in one sparse prefill, which has to find the answer's first token,
then decode the others, as ``generate`` does; in one pass with the prompt, the answer's own queries
would choose blocks for the question. Routing runs a dense prefill of the context, then decodes the
question and the answer token by token; with ``question=dense`` the question is part of the prefill.
All methods use the same samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.tasks.sequences import NeedlePrompt, crop_from, needle_prompt
from msattn.trainer.data.tasks.wordings import HELD_OUT
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import ComparedRouting, MethodSetting
from msattn.trainer.evaluate.intervals import wilson
from msattn.trainer.evaluate.job import Job, Measurement, haystack
from msattn.trainer.evaluate.row import WINDOW, EvalRow, ratio_to
from msattn.trainer.evaluate.task import BOUNDS, RATIO, SHARE, TOKENS, Quality, Task
from msattn.trainer.evaluate.tasks.answers import paired_answers, read_and_spent
from msattn.trainer.evaluate.tasks.timing import cost
from msattn.trainer.models import output_logits
from msattn.trainer.models.chat import around_prompt
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import run_backbone
from msattn.trainer.serving.attach import Sparse

BATCH_TOKENS = 32768  # tokens of one forward pass
EXCERPT = 90  # characters of the text around a needle that the report shows
HAYSTACK_TOKENS = 1_000_000  # text that the prompts are cut from, unless lengths need more


@dataclass(frozen=True)
class Samples:
    """Prompts of one length, answers included: tokens ``[n, length]``, and what is asked for in
    each, at which depth.
    """

    ids: Tensor
    prompts: list[NeedlePrompt]  # without the tokens that open a chat
    # number of last tokens that a routed model decodes one by one, including the last one, which is
    # only a target
    decoded: int
    depths: list[float]
    tokenizer: Any

    @cached_property
    def judged(self) -> list[int]:
        """Numbers of last tokens that depend on the needle: of the answers without a token of white
        space that begins them.
        """
        counts = []
        for ids, prompt in zip(self.ids, self.prompts, strict=True):
            texts = [self.tokenizer.decode([id]) for id in ids[-prompt.answer_tokens :].tolist()]
            counts.append(
                len(texts) - next((at for at, text in enumerate(texts) if text.strip()), 0)
            )
        return counts

    @property
    def longest(self) -> int:
        return max(prompt.answer_tokens for prompt in self.prompts)

    def batches(self) -> tuple[Tensor, ...]:
        return self.ids.split(max(1, BATCH_TOKENS // self.ids.shape[1]))

    def prefills(self) -> list[tuple[list[int], int]]:
        """Returns the samples of each prefill, and how many of their tokens it reads: those before
        the :attr:`judged` ones.
        """
        groups: dict[int, list[int]] = {}
        for number, judged in enumerate(self.judged):
            groups.setdefault(self.ids.shape[1] - judged, []).append(number)
        size = max(1, BATCH_TOKENS // self.ids.shape[1])
        return [
            (rows[at : at + size], tokens)
            for tokens, rows in groups.items()
            for at in range(0, len(rows), size)
        ]

    def found(self, predicted: Tensor) -> list[bool]:
        """Returns True for each sample whose :attr:`judged` tokens are correct.
        ``predicted [n, longest]``: the last ones.
        """
        correct = predicted.cpu() == self.ids[:, -self.longest :]
        return [bool(row[-judged:].all()) for row, judged in zip(correct, self.judged, strict=True)]

    def examples(self, predicted: Tensor) -> list[dict[str, Any]]:
        """Returns a prompt of each depth with the ``expected`` and the predicted ``answer``; the
        same for every method.
        """
        correct, decode, shown = self.found(predicted), self.tokenizer.decode, []
        for i in (self.depths.index(depth) for depth in dict.fromkeys(self.depths)):
            asked, last = self.prompts[i], self.judged[i]
            prompt = decode(self.ids[i, :-last], skip_special_tokens=True)
            expected = decode(self.ids[i, -last:])
            given = {
                "expected": expected,
                "answer": decode(predicted[i, -last:]),
                "correct": correct[i],
            }
            shown.append({"prompt": excerpt(prompt, asked.statement, asked.question), **given})
        return shown


class NeedleResult(NamedTuple):
    """The most likely tokens at the last ``longest`` positions ``[n, longest]``, and the fields of
    a row for reads and cost.

    The seconds are those of a prefill, or of a decoded token.
    """

    predicted: Tensor
    spent: dict[str, Any]


def run(job: Job) -> list[EvalRow]:
    return [row for samples in job.prepared["needle"] for row in _at_length(job, samples)]


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> list[Samples]:
    """Returns the prompts of each length; raises UserError for a length that is too short for
    needles and question.
    """
    text = read_haystack(cfg, model.tokenizer)
    return [make_samples(cfg, model.tokenizer, text, length) for length in cfg.eval.needle.lengths]


def _at_length(job: Job, samples: Samples) -> list[EvalRow]:
    loaded, cfg, length = job.loaded, job.cfg, samples.ids.shape[1]
    settings = cfg.eval.needle

    def read(
        case: MethodSetting, advance: Callable[[], None], dense: EvalRow | None
    ) -> list[EvalRow]:
        with case.attach() as sparse:
            result = prefill_samples(loaded, samples, advance, sparse)
        return [as_row(case, samples, result, dense, cfg)]

    def decode(
        method: ComparedRouting,
        asked: list[MethodSetting],
        advance: Callable[[], None],
        dense: EvalRow | None,
    ) -> list[EvalRow]:
        results = decode_samples(loaded, samples, method, asked, advance)
        return [
            as_row(case, samples, result, dense, cfg)
            for case, result in zip(asked, results, strict=True)
        ]

    plan = [
        Measurement(
            ("needle", length, case.method, case.setting),
            partial(read, case),
            len(samples.prefills()),
        )
        for case in job.compared.prefill_cases(loaded.model, settings.sparsities)
    ]
    for number, method in enumerate(
        job.compared.with_independent(settings.independent).bucket_routings
    ):
        every = method.cases(loaded.model, settings.probes, settings.keys)
        # The window alone is the same for every router; a setting that is given twice is measured
        # once.
        asked = [
            *{case.setting: case for case in every if case.method != WINDOW or number == 0}.values()
        ]
        key = "needle", length, number, *(case.setting for case in asked)
        plan.append(
            Measurement(key, partial(decode, method, asked), len(asked) * len(samples.batches()))
        )
    return job.rows(f"needle, {length} tokens", plan)


def read_haystack(cfg: EvalRunConfig, tokenizer: Any) -> np.ndarray:
    """Returns the tokens of the documents in which the needles are hidden, concatenated."""
    enough = max(HAYSTACK_TOKENS, 2 * max(cfg.eval.needle.lengths))
    return data.encode(haystack(cfg.data, cfg.eval.needle.haystack), tokenizer, at_least=enough)


def make_samples(cfg: EvalRunConfig, tokenizer: Any, tokens: np.ndarray, length: int) -> Samples:
    """Returns ``samples`` prompts at each of ``depths``, drawn from the seed, in held-out wordings
    in turn, after BOS.
    """
    settings = cfg.eval.needle
    opening, reply = around_prompt(tokenizer, cfg.chat)
    crop = crop_from(tokens)
    prompts = []
    for number, depth in enumerate(settings.depths):
        for sample in range(settings.samples):
            rng = np.random.default_rng((cfg.seed, length, number, sample))
            wording = HELD_OUT[(number * settings.samples + sample) % len(HELD_OUT)]
            try:
                prompt = needle_prompt(
                    rng,
                    length - len(opening),
                    crop,
                    tokenizer,
                    wording,
                    count=settings.needles,
                    depth=depth,
                    reply=reply,
                )
            except ValueError as error:
                raise UserError(f"eval.needle.lengths={length}: {error}") from error
            prompts.append(prompt)
    asked = max(prompt.question_tokens + prompt.answer_tokens for prompt in prompts)
    decoded = (
        max(prompt.answer_tokens for prompt in prompts) + 1
        if settings.question == "dense"
        else asked
    )
    ids = torch.stack([torch.tensor([*opening, *prompt.ids]) for prompt in prompts])
    depths = [depth for depth in settings.depths for _ in range(settings.samples)]
    return Samples(ids, prompts, decoded, depths, tokenizer)


def excerpt(prompt: str, statement: str, question: str) -> str:
    """Returns the needle ``statement`` with its surroundings and the end of ``prompt``, which is
    the ``question``.
    """
    begin, end = prompt.find(statement), prompt.rindex(question)
    after = begin + len(statement)
    pieces = [
        prompt[max(0, begin - EXCERPT) : after + EXCERPT],
        prompt[max(after, end - EXCERPT) :],
    ]
    return " … ".join(" ".join(piece.split()) for piece in pieces)


@torch.inference_mode()
def prefill_samples(
    loaded: Loaded, samples: Samples, advance: Callable[[], None], sparse: Sparse | None = None
) -> NeedleResult:
    """Reads each prompt in one pass and decodes its answer, with the attention that is attached to
    the model now.
    """
    predicted, seconds, peak = torch.empty_like(samples.ids[:, -samples.longest :]), 0.0, 0.0
    for number, (rows, tokens) in enumerate(samples.prefills()):
        ids, cache = samples.ids[rows].to(loaded.model.device), DynamicCache()
        read = partial(run_backbone, loaded.model, cache=cache)
        if number == 0 and ids.is_cuda:  # not timed: kernels compile at their first call
            run_backbone(loaded.model, ids[:, :tokens], DynamicCache())
        with cost(loaded.model.device) as spent:
            hidden = [read(ids[:, :tokens])[:, -samples.longest :]]
        hidden += [read(id) for id in ids[:, tokens:-1].split(1, 1) if id.numel()]
        predicted[rows] = (
            output_logits(loaded.model, torch.cat(hidden, dim=1)[:, -samples.longest :])
            .argmax(-1)
            .cpu()
        )
        seconds, peak = seconds + spent.seconds, max(peak, spent.peak_mb)
        advance()
    return NeedleResult(predicted, read_and_spent(sparse, seconds / len(samples.ids), peak))


@torch.inference_mode()
def decode_samples(
    loaded: Loaded,
    samples: Samples,
    method: ComparedRouting,
    plan: list[MethodSetting],
    advance: Callable[[], None],
) -> list[NeedleResult]:
    """Returns the result of each case in ``plan``, of ``method``; all share one dense prefill of
    the context.
    """
    predicted: list[list[Tensor]] = [[] for _ in plan]
    spent: list[dict[str, Any]] = [
        {"sparsity": None, "selectivity": 0.0, "latency_s": 0.0, "peak_memory_mb": 0.0}
        for _ in plan
    ]
    for ids in samples.batches():
        ids, share = ids.to(loaded.model.device), len(ids) / len(samples.ids)
        context, steps = ids[:, : -samples.decoded], ids[:, -samples.decoded : -1]
        cache = DynamicCache()
        with method.attach(loaded.model, 0):
            run_backbone(loaded.model, context, cache)
        for case, tokens, sums in zip(plan, predicted, spent, strict=True):
            with case.attach():  # not timed: kernels compile at their first call
                run_backbone(loaded.model, steps[:, :1], cache)
            cache.crop(-1)
            with case.attach() as sparse:
                with cost(loaded.model.device) as measured:
                    hidden = [run_backbone(loaded.model, id, cache) for id in steps.split(1, 1)]
                read = sparse.stats()["selectivity"]  # None if every layer is dense
            cache.crop(-steps.shape[1])
            tokens.append(
                output_logits(loaded.model, torch.cat(hidden[-samples.longest :], dim=1)).argmax(-1)
            )
            sums["selectivity"] += (1.0 if read is None else read) * share
            sums["latency_s"] += measured.seconds / steps.shape[1] * share
            sums["peak_memory_mb"] = max(sums["peak_memory_mb"], measured.peak_mb)
            advance()
    return [
        NeedleResult(torch.cat(tokens), sums) for tokens, sums in zip(predicted, spent, strict=True)
    ]


def as_row(
    case: MethodSetting,
    samples: Samples,
    result: NeedleResult,
    dense: EvalRow | None,
    cfg: EvalRunConfig,
) -> EvalRow:
    """Returns the row of a result; ``dense`` is the row of dense attention, None for dense
    attention itself.
    """
    correct = samples.found(result.predicted)
    accuracy = sum(correct) / len(correct)
    by_depth: dict[str, list[bool]] = {}
    for depth, hit in zip(samples.depths, correct, strict=True):
        by_depth.setdefault(f"{depth:g}", []).append(hit)
    routed = result.spent["sparsity"] is None
    extra = {
        "length": samples.ids.shape[1],
        "needles": cfg.eval.needle.needles,
        "question": cfg.eval.needle.question if routed else "sparse" if dense else "dense",
        "latency_of": "a decoded token, batched" if routed else "a prefill",
        "correct": correct,
        "by_depth": {depth: sum(hits) / len(hits) for depth, hits in by_depth.items()},
        "examples": samples.examples(result.predicted),
    }
    interval = wilson(sum(correct), len(correct))
    ratio = ratio_to(dense.score if dense else None, accuracy)
    fields: dict[str, Any] = {
        "ratio_to_dense": ratio,
        "samples": len(correct),
        "extra": extra,
        **result.spent,
    }
    return EvalRow(
        "needle", case.method, case.setting, accuracy, "needles found", interval=interval, **fields
    )


TASK = Task(
    heading="Needles in a haystack",
    unit="prompts per row",
    columns=TOKENS | {"found": SHARE, "95 % interval": BOUNDS, "vs dense": RATIO},
    text="haystack",
    samples=lambda section: section.samples * len(section.depths),
    quality=Quality("needles found", paired_answers),
)

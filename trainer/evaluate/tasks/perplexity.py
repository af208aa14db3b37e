"""Perplexity of held-out text with dense attention, gates and baselines, at each sparsity.

Beside it stand two measures of quantized models (llama.cpp's): the Kullback-Leibler divergence
KL(dense || sparse) of the predictions in nats, and the share of tokens at which dense and sparse
attention predict the same token.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.chunking import Chunks
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.intervals import Interval, mean_interval, within
from msattn.trainer.evaluate.job import Job, Measurement
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import Difference, Quality, Task
from msattn.trainer.evaluate.tasks.timing import cost
from msattn.trainer.models import tap
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.predictions import token_scores
from msattn.trainer.serving.attach import Sparse


@dataclass(frozen=True)
class PerplexityRun:
    """Measurements of one method: means of :class:`TokenScores` and seconds of the prefill of each
    text, peak MiB over all.

    ``hidden`` are the last hidden states of each text, ``[1, N, hidden]`` on the CPU; kept for
    dense attention only.
    """

    losses: list[float]
    divergences: list[float]
    agreements: list[float]
    seconds: list[float]
    peak_mb: float
    sparsity: float
    recall: float | None = None
    hidden: list[Tensor] = field(default_factory=list)


def run(job: Job) -> list[EvalRow]:
    """Returns a row for dense attention and one for each block selection at each sparsity, on the
    same chunks.
    """
    settings = job.cfg.eval.perplexity
    chunks = job.prepared["perplexity"]
    texts = [chunks[i]["input_ids"] for i in range(len(chunks))]
    num_bytes = sum(chunks.num_bytes(i) for i in range(len(chunks)))
    return compare(job, "perplexity", texts, num_bytes, settings.sparsities)


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> Chunks:
    """Returns the chunks; raises UserError if there is too little held-out text."""
    return heldout_chunks(
        cfg, model.tokenizer, cfg.eval.perplexity.length, cfg.eval.perplexity.num_chunks
    )


def heldout_chunks(cfg: EvalRunConfig, tokenizer: Any, length: int, count: int) -> Chunks:
    """Returns ``count`` held-out chunks of ``length`` tokens, the same for every task and
    method.
    """
    return data.chunks(
        cfg.data, tokenizer, seed=cfg.seed, heldout=True, seq_len=length, num_chunks=count
    )


def compare(
    job: Job, task: str, texts: Sequence[Tensor], num_bytes: int, sparsities: list[float]
) -> list[EvalRow]:
    """Returns the rows of dense attention and of block selections on ``texts``, each ``[length]``;
    they predict ``num_bytes``.

    Dense attention is measured even if its row is kept, since others are compared with each of its
    predictions.
    """
    loaded, length = job.loaded, len(texts[0])
    bits_per_byte = len(texts) * (length - 1) / math.log(2) / num_bytes
    to_row = partial(as_row, task, bits_per_byte_of_nats=bits_per_byte, length=length)
    runs: list[PerplexityRun] = []  # runs of dense attention
    dense_case, *cases = job.compared.prefill_cases(loaded.model, sparsities)

    def dense(advance: Callable[[], None], _: EvalRow | None) -> list[EvalRow]:
        prefill(loaded, texts[0])  # warm-up
        runs.append(measure(loaded, texts, dense_case.attach(), advance, None))
        return [to_row(dense_case, runs[0], runs[0])]

    def sparse(
        case: MethodSetting, advance: Callable[[], None], _: EvalRow | None
    ) -> list[EvalRow]:
        with case.attach(measure_recall=True) as attached:  # not timed: recall needs dense passes
            for ids in texts:
                prefill(loaded, ids)
                advance()
            recall = attached.stats()["recall"]
        measured = measure(loaded, texts, case.attach(), advance, runs[0].hidden)
        return [to_row(case, replace(measured, recall=recall), runs[0])]

    plan = [Measurement(None, dense, len(texts))]
    for case in cases:
        key = task, length, case.method, case.setting
        plan.append(Measurement(key, partial(sparse, case), 2 * len(texts)))
    return job.rows(f"{task}, {length} tokens", plan)


@torch.inference_mode()
def prefill(loaded: Loaded, input_ids: Tensor) -> Tensor:
    """Returns the last hidden states ``[1, N, hidden]`` of tokens ``[N]``, in one pass without a
    cache.
    """
    return tap.run_backbone(loaded.model, input_ids[None].to(loaded.model.device))


def measure(
    loaded: Loaded,
    texts: Sequence[Tensor],
    attached: AbstractContextManager[Sparse | None],
    advance: Callable[[], None],
    dense: Sequence[Tensor] | None,
) -> PerplexityRun:
    """Measures every text inside the context ``attached``; ``dense`` are dense states, None: this
    is their run.
    """
    scores: list[tuple[float, ...]] = []
    hidden_states, seconds, peaks = [], [], []
    with attached as sparse:
        for number, ids in enumerate(texts):
            with cost(loaded.model.device) as spent:
                hidden = prefill(loaded, ids)
            seconds.append(spent.seconds)
            peaks.append(spent.peak_mb)
            by_token = token_scores(
                loaded.model, hidden, ids, None if dense is None else dense[number]
            )
            scores.append(tuple(values.double().mean().item() for values in by_token))
            if dense is None:
                hidden_states.append(hidden.cpu())
            advance()
        losses, divergences, agreements = map(list, zip(*scores, strict=True))
        sparsity = sparse.stats()["sparsity"] if sparse else 0.0
        return PerplexityRun(
            losses, divergences, agreements, seconds, max(peaks), sparsity, hidden=hidden_states
        )


def as_row(
    task: str,
    case: MethodSetting,
    run: PerplexityRun,
    dense: PerplexityRun,
    bits_per_byte_of_nats: float,
    length: int,
) -> EvalRow:
    """Returns the row of a run; raises UserError if its loss is not finite."""
    loss, spread = fmean(run.losses), mean_interval(run.losses)
    if not math.isfinite(loss):
        raise UserError(f"{case.method} {case.setting}: the loss is {loss}; dtype=float32 may help")
    ratio, ratio_interval = _ratio(run.losses, dense.losses)
    extra = {
        "length": length,
        "bits_per_byte": loss * bits_per_byte_of_nats,
        "ratio_interval": ratio_interval,
        "kl_divergence": fmean(run.divergences),
        "kl_interval": within(mean_interval(run.divergences), high=math.inf),
        "same_top": fmean(run.agreements),
        "same_top_interval": within(mean_interval(run.agreements)),
        "losses": run.losses,
    }
    return EvalRow(
        task, case.method, case.setting, math.exp(loss), "perplexity",
        interval=spread and (math.exp(spread[0]), math.exp(spread[1])), ratio_to_dense=ratio,
        sparsity=run.sparsity, selectivity=1 - run.sparsity, recall=run.recall,
        latency_s=median(run.seconds), peak_memory_mb=run.peak_mb, samples=len(run.losses),
        extra=extra,
    )  # fmt: skip


def _ratio(losses: list[float], others: list[float]) -> tuple[float, Interval | None]:
    """Returns the ratio of two perplexities of the same texts, with its interval from the paired
    differences.
    """
    differences = [a - b for a, b in zip(losses, others, strict=True)]
    bounds = mean_interval(differences)
    return math.exp(fmean(differences)), bounds and (math.exp(bounds[0]), math.exp(bounds[1]))


def paired_losses(one: EvalRow, other: EvalRow) -> Difference:
    """Returns the relative difference of two perplexities of the same texts."""
    ratio, bounds = _ratio(one.extra["losses"], other.extra["losses"])
    return ratio - 1, bounds and (bounds[0] - 1, bounds[1] - 1)


def above_dense(name: str) -> Quality:
    return Quality(
        name,
        paired_losses,
        better=-1,
        value=lambda row: (row.ratio_to_dense or math.inf) - 1,
        form="+.1%",
    )


COLUMNS = {
    "perplexity": ("score", "{:.3f}"),
    "vs dense": ("ratio_to_dense", "{:.4f}"),
    "95 % interval": ("ratio_interval", "{:.4f}"),
    "KL": ("kl_divergence", "{:.4f}"),
    "KL, 95 %": ("kl_interval", "{:.4f}"),
    "same top": ("same_top", "{:.1%}"),
    "same top, 95 %": ("same_top_interval", "{:.1%}"),
    "bits per byte": ("bits_per_byte", "{:.3f}"),
}
TASK = Task(
    heading="Perplexity of held-out text",
    unit="chunks of {length:,} tokens",
    columns=COLUMNS,
    reads=("blocks",),
    text="heldout",
    form="{:.3f}",
    samples=lambda section: section.num_chunks,
    scored=True,
    quality=above_dense("perplexity above dense"),
)

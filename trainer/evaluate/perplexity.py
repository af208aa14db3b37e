"""Perplexity of held-out text with dense attention, gates and baselines, at each sparsity."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.cost import cost
from msattn.trainer.evaluate.intervals import mean_interval
from msattn.trainer.evaluate.methods import ComparedMethods
from msattn.trainer.evaluate.partial import PartialRows
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models import output_logits, tap

if TYPE_CHECKING:
    from rich.progress import Progress

    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded

LOGIT_ROWS = 2048  # tokens whose logits are in memory at once; fp32 logits over a vocabulary of 128k take 1 GB


@dataclass(frozen=True)
class PerplexityRun:
    """Measurements of one method: mean token loss (nats) and prefill seconds of each text, peak MiB over all texts."""

    losses: list[float]
    seconds: list[float]
    peak_mb: float
    sparsity: float
    recall: float | None = None


def run(
    loaded: "Loaded", cfg: EvalRunConfig, methods: ComparedMethods, progress: "Progress", kept: PartialRows
) -> list[EvalRow]:
    """Returns a row for dense attention and one for each block selection at each sparsity, on the same chunks."""
    settings = cfg.eval.perplexity
    chunks = data.chunks(
        cfg.data,
        loaded.tokenizer,
        seed=cfg.seed,
        heldout=True,
        seq_len=settings.length,
        num_chunks=settings.num_chunks,
    )
    texts = [chunks[i]["input_ids"] for i in range(len(chunks))]
    num_bytes = sum(chunks.num_bytes(i) for i in range(len(chunks)))
    return compare("perplexity", loaded, texts, num_bytes, methods, settings.sparsities, progress, kept)


def compare(
    task: str,
    loaded: "Loaded",
    texts: Sequence[Tensor],
    num_bytes: int,
    methods: ComparedMethods,
    sparsities: list[float],
    progress: "Progress",
    kept: PartialRows,
) -> list[EvalRow]:
    """Returns the rows of dense attention and of block selections on ``texts``, each ``[length]``.

    Parameters
    ----------
    num_bytes : UTF-8 bytes of all predicted tokens.
    kept : rows that are not measured again. Dense attention is, since others are compared with each of its losses.
    """
    length = len(texts[0])
    plan = [(method, label, select) for method in methods.block_selections for label, select in method.settings(sparsities)]
    left = sum(kept.get(task, length, method.name, label) is None for method, label, _ in plan)
    advance = partial(progress.advance, progress.add_task(f"{task}, {length} tokens", total=(2 * left + 1) * len(texts)))
    bits_per_byte = len(texts) * (length - 1) / math.log(2) / num_bytes
    to_row = partial(as_row, task, bits_per_byte_of_nats=bits_per_byte, length=length)
    prefill(loaded, texts[0])  # warm-up
    dense = measure(loaded, texts, nullcontext(), advance)
    rows = [to_row("dense", "", dense, dense)]
    for method, label, select in plan:
        key = task, length, method.name, label
        if found := kept.get(*key):
            rows += found
            continue
        with method.attach(loaded.model, select, measure_recall=True) as sparse:  # not timed: recall needs dense passes
            for ids in texts:
                prefill(loaded, ids)
                advance()
            recall = sparse.stats()["recall"]
        sparse_run = measure(loaded, texts, method.attach(loaded.model, select), advance)
        rows += kept.add([to_row(method.name, label, replace(sparse_run, recall=recall), dense)], *key)
    return rows


@torch.inference_mode()
def prefill(loaded: "Loaded", input_ids: Tensor) -> Tensor:
    """Returns the last hidden states ``[B, N, hidden]`` of tokens ``[N]`` or ``[B, N]``, in one pass without a cache."""
    ids = torch.atleast_2d(input_ids).to(loaded.model.device)
    return tap.run_backbone(loaded.model, ids)


def logits(loaded: "Loaded", hidden: Tensor) -> Tensor:
    """Applies the model's head to ``hidden [..., hidden]``: ``[..., vocabulary]``."""
    return output_logits(loaded.model, hidden)


@torch.inference_mode()
def token_losses(loaded: "Loaded", hidden: Tensor, input_ids: Tensor) -> Iterator[Tensor]:
    """Yields the cross-entropy (nats) of tokens 1, 2, ... of ``input_ids [N]``, in pieces of ``LOGIT_ROWS`` tokens.

    ``hidden [1, N, hidden]`` are the last hidden states of the same tokens.
    """
    targets = input_ids[1:].to(hidden.device)
    for piece, target in zip(hidden[0, :-1].split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        yield F.cross_entropy(logits(loaded, piece).float(), target, reduction="none")


def measure(
    loaded: "Loaded", texts: Sequence[Tensor], attached: AbstractContextManager["Sparse | None"], advance: Callable[[], None]
) -> PerplexityRun:
    """Measures the loss and cost of every text inside the context ``attached``."""
    losses, seconds, peaks = [], [], []
    with attached as sparse:
        for ids in texts:
            with cost(loaded.model.device) as spent:
                hidden = prefill(loaded, ids)
            seconds.append(spent.seconds)
            peaks.append(spent.peak_mb)
            losses.append(fmean(torch.cat(list(token_losses(loaded, hidden, ids))).double().tolist()))
            advance()
        return PerplexityRun(losses, seconds, max(peaks), sparse.stats()["sparsity"] if sparse else 0.0)


def as_row(
    task: str, method: str, setting: str, run: PerplexityRun, dense: PerplexityRun, bits_per_byte_of_nats: float, length: int
) -> EvalRow:
    """Returns the row of a run.

    The interval of the ratio is that of the paired differences: both runs read the same chunks, so most of the spread cancels.

    Raises
    ------
    UserError : the loss is not finite.
    """
    loss, spread = fmean(run.losses), mean_interval(run.losses)
    if not math.isfinite(loss):
        raise UserError(f"{method} {setting}: the loss is {loss}; dtype=float32 may help")
    difference = [a - b for a, b in zip(run.losses, dense.losses, strict=True)]
    ratio_spread = mean_interval(difference)
    return EvalRow(
        task=task,
        method=method,
        setting=setting,
        score=math.exp(loss),
        score_name="perplexity",
        interval=spread and (math.exp(spread[0]), math.exp(spread[1])),
        ratio_to_dense=math.exp(fmean(difference)),
        sparsity=run.sparsity,
        selectivity=1 - run.sparsity,
        recall=run.recall,
        latency_s=median(run.seconds),
        peak_memory_mb=run.peak_mb,
        samples=len(run.losses),
        extra={
            "length": length,
            "bits_per_byte": loss * bits_per_byte_of_nats,
            "ratio_interval": ratio_spread and [math.exp(bound) for bound in ratio_spread],
            "losses": run.losses,
        },
    )

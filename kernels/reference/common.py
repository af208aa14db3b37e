"""Helpers of the references: sequence bounds, block lists, attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset

SCORES_AT_ONCE = 2**22  # scores in a chunk: 16 MiB in fp32
# scores per chunk of block lists: they and the gathered keys fit a CPU's cache
LISTED_SCORES = 2**19


def sequences(
    q: Tensor, k: Tensor, kv_start: Tensor | None, causal: bool
) -> Iterator[tuple[slice, int, int, int]]:
    """Yields parts of a batch that share their left padding.

    A part is (slice of the batch, first query, first key, delta). If t and u count from the first
    query and key, causal query t sees keys ``u <= t + delta``.
    """
    offset = query_offset(q.shape[2], k.shape[2], causal)
    if kv_start is None:
        yield slice(None), max(-offset, 0), 0, max(offset, 0)
        return
    starts = kv_start.tolist()
    if not all(0 <= start <= k.shape[2] for start in starts):
        raise ValueError(
            f"kv_start={starts}: expected 0 to {k.shape[2]}, the length of left padding"
        )
    for b, start in enumerate(starts):
        yield (
            slice(b, b + 1),
            min(max(start - offset, 0), q.shape[2]),
            start,
            max(offset - start, 0),
        )


def row_lists(selected: Tensor, scores_each: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows of ``selected [rows, columns]`` that select equally many columns: rows ``[R]``
    and columns ``[R, W]``.

    Columns ascend. Rows without one are left out. An entry has ``scores_each`` scores, and a chunk
    holds up to LISTED_SCORES.
    """
    widths, order = selected.sum(-1).sort(stable=True)
    widths, counts = widths.unique_consecutive(return_counts=True)
    for width, rows in zip(widths.tolist(), order.split(counts.tolist()), strict=True):
        for some in rows.split(max(1, LISTED_SCORES // (scores_each * width))) if width else ():
            yield some, selected[some].nonzero()[:, 1].view(-1, width)


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Returns ``softcap * tanh(scores / softcap)`` of scaled scores; None leaves them unchanged."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns ``out, lse`` of masked attention, with materialized scores.

    Shapes are ``q [R, n, D]`` and ``k, v [R, m, D]``. The mask ``seen [R, n | 1, S]`` is that of
    the last S keys; all queries see those before. ``bias`` is added to the scaled and capped
    scores.
    """
    if k.shape[-2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    scores = cap_scores(q * scale @ k.mT, softcap)
    scores = scores if bias is None else scores + bias
    _hide(scores, seen, -math.inf)
    # finite also in empty rows
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    # less only in empty rows, where gradients are finite this way
    at_least_one = total.clamp(min=1)
    lse = (largest + at_least_one.log()).masked_fill(total == 0, -math.inf)
    return weights @ v / at_least_one, lse[..., 0]


def masked_attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, seen: Tensor, scale: float,
    bias: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v of :func:`masked_attention`.

    ``dS = P * (dP - rowsum(dO * O) + dlse)``, where P is recomputed from the LSE. With a cap, it is
    multiplied by the slope of the cap, ``1 - (S / softcap)^2``.
    """
    scores = cap_scores(q * scale @ k.mT, softcap)
    biased = scores if bias is None else scores + bias
    probs = _hide(biased - lse[..., None], seen, -math.inf).exp_()
    row_delta = ((dout * out).sum(-1) - dlse)[..., None]
    dscores = _hide(probs * (dout @ v.mT - row_delta), seen, 0) * scale
    if softcap is not None:
        dscores *= 1 - (scores / softcap).square()
    return dscores @ k, dscores.mT @ q, probs.mT @ dout


def _hide(x: Tensor, seen: Tensor, value: float) -> Tensor:
    """Replaces the entries ``x [R, n, m]`` of keys that are not ``seen [R, n | 1, S]``, in
    place.
    """
    x[..., x.shape[-1] - seen.shape[-1] :].masked_fill_(~seen, value)
    return x

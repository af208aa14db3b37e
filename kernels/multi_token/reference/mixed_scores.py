"""Attention with linearly mixed scores in PyTorch, and its gradient."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, statistics_dtype
from msattn.kernels.reference.common import SCORES_AT_ONCE, sequences


class Mixing(NamedTuple):
    """Linear map of scores, ``[B, Hq, before + n, left + m + right]`` to ``[B, Hq, n, m]``.

    A mixed score depends on scores of ``before`` earlier queries, and of ``left`` earlier and
    ``right`` later keys; those that do not exist are 0, with ``own_mask`` also those of keys after
    their own query. ``backward`` returns the gradients of weight and scores.
    """

    forward: Callable[[Tensor, Tensor], Tensor]  # (weight, scores) -> mixed scores
    # (weight, scores, mixed gradient) -> gradients
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    before: int = 0
    left: int = 0
    right: int = 0
    own_mask: bool = True


class _Chunk(NamedTuple):
    """Chunk of queries, and the keys that they see.

    ``around`` is ``rows`` and the rows before them that mixing needs. ``hidden [before + n, m]`` is
    True for keys whose ``scores`` with a row of ``around`` are 0. ``mixed`` are the scores of
    ``rows`` after mixing.
    """

    batch: slice
    rows: slice
    around: slice
    keys: slice
    scores: Tensor
    hidden: Tensor
    mixed: Tensor


def mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    mixing: Mixing,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention with mixed scores, differentiably, for a few queries at a time.

    Returns ``out [B, Hq, N, D]`` and ``lse [B, Hq, N]``, which are 0 and -inf for rows without
    visible keys.
    """
    scale, statistics = resolve_scale(scale, q.shape[3]), statistics_dtype(q)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics)
    for chunk in _chunks(q, k, weight.to(statistics), mixing, causal, scale, kv_start):
        row_lse = chunk.mixed.logsumexp(-1)
        # [B, Hkv, G, n, m]
        probs = (chunk.mixed - row_lse[..., None]).exp().unflatten(1, (k.shape[1], -1))
        values = v[chunk.batch, :, None, chunk.keys].to(statistics)
        out[chunk.batch, :, chunk.rows] = (probs @ values).flatten(1, 2).to(q.dtype)
        lse[chunk.batch, :, chunk.rows] = row_lse
    return out, lse


def mixed_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    mixing: Mixing,
    *,
    causal: bool,
    scale: float,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and weight.

    The gradient of the mixed scores is ``dA = P * (dP - rowsum(dO * O))``.
    """
    statistics = statistics_dtype(q)
    kernel = weight.to(statistics)
    dq, dk, dv, dweight = (torch.zeros_like(x, dtype=statistics) for x in (q, k, v, weight))
    for batch, rows, around, keys, scores, hidden, mixed in _chunks(
        q, k, kernel, mixing, causal, scale, kv_start
    ):
        # [B, Hkv, G, n, D]
        grouped_dout = dout[batch, :, rows].to(statistics).unflatten(1, (k.shape[1], -1))
        values = v[batch, :, None, keys].to(statistics)
        unseen = mixed == -math.inf
        # also in rows that are NaN
        probs = (mixed - lse[batch, :, rows, None]).exp().masked_fill(unseen, 0)
        dprobs = (grouped_dout @ values.mT).flatten(1, 2)
        row_delta = (dout[batch, :, rows].to(statistics) * out[batch, :, rows]).sum(-1)
        dv[batch, :, keys] += (probs.unflatten(1, (k.shape[1], -1)).mT @ grouped_dout).sum(2)

        dkernel, dscores = mixing.backward(
            kernel, scores, (probs * (dprobs - row_delta[..., None])).masked_fill(unseen, 0)
        )
        dweight += dkernel
        dscores = dscores[:, :, -hidden.shape[0] :, mixing.left : dscores.shape[3] - mixing.right]
        dscores = (dscores.masked_fill(hidden, 0) * scale).unflatten(1, (k.shape[1], -1))
        queries = q[batch, :, around].to(statistics).unflatten(1, (k.shape[1], -1))
        dq[batch, :, around] += (dscores @ k[batch, :, None, keys].to(statistics)).flatten(1, 2)
        dk[batch, :, keys] += (dscores.mT @ queries).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight.dtype)


def _chunks(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    mixing: Mixing,
    causal: bool,
    scale: float,
    kv_start: Tensor | None,
) -> Iterator[_Chunk]:
    """Yields the scores of a few queries at a time, before and after mixing."""
    statistics = statistics_dtype(q)
    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        n, m = q.shape[2] - first_query, k.shape[2] - first_key
        if m == 0 or n == 0:
            continue
        for t in torch.arange(n).split(max(1, SCORES_AT_ONCE // (q[batch, :, 0, 0].numel() * m))):
            begin, end = int(t[0]), int(t[-1]) + 1
            first = max(begin - mixing.before, 0)
            last = min(m, end + delta) if causal else m
            rows, around = (slice(first_query + x, first_query + end) for x in (begin, first))
            keys = slice(first_key, first_key + last)
            queries = q[batch, :, around].to(statistics).unflatten(1, (k.shape[1], -1))
            scores = (queries @ k[batch, :, None, keys].to(statistics).mT * scale).flatten(1, 2)
            order = (
                torch.arange(last, device=q.device)
                - torch.arange(first, end, device=q.device)[:, None]
            )
            future = order > delta if causal else torch.zeros_like(order, dtype=torch.bool)
            hidden = future & mixing.own_mask
            scores = scores.masked_fill(hidden, 0)
            missing = mixing.before - (begin - first)
            scores = torch.nn.functional.pad(scores, (mixing.left, mixing.right, missing, 0))
            mixed = mixing.forward(weight, scores).masked_fill(future[begin - first :], -math.inf)
            yield _Chunk(batch, rows, around, keys, scores, hidden, mixed)

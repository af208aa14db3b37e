"""Dense attention with a pooled block map in PyTorch."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.reference.common import SCORES_AT_ONCE, cap_scores, sequences
from msattn.kernels.types import MaxPoolAttention, Pool


def maxpool_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    key_block_size: int | None = None,
    pool: Pool = "max",
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_start: Tensor | None = None,
) -> MaxPoolAttention:
    """Reference of :func:`msattn.kernels.maxpool_attention`.

    It holds the scores of a few row blocks at a time.
    """
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    statistics = statistics_dtype(q)
    key_block_size = key_block_size or block_size
    blocks = [-(-x.shape[2] // size) for x, size in ((q, block_size), (k, key_block_size))]
    out = torch.zeros_like(q)
    sink_logits = (
        q.new_full(q.shape[1:2], -math.inf, dtype=statistics)
        if sinks is None
        else sinks.to(statistics)
    )
    lse = sink_logits[:, None].expand(q.shape[:3]).clone()
    sink_logits = sink_logits.view(k.shape[1], -1, 1)
    pooled = q.new_zeros((*q.shape[:2], *blocks), dtype=statistics)

    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        queries = q[batch, :, first_query:].unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, n, D]
        # [B, Hkv, 1, m, D]
        keys, values = (x[batch, :, None, first_key:].to(statistics) for x in (k, v))
        n, m = queries.shape[3], keys.shape[3]
        if m == 0:
            continue
        row_blocks = max(1, SCORES_AT_ONCE // (queries[..., 0, 0].numel() * m * block_size))
        for t in torch.arange(n, device=q.device).split(row_blocks * block_size):
            begin, end = int(t[0]), int(t[-1]) + 1
            last = min(m, end + delta) if causal else m
            scores = queries[..., begin:end, :].to(statistics) @ keys[..., :last, :].mT * scale
            scores = cap_scores(scores, softcap)
            hidden = torch.arange(last, device=q.device) > (t[:, None] + delta if causal else m)
            row_lse = scores.masked_fill_(hidden, -math.inf).logsumexp(-1).logaddexp(sink_logits)
            # also in rows that are NaN
            probs = scores.sub_(row_lse[..., None]).exp_().masked_fill_(hidden, 0)
            by_query = _into_blocks(probs, -1, key_block_size)  # [B, Hkv, G, rows, c, key block]
            by_query = by_query.amax(-1) if pool == "max" else by_query.sum(-1)
            block_map = _into_blocks(by_query, -2, block_size)  # [B, Hkv, G, r, block, c]
            if pool == "mean_mass":
                block_map = (
                    block_map.sum(-2)
                    / _into_blocks(torch.ones_like(t), -1, block_size).sum(-1)[:, None]
                )
            else:
                block_map = block_map.amax(-2)
            rows = slice(first_query + begin, first_query + end)
            out[batch, :, rows] = (probs @ values[..., :last, :]).flatten(1, 2).to(q.dtype)
            lse[batch, :, rows] = row_lse.flatten(1, 2)
            r = begin // block_size
            pooled[batch, :, r : r + block_map.shape[-2], : block_map.shape[-1]] = (
                block_map.flatten(1, 2)
            )
    return MaxPoolAttention(out, lse, pooled)


def _into_blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Splits dimension ``dim < 0`` into ``(blocks, size)``, padded with zeros."""
    missing = -x.shape[dim] % size
    return torch.nn.functional.pad(x, (0, 0) * (-dim - 1) + (0, missing)).unflatten(dim, (-1, size))

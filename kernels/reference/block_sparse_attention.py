"""Block-sparse attention in PyTorch, by gathering blocks, and its gradient."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import check_block_mask
from msattn.kernels.common.checks import check_per_sequence, check_qkv, resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.reference.common import masked_attention, masked_attention_backward, row_lists, sequences
from msattn.kernels.types import SparseAttention


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.block_sparse_attention`.

    It gathers the selected blocks and is differentiable.
    """
    check_qkv(q, k, v)
    check_block_mask(block_mask, q, k, block_size)
    check_per_sequence("kv_start", kv_start, q)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    statistics = statistics_dtype(q)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics)
    for b, h, i, j, exists, seen in _selected_chunks(q, k, block_mask, block_size, causal, kv_start):
        keys, values = (x[b, h // group, j].to(statistics) for x in (k, v))
        rows_out, rows_lse = masked_attention(q[b, h, i].to(statistics), keys, values, seen, scale, softcap=softcap)
        rows = b.expand_as(i)[exists], h.expand_as(i)[exists], i[exists]
        out[rows] = rows_out[exists].to(q.dtype)
        lse[rows] = rows_lse[exists]
    return SparseAttention(out, lse)


def block_sparse_attention_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: Tensor,
    *,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v."""
    statistics = statistics_dtype(q)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (x.new_zeros(x.shape, dtype=statistics) for x in (q, k, v))
    for b, h, i, j, exists, seen in _selected_chunks(q, k, block_mask, block_size, causal, kv_start):
        place = b, h, i
        queries, dout_rows, out_rows = (x[place].to(statistics) for x in (q, dout, out))
        keys, values = (x[b, h // group, j].to(statistics) for x in (k, v))
        dqueries, dkeys, dvalues = masked_attention_backward(
            dout_rows, dlse[place], queries, keys, values, out_rows, lse[place], seen, scale, softcap=softcap
        )
        dq[tuple(index.expand_as(i)[exists] for index in place)] = dqueries[exists]
        key_rows = ((b * k.shape[1] + h // group) * k.shape[2] + j).flatten()
        dk.view(-1, k.shape[3]).index_add_(0, key_rows, dkeys.flatten(0, 1))  # deterministic on a CPU
        dv.view(-1, k.shape[3]).index_add_(0, key_rows, dvalues.flatten(0, 1))
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _selected_chunks(
    q: Tensor, k: Tensor, block_mask: Tensor, block_size: int, causal: bool, kv_start: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yields the selected keys of R row blocks at a time.

    A chunk is the sequence ``b [R, 1]``, the query head ``h [R, 1]``, queries ``i [R, block]`` and keys ``j [R, S]``, a mask of
    queries that exist ``[R, block]``, and a mask of the keys that they see ``[R, block, S]``.
    """
    within = torch.arange(block_size, device=q.device)
    mask = block_mask.expand(q.shape[0], -1, -1, -1)
    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        n, m = q.shape[2] - first_query, k.shape[2] - first_key
        first_t, first_u = (torch.arange(x, device=q.device) * block_size for x in mask.shape[2:])
        last = (first_t + block_size).clamp(max=n) + delta if causal else torch.full_like(first_t, m)
        readable = (first_u < last[:, None]) & (first_u < m) & (first_t < n)[:, None]
        selected = (mask[batch] & readable).repeat_interleave(q.shape[1] // mask.shape[1], dim=1)  # [B, Hq, Tr, Tc]
        for b, h, r, on, c in row_lists(selected, block_size**2):
            u = (c[..., None] * block_size + within).flatten(1)
            t = r[:, None] * block_size + within
            exists = t < n
            seen = exists[..., None] & (on.repeat_interleave(block_size, 1) & (u < m))[:, None]
            if causal:
                seen = seen & (u[:, None] <= t[..., None] + delta)
            i, j = first_query + t.clamp(max=n - 1), first_key + u.clamp(max=m - 1)
            yield b[:, None] + (batch.start or 0), h[:, None], i, j, exists, seen

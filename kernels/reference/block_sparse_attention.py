"""Block-sparse attention in PyTorch, by batched products of gathered blocks, and its gradient.

Row blocks that read equally many key blocks are a batch, so that no product is padded. Query heads
that share a key/value head and a block mask are the rows of one matrix.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.kernels.common.block_bits import unpack_blocks
from msattn.kernels.common.block_checks import resolve_key_block_size
from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.reference.common import (
    masked_attention,
    masked_attention_backward,
    row_lists,
    sequences,
)
from msattn.kernels.types import SparseAttention


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    block_size: int = 64,
    key_block_size: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.block_sparse_attention`.

    Its cost is proportional to the number of selected blocks. It is differentiable.
    """
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics_dtype(q))
    sizes = block_size, resolve_key_block_size(block_size, key_block_size)
    for rows, cols, chunks in _parts(q, k, block_mask, *sizes, causal, kv_start):
        queries, keys, values = rows.split(q), cols.split(k), cols.split(v)
        rows_out, rows_lse = torch.zeros_like(queries), torch.full_like(queries[..., 0], -math.inf)
        for r, c, seen in chunks:
            some_k, some_v = _gather(keys, c), _gather(values, c)
            rows_out[r], rows_lse[r] = masked_attention(
                queries[r], some_k, some_v, seen, scale, softcap=softcap
            )
        rows.join(rows_out, out)
        rows.join(rows_lse[..., None], lse[..., None])
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
    key_block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, cols, chunks in _parts(
        q, k, block_mask, block_size, key_block_size, causal, kv_start
    ):
        queries, douts, outs = (rows.split(x) for x in (q, dout, out))
        dlses, lses = (rows.split(x[..., None])[..., 0] for x in (dlse, lse))
        keys, values = cols.split(k), cols.split(v)
        dqueries, dkeys, dvalues = (torch.zeros_like(x) for x in (queries, keys, values))
        for r, c, seen in chunks:
            some_k, some_v = _gather(keys, c), _gather(values, c)
            dqueries[r], some_dk, some_dv = masked_attention_backward(
                douts[r],
                dlses[r],
                queries[r],
                some_k,
                some_v,
                outs[r],
                lses[r],
                seen,
                scale,
                softcap=softcap,
            )
            for total, added in ((dkeys, some_dk), (dvalues, some_dv)):
                # deterministic on a CPU
                total.index_add_(0, c.flatten(), added.reshape(-1, *total.shape[1:]))
        rows.join(dqueries, dq)
        cols.join(dkeys, dk)
        cols.join(dvalues, dv)
    return dq, dk, dv


class _Blocks(NamedTuple):
    """Blocks of the tokens from ``first`` on, of a part of a batch, numbered over its sequences and
    lists of the block mask.
    """

    batch: slice
    first: int
    lists: int  # each of one or several heads
    block_size: int

    def split(self, x: Tensor) -> Tensor:
        """Returns the blocks of ``x [B, H, N, D]``, filled with zeros:
        ``[blocks, heads of a list * block_size, D]``.
        """
        x = x[self.batch, :, self.first :].to(statistics_dtype(x))
        if missing := -x.shape[2] % self.block_size:
            x = F.pad(x, (0, 0, 0, missing))
        blocks = (
            x.unflatten(2, (-1, self.block_size)).unflatten(1, (self.lists, -1)).transpose(2, 3)
        )
        return blocks.reshape(-1, x.shape[1] // self.lists * self.block_size, x.shape[3])

    def join(self, blocks: Tensor, x: Tensor) -> None:
        """Writes blocks back to ``x [B, H, N, D]``."""
        part = x[self.batch, :, self.first :]
        batch, heads, tokens, size = part.shape
        blocks = blocks.view(
            batch, self.lists, -1, heads // self.lists, self.block_size, size
        ).transpose(2, 3)
        part.copy_(blocks.reshape(batch, heads, -1, size)[:, :, :tokens])


def _parts(
    q: Tensor,
    k: Tensor,
    block_mask: Tensor,
    block_size: int,
    key_block_size: int,
    causal: bool,
    kv_start: Tensor | None,
) -> Iterator[tuple[_Blocks, _Blocks, Iterator[tuple[Tensor, Tensor, Tensor]]]]:
    """Yields row blocks and column blocks of sequences with the same padding, and chunks of the
    rows.

    A chunk has row blocks ``[R]``, the column blocks that each reads ``[R, W]``, and ``seen`` of
    :func:`masked_attention`.
    """
    kv_heads = k.shape[1]
    lists = max(block_mask.shape[1], kv_heads)
    mask = unpack_blocks(block_mask, -(-k.shape[2] // key_block_size)).expand(len(q), -1, -1, -1)
    mask = mask.repeat_interleave(lists // mask.shape[1], dim=1)
    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        n, m = q.shape[2] - first_query, k.shape[2] - first_key
        if n and m:
            rows = _Blocks(batch, first_query, lists, block_size)
            cols = _Blocks(batch, first_key, kv_heads, key_block_size)
            yield (
                rows,
                cols,
                _chunks(
                    mask[batch],
                    n,
                    m,
                    delta,
                    block_size,
                    key_block_size,
                    causal,
                    q.shape[1],
                    kv_heads,
                ),
            )


def _chunks(
    mask: Tensor,
    n: int,
    m: int,
    delta: int,
    block_size: int,
    key_block_size: int,
    causal: bool,
    q_heads: int,
    kv_heads: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the chunks of n queries and m keys; causal query t sees keys ``u <= t + delta``."""
    first_t, first_u = (
        torch.arange(0, *tokens, device=mask.device)
        for tokens in ((n, block_size), (m, key_block_size))
    )
    mask = mask[..., : len(first_t), : len(first_u)]
    if causal:
        mask = mask & (first_u < (first_t + block_size).clamp(max=n)[:, None] + delta)
    lists = mask.shape[1]
    within = torch.arange(key_block_size, device=mask.device)
    of_list = torch.arange(block_size, device=mask.device).repeat(q_heads // lists)
    partial = _partial_blocks(delta, block_size, key_block_size) if causal else 1
    for rows, cols in row_lists(mask.flatten(0, 2), len(of_list) * key_block_size):
        u = (first_u[cols[:, -partial:], None] + within).flatten(1)[:, None]
        seen = (
            u <= first_t[rows % len(first_t), None, None] + of_list[:, None] + delta
            if causal
            else u < m
        )
        head = rows // len(first_t) // (lists // kv_heads)
        yield rows, head[:, None] * len(first_u) + cols, seen


def _partial_blocks(delta: int, block_size: int, key_block_size: int) -> int:
    """Returns an upper bound of the last blocks of a row that hold keys some of its queries do not
    see.
    """
    step = min(block_size, key_block_size)
    # place of a row block's first query in its block of keys, at most
    latest = key_block_size - step + delta % step
    return (latest + block_size - 1) // key_block_size + 1


def _gather(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Returns the ``blocks [..., block, D]`` with ``numbers [R, W]``, joined:
    ``[R, W * block, D]``.
    """
    return blocks.index_select(0, numbers.flatten()).view(len(numbers), -1, blocks.shape[2])

"""Reference of ``paged_block_sparse_attention``, one sequence at a time."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.common.paged_checks import check_paged_block_sparse_attention
from msattn.kernels.reference.block_sparse_attention import block_sparse_attention
from msattn.kernels.reference.common import paged_slots
from msattn.kernels.types import PagedKeys, SparseAttention


def paged_block_sparse_attention(
    q: Tensor,
    cache: PagedKeys,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    *,
    max_queries: int,
    block_size: int = 64,
    scale: float | None = None,
    softcap: float | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.block_sparse_attention.paged_block_sparse_attention`.

    It gathers the filled pages of each sequence.

    Raises
    ------
    ValueError
        If an argument is invalid, offsets of queries are not ascending from 0 within q, a sequence has more queries than
        ``max_queries`` or than keys, or lengths or pages are outside the cache.
    """
    check_paged_block_sparse_attention(q, cache, cu_queries, block_mask, max_queries, block_size)
    bounds = _query_bounds(q, cache, cu_queries, max_queries)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=statistics_dtype(q))
    for b, ((begin, end), slots) in enumerate(zip(bounds, paged_slots(cache), strict=True)):
        if begin == end:
            continue
        k, v = (x[slots].transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, Hkv, kv_len, D]
        blocks = -(-(end - begin) // block_size), -(-k.shape[2] // block_size)
        if block_mask is None:
            mask = torch.ones((1, 1, *blocks), dtype=torch.bool, device=q.device)
        else:
            mask = block_mask[b : b + 1, :, : blocks[0], : blocks[1]]
        queries = q[begin:end].transpose(0, 1)[None]
        of_sequence = block_sparse_attention(queries, k, v, mask, block_size=block_size, scale=scale, softcap=softcap)
        out[begin:end] = of_sequence.out[0].transpose(0, 1)
        lse[begin:end] = of_sequence.lse[0].T
    return SparseAttention(out, lse)


def _query_bounds(q: Tensor, cache: PagedKeys, cu_queries: Tensor, max_queries: int) -> list[tuple[int, int]]:
    """Returns the rows ``[begin, end)`` of each sequence in q."""
    offsets = cu_queries.tolist()
    bounds = list(pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] > q.shape[0] or any(begin > end for begin, end in bounds):
        raise ValueError(f"cu_queries={offsets}: expected ascending offsets from 0 to at most {q.shape[0]}, the queries of q")
    for (begin, end), length in zip(bounds, cache.kv_len.tolist(), strict=True):
        if end - begin > max_queries:
            raise ValueError(f"max_queries={max_queries}: a sequence has {end - begin} queries")
        if end - begin > length:
            raise ValueError(f"cache.kv_len: a sequence has {length} keys, fewer than its {end - begin} queries")
    return bounds

"""References of the operations on a paged cache, one sequence at a time.

They gather the filled pages of a sequence, and refuse lengths outside the table, filled pages
outside the cache, and scales that are not positive.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from msattn.kernels.common.block_bits import unpack_blocks
from msattn.kernels.common.block_checks import resolve_key_block_size
from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.fp8 import FP8, dequantize
from msattn.kernels.reference.block_sparse_attention import block_sparse_attention
from msattn.kernels.reference.common import cap_scores, masked_attention
from msattn.kernels.reference.flash_decode import flash_decode
from msattn.kernels.types import PagedKeys, ScoreMod, SparseAttention

ALL = slice(None)


def paged_block_sparse_attention(
    q: Tensor,
    cache: PagedKeys,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    *,
    max_queries: int,
    block_size: int = 64,
    key_block_size: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.paged_block_sparse_attention`.

    It checks that ``cu_queries`` ascends from 0 within q, and that a sequence has at most
    ``max_queries`` queries, and at most as many as keys.
    """
    bounds = _query_bounds(q, cache, cu_queries, max_queries)
    sizes = block_size, resolve_key_block_size(block_size, key_block_size)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=statistics_dtype(q))
    for b, ((begin, end), slots) in enumerate(zip(bounds, paged_slots(cache), strict=True)):
        if begin == end:
            continue
        k, v = (x[None] for x in _gather(cache, *slots, statistics_dtype(q)))
        blocks = [
            -(-tokens // size)
            for tokens, size in zip((end - begin, k.shape[2]), sizes, strict=True)
        ]
        if block_mask is None:
            mask = torch.ones((1, 1, *blocks), dtype=torch.bool, device=q.device)
        else:
            mask = unpack_blocks(block_mask[b : b + 1, :, : blocks[0]], blocks[1])[..., : blocks[1]]
        queries = q[begin:end].transpose(0, 1)[None]
        options = {
            "block_size": block_size,
            "key_block_size": sizes[1],
            "scale": scale,
            "softcap": softcap,
        }
        of_sequence = block_sparse_attention(queries, k, v, mask, **options)
        out[begin:end] = of_sequence.out[0].transpose(0, 1)
        lse[begin:end] = of_sequence.lse[0].T
    return SparseAttention(out, lse)


def _query_bounds(
    q: Tensor, cache: PagedKeys, cu_queries: Tensor, max_queries: int
) -> list[tuple[int, int]]:
    """Returns the rows ``[begin, end)`` of each sequence in q."""
    offsets = cu_queries.tolist()
    bounds = list(pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] > q.shape[0] or any(begin > end for begin, end in bounds):
        raise ValueError(
            f"cu_queries={offsets}: expected ascending offsets from 0 to at most {q.shape[0]}, "
            f"the queries of q"
        )
    for (begin, end), length in zip(bounds, cache.kv_len.tolist(), strict=True):
        if end - begin > max_queries:
            raise ValueError(f"max_queries={max_queries}: a sequence has {end - begin} queries")
        if end - begin > length:
            raise ValueError(
                f"cache.kv_len: a sequence has {length} keys, fewer than its {end - begin} queries"
            )
    return bounds


def paged_flash_decode(
    q: Tensor, cache: PagedKeys, *, scale: float | None = None, softcap: float | None = None
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.paged_flash_decode`."""
    scale, limit = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    mod = None if limit is None else ScoreMod(None, lambda scores, *_: cap_scores(scores, limit))
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=statistics_dtype(q))
    for b, (page, offset) in enumerate(paged_slots(cache)):
        if len(page) == 0:
            continue
        k, v = (x[None] for x in _gather(cache, page, offset, lse.dtype))
        one = slice(b, b + 1)
        out[one], lse[one] = flash_decode(q[one], k, v, causal=True, score_mod=mod, scale=scale)
    return SparseAttention(out, lse)


def paged_bucket_decode(
    q: Tensor,
    cache: PagedKeys,
    buckets: Tensor,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    counts: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.paged_bucket_decode`."""
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    batch, q_heads, _, head_size = q.shape
    kv_heads, statistics = cache.k.shape[2], statistics_dtype(q)
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, head_size).to(statistics)
    out, lse = torch.empty_like(grouped), grouped.new_empty(grouped.shape[:3])
    newest = recent.tolist() if isinstance(recent, Tensor) else [recent] * batch
    for b, (page, offset) in enumerate(paged_slots(cache)):
        position = torch.arange(len(page), device=q.device)
        dense = (position < sink) | (position >= len(page) - newest[b])
        for h in range(kv_heads):
            bucket = buckets[page, offset, h]
            read = dense | (torch.isin(bucket, probes[b, h]) & (bucket >= 0))
            (keys,), (values,) = (
                x.to(statistics)
                for x in _gather(cache, page[read], offset[read], statistics, slice(h, h + 1))
            )
            seen = read.new_ones(1, len(keys))
            out[b, h], lse[b, h] = masked_attention(
                grouped[b, h], keys, values, seen, scale, softcap=softcap
            )
            if counts is not None:
                counts[b, h] += len(keys)
    return SparseAttention(out.to(q.dtype).view(q.shape), lse.view(batch, q_heads, 1))


def paged_bucket_sizes(
    buckets: Tensor,
    table: Tensor,
    kv_len: Tensor,
    *,
    num_buckets: int,
    counted: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.paged.paged_bucket_sizes`."""
    sizes = table.new_zeros((len(table), buckets.shape[2], num_buckets)) if sizes is None else sizes
    first = torch.zeros_like(kv_len) if counted is None else counted.clamp(min=0)
    slots = filled_slots(table, kv_len, *buckets.shape[:2])
    for own, (page, offset), left_out in zip(sizes, slots, first.tolist(), strict=True):
        bucket = buckets[page, offset].T.long()[:, left_out:]  # [Hkv, n]
        valid = (bucket >= 0) & (bucket < num_buckets)
        own.scatter_add_(1, bucket.where(valid, 0), valid.to(own.dtype))
    return sizes


def _gather(
    cache: PagedKeys, page: Tensor, offset: Tensor, dtype: torch.dtype, heads: slice = ALL
) -> list[Tensor]:
    """Returns the keys and values of some heads in slots, ``[H, n, D]``; those in FP8 become
    ``dtype``.
    """
    found = []
    for name in ("k", "v"):
        x, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
        if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
            raise ValueError(
                f"cache.{name}_scale={scale.tolist()}: expected positive, finite numbers"
            )
        some = x[page, offset, heads].transpose(0, 1)
        if x.dtype == FP8:
            of_heads = None if scale is None else scale.expand(x.shape[2])[heads]
            some = dequantize(some, of_heads, dtype)
        found.append(some)
    return found


def paged_slots(cache: PagedKeys) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields :func:`filled_slots` of a cache."""
    return filled_slots(cache.table, cache.kv_len, *cache.k.shape[:2])


def filled_slots(
    table: Tensor, kv_len: Tensor, count_blocks: int, page_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields page and offset of each filled position of a sequence, int64 ``[kv_len]``."""
    capacity, lengths = table.shape[1] * page_size, kv_len.tolist()
    if not all(0 <= length <= capacity for length in lengths):
        raise ValueError(
            f"cache.kv_len={lengths}: expected 0 to {capacity}, the positions of {table.shape[1]} "
            f"pages"
        )
    for b, length in enumerate(lengths):
        pages = table[b, : -(-length // page_size)].long()
        if bool(((pages < 0) | (pages >= count_blocks)).any()):
            raise ValueError(
                f"cache.table[{b}]={pages.tolist()}: expected pages of the cache, 0 to "
                f"{count_blocks - 1}"
            )
        position = torch.arange(length, device=pages.device)
        yield pages[position // page_size], position % page_size

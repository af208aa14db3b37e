"""Argument checks of operations on a paged cache; see :mod:`.checks`."""

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import check_block_size, check_map_shape
from msattn.kernels.common.bucket_checks import check_counts, check_dense_window, check_lists
from msattn.kernels.common.checks import check_device, check_per_sequence, check_tensor, check_tokens
from msattn.kernels.types import PagedKeys

MAX_BUCKETS = 2**15  # limit of int16 ids


def check_paged_keys(cache: PagedKeys, heads: int, q: Tensor) -> None:
    """Checks a paged cache for queries of ``heads`` heads, whose last dimension is the head size."""
    for name, x in (("cache.k", cache.k), ("cache.v", cache.v)):
        if x.dim() != 4 or min(x.shape) < 1 or x.shape[3] != q.shape[-1] or x.stride(3) != 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}: expected [pages, page size, heads, "
                f"{q.shape[-1]}], q's head size, each size at least 1 and the last dimension contiguous"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name}.dtype={x.dtype}: expected q's dtype, {q.dtype}")
        check_device(name, x, "q", q)
    if cache.k.shape != cache.v.shape:
        raise ValueError(f"cache.v.shape={tuple(cache.v.shape)}: expected cache.k's shape, {tuple(cache.k.shape)}")
    if heads % cache.k.shape[2]:
        raise ValueError(f"q has {heads} heads, cache.k has {cache.k.shape[2]}: expected q's to be a multiple of cache.k's")
    _check_table("cache.", cache.table, cache.kv_len, "q", q)


def _check_table(prefix: str, table: Tensor, kv_len: Tensor, other_name: str, other: Tensor) -> None:
    """Checks the pages and lengths of sequences, on the device of ``other``."""
    if table.dtype != torch.int32 or table.dim() != 2 or min(table.shape) < 1:
        raise ValueError(f"{prefix}table is {table.dtype} {tuple(table.shape)}: expected int32 [batch, pages], each at least 1")
    check_device(f"{prefix}table", table, other_name, other)
    check_per_sequence(f"{prefix}kv_len", kv_len, table)


def check_paged_block_sparse_attention(
    q: Tensor, cache: PagedKeys, cu_queries: Tensor, block_mask: Tensor | None, max_queries: int, block_size: int
) -> None:
    """Checks packed queries ``[T, Hq, D]``, their paged cache and a block mask for each sequence."""
    if q.dim() != 3 or min(q.shape) < 1:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected packed queries [tokens, heads, head size], each at least 1")
    check_tokens("q", q[None])
    check_paged_keys(cache, q.shape[1], q)
    check_block_size(block_size)
    batch, pages = cache.table.shape
    if max_queries < 1:
        raise ValueError(f"max_queries={max_queries!r}: expected a number of queries, 1 or more")
    check_tensor("cu_queries", cu_queries, torch.int32, (batch + 1,), "q", q)
    if block_mask is None:
        return
    row_blocks, col_blocks = (-(-tokens // block_size) for tokens in (max_queries, pages * cache.k.shape[1]))
    accepted = [(batch,), (q.shape[1], cache.k.shape[2], 1), (row_blocks,), (col_blocks,)]
    check_map_shape("block_mask", block_mask, torch.bool, accepted)
    check_device("block_mask", block_mask, "q", q)


def check_paged_decode(q: Tensor, cache: PagedKeys) -> None:
    """Checks ``q [B, Hq, N, D]`` and the paged cache of a decoding step."""
    check_tokens("q", q)
    check_paged_keys(cache, q.shape[1], q)
    if cache.table.shape[0] != q.shape[0]:
        raise ValueError(f"cache.table.shape={tuple(cache.table.shape)}: expected q's batch size, {q.shape[0]}")


def check_paged_bucket_decode(
    q: Tensor, cache: PagedKeys, buckets: Tensor, probes: Tensor, recent: int | Tensor, sink: int, counts: Tensor | None
) -> None:
    """Checks the arguments of ``paged_bucket_decode``, among them one query per sequence."""
    check_paged_decode(q, cache)
    if q.shape[2] != 1:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected one query per sequence, [batch, heads, 1, head size]")
    check_tensor("buckets", buckets, torch.int16, cache.k.shape[:3], "q", q, "one for each slot and head")
    check_lists("probes", probes, cache.k.shape[2], 0, q)
    check_dense_window(recent, sink, q)
    check_counts(counts, cache.k.shape[2], q)


def check_paged_bucket_sizes(
    buckets: Tensor, table: Tensor, kv_len: Tensor, num_buckets: int, counted: Tensor | None, sizes: Tensor | None
) -> None:
    """Checks the arguments of ``paged_bucket_sizes``."""
    if buckets.dtype != torch.int16 or buckets.dim() != 3 or min(buckets.shape) < 1:
        raise ValueError(
            f"buckets is {buckets.dtype} {tuple(buckets.shape)}: expected int16 [pages, page size, heads], each at least 1"
        )
    _check_table("", table, kv_len, "buckets", buckets)
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise ValueError(f"num_buckets={num_buckets!r}: expected 1 to {MAX_BUCKETS:,}, the ids of int16")
    if counted is not None:
        check_tensor("counted", counted, torch.int32, (len(table),), "buckets", buckets, "one for each sequence")
    if sizes is not None:
        shape = (len(table), buckets.shape[2], num_buckets)
        check_tensor("sizes", sizes, torch.int32, shape, "buckets", buckets, "one for each sequence, head and bucket")
        if not sizes.is_contiguous():
            raise ValueError(f"sizes has strides {sizes.stride()}: expected a contiguous tensor")

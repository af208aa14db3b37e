"""Numbers of keys in the buckets of the sequences of a paged cache.

A router that reads the buckets whose keys it predicts to matter most divides by these sizes. They
belong to a sequence, while pages are shared, moved and freed. So they are counted from the bucket
ids of its slots: all of them once, then the new ones.

A program counts a span of positions of one sequence, for one key/value head, in a histogram, and
adds it to the sizes with atomics: of integers, so that the order does not change the result. A few
keys are added one by one. Prefixes: o_ offset, m_ mask. Grid: (span, key/value head, sequence).
"""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_tensor, resolve_backend
from msattn.kernels.common.paged_checks import MAX_BUCKETS, check_table
from msattn.kernels.common.paged_tiles import load_pages
from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import paged as reference
from msattn.kernels.types import Backend

SPAN = 4096  # positions of a program
MAX_BINS = 4096  # bins per histogram
FEW = 16  # keys that are not worth a histogram


def paged_bucket_sizes(
    buckets: Tensor,
    table: Tensor,
    kv_len: Tensor,
    *,
    num_buckets: int,
    counted: Tensor | None = None,
    sizes: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Counts the keys of each sequence in each bucket, or only those that are new.

    Parameters
    ----------
    buckets : Tensor int16 ``[P, page_size, Hkv]``
        Bucket of each slot of the cache. Slots with -1, or with a number that is no bucket, count
        nowhere. Any strides.
    table, kv_len : Tensor int32 ``[B, pages]``, int32 ``[B]``
        Pages and number of filled positions of each sequence, as in
        :class:`~msattn.kernels.types.PagedKeys`.
    num_buckets : int
        Number of buckets, C, 1 to 32,768.
    counted : Tensor int32 ``[B]``, optional
        Number of first keys of each sequence that are left out, because ``sizes`` holds them.
    sizes : Tensor int32 ``[B, Hkv, C]``, optional
        The numbers are added to it, in place, instead of to zeros. Contiguous.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor int32 ``[B, Hkv, C]``
        ``sizes``, if given.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of ``table`` and ``kv_len`` are checked only by the
        reference.
    """
    if buckets.dtype != torch.int16 or buckets.dim() != 3 or min(buckets.shape) < 1:
        raise ValueError(
            f"buckets is {buckets.dtype} {tuple(buckets.shape)}: expected int16 [pages, page "
            f"size, heads], each at least 1"
        )
    check_table("", table, kv_len, "buckets", buckets)
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise ValueError(
            f"num_buckets={num_buckets!r}: expected 1 to {MAX_BUCKETS:,}, the ids of int16"
        )
    if counted is not None:
        check_tensor(
            "counted",
            counted,
            torch.int32,
            (len(table),),
            "buckets",
            buckets,
            "one for each sequence",
        )
    if sizes is not None:
        shape = (len(table), buckets.shape[2], num_buckets)
        check_tensor(
            "sizes",
            sizes,
            torch.int32,
            shape,
            "buckets",
            buckets,
            "one for each sequence, head and bucket",
        )
        if not sizes.is_contiguous():
            raise ValueError(f"sizes has strides {sizes.stride()}: expected a contiguous tensor")
    backend = resolve_backend(backend, buckets, name="buckets")
    if sizes is None:
        sizes = table.new_zeros((len(table), buckets.shape[2], num_buckets))
    _operator(buckets, table, kv_len, counted, sizes, backend)
    return sizes


def launch(
    buckets: Tensor, table: Tensor, kv_len: Tensor, counted: Tensor | None, sizes: Tensor
) -> None:
    """Launches the kernel; the grid depends only on shapes, so that a captured CUDA graph serves
    any pages and lengths.
    """
    page_size, (batch, kv_heads, num_buckets) = buckets.shape[1], sizes.shape
    table = table if table.stride(1) == 1 else table.contiguous()
    capacity = table.shape[1] * page_size
    _count_kernel[(triton.cdiv(capacity, SPAN), kv_heads, batch)](
        buckets, table, kv_len, counted, sizes,
        *buckets.stride(), table.stride(0), capacity, num_buckets,
        PAGE=page_size, SPAN=SPAN, BINS=min(MAX_BINS, triton.next_power_of_2(num_buckets)), FEW=FEW,
        num_warps=8,
    )  # fmt: skip


def _reference(sizes: Tensor, **others: Any) -> None:
    reference.paged_bucket_sizes(num_buckets=sizes.shape[2], sizes=sizes, **others)


_operator = register_op(
    "paged_bucket_sizes", launch, _reference, lambda *arguments: None, mutates=("sizes",)
)


@triton.jit(do_not_specialize=["stride_t", "capacity", "num_buckets"])
def _count_kernel(
    buckets_ptr, table_ptr, kv_len_ptr, counted_ptr, sizes_ptr,
    stride_p, stride_s, stride_h, stride_t, capacity, num_buckets,
    PAGE: tl.constexpr, SPAN: tl.constexpr, BINS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Adds the keys of a span to ``sizes [B, Hkv, C]``."""
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, end = tl.program_id(0) * SPAN, tl.minimum(tl.load(kv_len_ptr + batch), capacity)
    end = tl.minimum(end, begin + SPAN)
    if counted_ptr is not None:
        begin = tl.maximum(begin, tl.load(counted_ptr + batch))
    if begin >= end:
        return
    table_ptr += batch * stride_t
    buckets_ptr += kv_head * stride_h
    sizes_ptr += (batch * tl.num_programs(1) + kv_head) * num_buckets
    if end - begin <= FEW:
        bucket = _load_buckets(buckets_ptr, table_ptr, begin, end, stride_p, stride_s, PAGE, FEW)
        tl.atomic_add(
            sizes_ptr + bucket, 1, mask=(bucket >= 0) & (bucket < num_buckets), sem="relaxed"
        )
        return
    bucket = _load_buckets(buckets_ptr, table_ptr, begin, end, stride_p, stride_s, PAGE, SPAN)
    for first in tl.range(0, num_buckets, BINS):
        here = bucket - first
        keys = tl.histogram(here, BINS, mask=(here >= 0) & (here < BINS) & (bucket < num_buckets))
        bin = first + tl.arange(0, BINS)
        tl.atomic_add(sizes_ptr + bin, keys, mask=(bin < num_buckets) & (keys > 0), sem="relaxed")


@triton.jit
def _load_buckets(
    buckets_ptr, table_ptr, begin, end, stride_p, stride_s, PAGE: tl.constexpr, COUNT: tl.constexpr
):
    """Returns the buckets of COUNT positions from ``begin`` on, -1 from ``end`` on."""
    position = begin + tl.arange(0, COUNT)
    page, offset = load_pages(table_ptr, position, position < end, PAGE)
    bucket_ptrs = buckets_ptr + page.to(tl.int64) * stride_p + offset * stride_s
    return tl.load(bucket_ptrs, mask=position < end, other=-1).to(tl.int32)

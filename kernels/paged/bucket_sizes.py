"""Numbers of keys in the buckets of the sequences of a paged cache.

A router that reads the buckets whose keys it predicts to matter most divides by these sizes. They belong to a sequence, while
pages are shared, moved and freed, so they are counted anew in every step, from the bucket ids that the step reads anyway.

A program counts a span of positions of one sequence, for one key/value head, in a histogram, and adds it to the sizes with
atomics: of integers, so that the order does not change the result. Prefixes: o_ offset, m_ mask. Grid: (span,
key/value head, sequence).
"""

from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import resolve_backend
from msattn.kernels.common.paged_checks import check_paged_bucket_sizes
from msattn.kernels.common.paged_tiles import load_pages
from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.common.registration import register_op
from msattn.kernels.types import Backend

SPAN = 4096  # positions of a program
MAX_BINS = 4096  # of a histogram


def paged_bucket_sizes(
    buckets: Tensor, table: Tensor, kv_len: Tensor, *, num_buckets: int, backend: Backend | None = None
) -> Tensor:
    """Counts the keys of each sequence in each bucket.

    Parameters
    ----------
    buckets : Tensor int16 ``[P, page_size, Hkv]``
        Bucket of each slot of the cache. Slots with -1, or with a number that is no bucket, count nowhere. Any strides.
    table, kv_len : Tensor int32 ``[B, pages]``, int32 ``[B]``
        Pages and number of filled positions of each sequence, as in :class:`~msattn.kernels.types.PagedKeys`.
    num_buckets : int
        Number of buckets, C, 1 to 32,768.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor int32 ``[B, Hkv, C]``

    Raises
    ------
    ValueError
        If an argument is invalid. The values of ``table`` and ``kv_len`` are checked by the reference alone.
    """
    check_paged_bucket_sizes(buckets, table, kv_len, num_buckets)
    return _operator(buckets, table, kv_len, num_buckets, resolve_backend(backend, buckets, name="buckets"))


def launch(buckets: Tensor, table: Tensor, kv_len: Tensor, num_buckets: int) -> Tensor:
    """Launches the kernel; the grid depends on shapes alone, so that a captured CUDA graph serves any pages and lengths."""
    (_, page_size, kv_heads), (batch, pages) = buckets.shape, table.shape
    table = table if table.stride(1) == 1 else table.contiguous()
    sizes = table.new_zeros((batch, kv_heads, num_buckets))
    _count_kernel[(triton.cdiv(pages * page_size, SPAN), kv_heads, batch)](
        buckets, table, kv_len, sizes, *buckets.stride(), table.stride(0), pages * page_size, num_buckets,
        PAGE=page_size, SPAN=SPAN, BINS=min(MAX_BINS, triton.next_power_of_2(num_buckets)), num_warps=8,
    )  # fmt: skip
    return sizes


def _empty(buckets: Tensor, table: Tensor, kv_len: Tensor, num_buckets: int, backend: str) -> Tensor:
    return table.new_empty((len(table), buckets.shape[2], num_buckets))


_operator = register_op("paged_bucket_sizes", launch, reference.paged_bucket_sizes, _empty)


@triton.jit(do_not_specialize=["capacity", "num_buckets"])
def _count_kernel(
    buckets_ptr, table_ptr, kv_len_ptr, sizes_ptr, stride_p, stride_s, stride_h, stride_t, capacity, num_buckets,
    PAGE: tl.constexpr, SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Adds the keys of a span to ``sizes [B, Hkv, C]``."""
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, end = tl.program_id(0) * SPAN, tl.minimum(tl.load(kv_len_ptr + batch), capacity)
    if begin >= end:
        return
    position = begin + tl.arange(0, SPAN)
    m_position = position < end
    page, offset = load_pages(table_ptr + batch * stride_t, position, m_position, PAGE)
    bucket_ptrs = buckets_ptr + page.to(tl.int64) * stride_p + offset * stride_s + kv_head * stride_h
    bucket = tl.load(bucket_ptrs, mask=m_position, other=-1).to(tl.int32)
    own_sizes_ptr = sizes_ptr + (batch * tl.num_programs(1) + kv_head) * num_buckets
    for first in tl.range(0, num_buckets, BINS):
        here = bucket - first
        keys = tl.histogram(here, BINS, mask=(here >= 0) & (here < BINS) & (bucket < num_buckets))
        bin = first + tl.arange(0, BINS)
        tl.atomic_add(own_sizes_ptr + bin, keys, mask=(bin < num_buckets) & (keys > 0), sem="relaxed")

"""Nearest centroids and sums of their members: an iteration of spherical k-means.

    bucket[n] = argmax_c k_n . c          sums[c] = sum of the k_n with bucket[n] = c

The two kernels process all heads at once. Neither the products ``[M, C]`` nor the one-hot matrix of
the buckets is stored: both are computed tile by tile. A program of the first kernel owns BM keys
and loops over the centroids. A program of the second owns BC buckets, loops over a split of the
keys, and multiplies one-hot tiles with them. There are no atomics: splits are added in their order.

Products are nearly as accurate as in fp32. For 16-bit keys, an fp32 centroid is split into two
16-bit terms, ``high + low``, with an error of ``2 ** -18`` of itself in bf16 (less in fp16). For
fp32 keys, products are three TF32 products.

Tiles: BM keys, BC centroids or buckets, BD head size. Prefixes: b_ tile, o_ offset, m_ mask. Grid:
(key tile, head, sequence), then (bucket tile, head and sequence, split of the keys).
"""

import torch
from torch import Tensor

from msattn.kernels.common.bucket_checks import check_num_buckets
from msattn.kernels.common.checks import (
    check_device,
    check_tensor,
    check_tokens,
    resolve_backend,
    statistics_dtype,
)
from msattn.kernels.common.primitives import num_sms, padded_head, tl, triton, tuned_tile
from msattn.kernels.common.registration import USE_NO_GRAD, register_op
from msattn.kernels.common.splits import one_wave_splits
from msattn.kernels.reference import nearest_centroid as reference
from msattn.kernels.types import Backend, BucketSums, NearestCentroid


def nearest_centroid(
    k: Tensor, centroids: Tensor, *, backend: Backend | None = None
) -> NearestCentroid:
    """Finds the centroid that has the largest inner product with each key.

    This partitions the keys into buckets (SAAP, arXiv 2502.08246).

    Parameters
    ----------
    k : Tensor ``[B, H, M, D]``
        Keys, fp32, fp16 or bf16 (fp64 on the torch backend), finite. Strided views are not copied.
    centroids : Tensor fp32 ``[H, C, D]``
        Centroids (fp64 for fp64 keys), finite, also after conversion to the dtype of the keys.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    NearestCentroid
        ``buckets`` int32 and ``products`` fp32, both ``[B, H, M]``. Of equal products, the lowest
        centroid index is returned. The error of a product is at most
        ``(2 ** -18 + 2 D * 2 ** -23) |k| |c|``, from the split of the centroids and the rounding of
        fp32 sums. The exact product of the returned centroid is therefore within twice this bound
        of the largest.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass, which is not implemented.
    """
    check_tokens("k", k)
    shape = tuple(centroids.shape)
    if len(shape) != 3 or shape[0] != k.shape[1] or shape[1] < 1 or shape[2] != k.shape[3]:
        raise ValueError(
            f"centroids.shape={shape}: expected [{k.shape[1]}, C, {k.shape[3]}], with k's heads "
            f"and head size"
        )
    if centroids.dtype != statistics_dtype(k):
        raise ValueError(
            f"centroids.dtype={centroids.dtype}: expected {statistics_dtype(k)} for "
            f"k.dtype={k.dtype}"
        )
    check_device("centroids", centroids, "k", k)
    return NearestCentroid(*_nearest_operator(k, centroids, resolve_backend(backend, k, name="k")))


def bucket_sums(
    k: Tensor, buckets: Tensor, *, num_buckets: int, backend: Backend | None = None
) -> BucketSums:
    """Computes the sum and the number of the keys in each bucket.

    The sums, normalized, are the next centroids of spherical k-means.

    Parameters
    ----------
    k : Tensor ``[B, H, M, D]``
        Keys, fp32, fp16 or bf16 (fp64 on the torch backend), finite. Strided views are not copied.
    buckets : Tensor int32 ``[B, H, M]``
        The bucket of each key, 0 to ``num_buckets - 1``; keys with other numbers are excluded.
    num_buckets : int
        Number of buckets, C.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    BucketSums
        ``sums`` fp32 ``[B, H, C, D]``, ``counts`` int32 ``[B, H, C]``; deterministic on the Triton
        backend.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass, which is not implemented.
    """
    check_tokens("k", k)
    check_tensor("buckets", buckets, torch.int32, k.shape[:3], "k", k)
    check_num_buckets(num_buckets)
    return BucketSums(
        *_sums_operator(k, buckets, num_buckets, resolve_backend(backend, k, name="k"))
    )


def precision(dtype: torch.dtype) -> str:
    """Returns the ``input_precision`` of ``tl.dot``.

    fp32 takes three TF32 passes, which keep 22 of 24 bits. For 16-bit inputs the option has no
    effect.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def launch(k: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the centroids and launches the first kernel; the rows of its tile are keys, the keys
    centroids.
    """
    batch, heads, num_keys, head = k.shape
    num_buckets, cols = centroids.shape[1], padded_head(head)
    tile = tuned_tile("nearest_centroid", k)
    centroids = centroids.contiguous()
    high = centroids.to(k.dtype)
    low = None if k.dtype == torch.float32 else (centroids - high).to(k.dtype)
    buckets = torch.empty(k.shape[:3], dtype=torch.int32, device=k.device)
    products = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    _nearest_kernel[(triton.cdiv(num_keys, tile.rows), heads, batch)](
        k, high, low, buckets, products, *k.stride(), num_keys, num_buckets,
        HEAD=head, FULL=num_buckets % tile.keys == 0, BM=tile.rows, BC=tile.keys, BD=cols,
        PRECISION=precision(k.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return buckets, products


def launch_sums(k: Tensor, buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Launches the second kernel, the rows of whose tile are buckets, and adds its splits."""
    batch, heads, num_keys, head = k.shape
    cols = padded_head(head)
    tile = tuned_tile("bucket_sums", k)
    blocks = triton.cdiv(num_buckets, tile.rows) * heads * batch
    concurrent = tile.programs * num_sms(k.device)
    tiles = triton.cdiv(num_keys, tile.keys)
    steps = triton.cdiv(tiles, one_wave_splits(blocks, concurrent, tiles))  # tiles per split
    splits = triton.cdiv(num_keys, steps * tile.keys)
    sums = torch.empty(
        (splits, batch, heads, num_buckets, head), dtype=torch.float32, device=k.device
    )
    counts = torch.empty((splits, batch, heads, num_buckets), dtype=torch.int32, device=k.device)
    _sums_kernel[(triton.cdiv(num_buckets, tile.rows), heads * batch, splits)](
        k, buckets.contiguous(), sums, counts, *k.stride(),
        heads, num_keys, num_buckets, steps * tile.keys,
        HEAD=head, BM=tile.keys, BC=tile.rows, BD=cols, PRECISION=precision(k.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return sums.sum(0), counts.sum(0, dtype=torch.int32)


def _empty_nearest(k: Tensor, centroids: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape[:3], dtype=torch.int32), k.new_empty(
        k.shape[:3], dtype=statistics_dtype(k)
    )


def _empty_sums(
    k: Tensor, buckets: Tensor, num_buckets: int, backend: str
) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], num_buckets)
    return k.new_empty((*shape, k.shape[3]), dtype=statistics_dtype(k)), k.new_empty(
        shape, dtype=torch.int32
    )


_nearest_operator = register_op(
    "nearest_centroid", launch, reference.nearest_centroid, _empty_nearest, no_gradient=USE_NO_GRAD
)
_sums_operator = register_op(
    "bucket_sums", launch_sums, reference.bucket_sums, _empty_sums, no_gradient=USE_NO_GRAD
)


@triton.jit(do_not_specialize=["num_keys"])
def _nearest_kernel(
    k_ptr, high, low, buckets_ptr, products_ptr,
    stride_kb, stride_kh, stride_km, stride_kd, num_keys, num_buckets,
    HEAD: tl.constexpr, FULL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes buckets and products of BM keys. ``FULL``: C is a multiple of BC."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    o_c, o_d = tl.arange(0, BC), tl.arange(0, BD)
    m_row, m_d = row < num_keys, o_d < HEAD
    k_ptrs = (
        k_ptr
        + batch * stride_kb
        + head * stride_kh
        + row.to(tl.int64)[:, None] * stride_km
        + o_d[None, :] * stride_kd
    )
    b_k = tl.load(k_ptrs, mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BM, BD]
    o_tile = head * num_buckets * HEAD + o_c[:, None] * HEAD + o_d[None, :]  # [BC, BD]

    best = tl.full([BM], float("-inf"), tl.float32)
    bucket = tl.zeros([BM], tl.int32)
    for first in tl.range(0, num_buckets, BC):
        m_c = first + o_c < num_buckets
        m_tile = m_d[None, :] if FULL else m_c[:, None] & m_d[None, :]
        o_first = o_tile + first * HEAD
        # [BM, BC]
        s = tl.dot(
            b_k,
            tl.trans(tl.load(high + o_first, mask=m_tile, other=0.0)),
            input_precision=PRECISION,
        )
        if low is not None:
            s = tl.dot(
                b_k,
                tl.trans(tl.load(low + o_first, mask=m_tile, other=0.0)),
                s,
                input_precision=PRECISION,
            )
        if not FULL:
            s = tl.where(m_c[None, :], s, float("-inf"))
        s_max = tl.max(s, 1)
        # the lowest of equal ones
        s_top = tl.min(tl.where(s == s_max[:, None], o_c[None, :], BC), 1)
        better = s_max > best
        best = tl.where(better, s_max, best)
        bucket = tl.where(better, first + s_top, bucket)
    # of a NaN key, whose products are all NaN
    best = tl.where(best == float("-inf"), float("nan"), best)
    o_row = (batch * tl.num_programs(1) + head) * num_keys + row
    tl.store(buckets_ptr + o_row, bucket, mask=m_row)
    tl.store(products_ptr + o_row, best, mask=m_row)


@triton.jit(do_not_specialize=["heads"])
def _sums_kernel(
    k_ptr, buckets_ptr, sums_ptr, counts_ptr,
    stride_kb, stride_kh, stride_km, stride_kd, heads, num_keys, num_buckets,
    split_keys,
    HEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes one split's ``sums [S, B, H, C, D]`` and ``counts [S, B, H, C]``."""
    sequence_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_c, o_m, o_d = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BM), tl.arange(0, BD)
    m_d = o_d < HEAD
    k_ptr += sequence_head // heads * stride_kb + sequence_head % heads * stride_kh
    buckets_ptr += sequence_head * num_keys

    total = tl.zeros([BC, BD], tl.float32)
    # Counts are a product with ones, exact up to 2 ** 24 keys, since a row sum of the tile would
    # need another register layout.
    count = tl.zeros([BC, 16], tl.float32)
    ones = tl.full([BM, 16], 1.0, k_ptr.dtype.element_ty)
    begin = split * split_keys
    end = tl.minimum(begin + split_keys, num_keys)
    for first in tl.range(begin, end, BM):
        row = first + o_m
        m_row = row < end
        b_bucket = tl.load(buckets_ptr + row, mask=m_row, other=-1)
        k_ptrs = k_ptr + row.to(tl.int64)[:, None] * stride_km + o_d[None, :] * stride_kd
        b_k = tl.load(k_ptrs, mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BM, BD]
        member = (o_c[:, None] == b_bucket[None, :]).to(b_k.dtype)  # [BC, BM]
        total = tl.dot(member, b_k, total, input_precision=PRECISION)
        count = tl.dot(member, ones, count, input_precision=PRECISION)
    m_c = o_c < num_buckets
    o_out = (split.to(tl.int64) * tl.num_programs(1) + sequence_head) * num_buckets + o_c
    tl.store(
        sums_ptr + o_out[:, None] * HEAD + o_d[None, :], total, mask=m_c[:, None] & m_d[None, :]
    )
    tl.store(counts_ptr + o_out, tl.max(count, 1).to(tl.int32), mask=m_c)

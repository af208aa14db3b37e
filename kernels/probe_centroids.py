"""Selects the buckets of new tokens by their products with the centroids of k-means.

For a key/value head, with the centroids c of its buckets::

    score[c] = (sum of the vectors of a group) . c
    probes   = the L largest

With the queries of a group these are the buckets that k-means reads in a decoding step, with one
key and L = 1 the bucket of the key. For a few vectors the centroids are most of what is read:
programs of the first kernel divide them, and those of the second select from all scores of a group.
:mod:`msattn.kernels.nearest_centroid` is for many keys, each of whose programs reads all centroids.

Products are three TF32 products, which keep 22 of 24 bits.

Tiles: BM vectors, BC centroids, BD head size; BP all buckets. Prefixes: b_ tile, o_ offset, m_
mask. Grid: (row tile, block of centroids, key/value head), then (row, key/value head).
"""

import torch
from torch import Tensor

from msattn.kernels.common.best_of_row import LOWEST, largest_of_row, ordered_bits
from msattn.kernels.common.checks import (
    check_tensor,
    check_tokens,
    resolve_backend,
    statistics_dtype,
)
from msattn.kernels.common.primitives import (
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    tl,
    triton,
)
from msattn.kernels.common.registration import USE_NO_GRAD, register_op
from msattn.kernels.reference import probe_centroids as reference
from msattn.kernels.types import Backend, NearestCentroid

COLUMNS = 64  # centroids of a program
FEW_ROWS = 64


def probe_centroids(
    x: Tensor, centroids: Tensor, *, probes: int, backend: Backend | None = None
) -> NearestCentroid:
    """Selects the buckets whose centroids have the largest inner products with a few vectors.

    Parameters
    ----------
    x : Tensor ``[B, H, N, D]``
        Queries or keys, fp32, fp16 or bf16 (fp64 on the torch backend), finite. Strided views are
        not copied. Meant for up to some hundred ``B * N``.
    centroids : Tensor fp32 ``[Hkv, C, D]``
        Centroids (fp64 for fp64 vectors), finite. The vectors of the ``H // Hkv`` heads of a group
        are added.
    probes : int
        Number of buckets to select, L, 0 to C.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    NearestCentroid
        ``buckets`` int32 in increasing order, and ``products`` with their centroids, fp32; both
        ``[B, Hkv, N, L]``. Of buckets that tie for the last place, the kernel selects the first.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass, which is not implemented.
    """
    check_tokens("x", x)
    if centroids.dim() != 3 or min(centroids.shape) < 1 or x.shape[1] % len(centroids):
        raise ValueError(
            f"centroids.shape={tuple(centroids.shape)}: expected [Hkv, C, {x.shape[3]}], Hkv a "
            f"divisor of x's {x.shape[1]} heads"
        )
    heads, num_buckets, _ = centroids.shape
    shape = (heads, num_buckets, x.shape[3])
    check_tensor("centroids", centroids, statistics_dtype(x), shape, "x", x)
    if not 0 <= probes <= num_buckets:
        raise ValueError(f"probes={probes!r}: expected 0 to {num_buckets}, the number of buckets")
    return NearestCentroid(*_operator(x, centroids, probes, resolve_backend(backend, x, name="x")))


def launch(x: Tensor, centroids: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    """Launches both kernels; the grid depends only on shapes."""
    batch, heads, tokens, head = x.shape
    kv_heads, num_buckets, _ = centroids.shape
    rows = batch * tokens
    cols = padded_head(head)
    # two variants only, because kernels compile while users wait
    tile_rows = 16 if rows <= FEW_ROWS or cols > 128 else 64
    scores = x.new_empty((kv_heads, rows, num_buckets), dtype=torch.float32)
    shape = (batch, kv_heads, tokens, probes)
    buckets = x.new_empty(shape, dtype=torch.int32)
    products = x.new_empty(shape, dtype=torch.float32)
    if probes:
        _scores_kernel[(triton.cdiv(rows, tile_rows), triton.cdiv(num_buckets, COLUMNS), kv_heads)](
            x, centroids.contiguous(), scores, *x.stride(), heads // kv_heads, tokens, rows,
            num_buckets, HEAD=head, BM=tile_rows, BC=COLUMNS, BD=cols,
            num_warps=4, **pdl_args(x.device),
        )  # fmt: skip
        _select_kernel[(rows, kv_heads)](
            scores, buckets, products, tokens, num_buckets, probes,
            ONE=probes == 1, BP=triton.next_power_of_2(num_buckets),
            num_warps=4, **pdl_args(x.device),
        )  # fmt: skip
    return buckets, products


def _empty(x: Tensor, centroids: Tensor, probes: int, backend: str) -> tuple[Tensor, Tensor]:
    shape = (len(x), len(centroids), x.shape[2], probes)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=statistics_dtype(x))


_operator = register_op(
    "probe_centroids", launch, reference.probe_centroids, _empty, no_gradient=USE_NO_GRAD
)


@triton.jit(do_not_specialize=["group", "tokens", "rows"])
def _scores_kernel(
    x_ptr, centroids_ptr, scores_ptr, stride_xb, stride_xh, stride_xn, stride_xd,
    group, tokens, rows, num_buckets,
    HEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes ``scores [Hkv, B * N, C]``."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    kv_head = tl.program_id(2).to(tl.int64)
    bucket, o_d = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    m_bucket, m_d, m_row = bucket < num_buckets, o_d < HEAD, row < rows
    c_ptrs = centroids_ptr + (kv_head * num_buckets + bucket[:, None]) * HEAD + o_d[None, :]
    b_c = tl.load(c_ptrs, mask=m_bucket[:, None] & m_d[None, :], other=0.0)  # [BC, BD]
    x_ptrs = (
        x_ptr
        + (row // tokens * stride_xb + row % tokens * stride_xn + kv_head * group * stride_xh)[
            :, None
        ]
        + o_d[None, :] * stride_xd
    )
    total = tl.zeros([BM, BD], tl.float32)
    for _ in tl.range(0, group):
        total += tl.load(x_ptrs, mask=m_row[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        x_ptrs += stride_xh
    s = tl.dot(total, tl.trans(b_c), input_precision="tf32x3")  # [BM, BC]
    s_ptrs = scores_ptr + (kv_head * rows + row[:, None]) * num_buckets + bucket[None, :]
    tl.store(s_ptrs, s, mask=m_row[:, None] & m_bucket[None, :])


@triton.jit(do_not_specialize=["tokens", "probes"])
def _select_kernel(
    scores_ptr, buckets_ptr, products_ptr, tokens, num_buckets, probes,
    ONE: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Selects the buckets of one row; ``ONE`` is a single one."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, kv_heads = tl.num_programs(0), tl.num_programs(1)
    bucket = tl.arange(0, BP)
    live = bucket < num_buckets
    score = tl.load(
        scores_ptr + (kv_head * rows + row) * num_buckets + bucket, mask=live, other=float("-inf")
    )
    out = ((row // tokens * kv_heads + kv_head) * tokens + row % tokens) * probes
    if ONE:
        key = tl.where(live, ordered_bits(score), LOWEST)
        place, best = tl.zeros([BP], tl.int32), tl.max(key, 0)
        is_selected = bucket == tl.min(tl.where(key == best, bucket, BP), 0)
    else:
        is_selected = largest_of_row(score, live, probes)
        place = tl.cumsum(is_selected.to(tl.int32), 0) - 1
    tl.store(buckets_ptr + out + place, bucket, mask=is_selected)
    tl.store(products_ptr + out + place, score, mask=is_selected)

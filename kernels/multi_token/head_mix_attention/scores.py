"""Materialized scores of head_mix_attention, and their mixing over heads.

    write_scores         S_h = scale * Q_h K_(h // group)^T
    mix_heads            A_h = sum over heads g of W[h, g] S_g
    mix_heads_backward   dS_g = scale * sum over h of W[h, g] dA_h
                         dW[h, g] = sum over all pairs of dA_h S_g

A program of the first has one tile; the others are a matrix-vector product for each query and key.
For one query, a program of the last two loads a span of keys for all heads, ``[heads, BN]``, and
multiplies it with the weight on tensor cores; both are limited by memory bandwidth. Matrices are
``[B, H, rows, M]``. Gradients are 0 where a query does not see a key, so that later kernels need no
mask.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.primitives import (
    load_tile,
    padded_head,
    precision,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.multi_token.score_products import Rows

MAX_HEADS = 128  # limit: a program holds the weight, or its gradient, for all pairs of heads


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of materialized scores: fp32, or fp16 for 16-bit inputs.

    fp16 holds scores up to 65504 in magnitude; the rounding of bf16 is 8 times as coarse.
    """
    return torch.float32 if dtype == torch.float32 else torch.float16


def write_scores(q: Tensor, k: Tensor, scores: Tensor, rows: Rows, scale: float) -> None:
    """Writes the part of ``scores [B, H, rows, M]`` that the mixing kernels read.

    Left padding of q and k must be 0.
    """
    batch, kv_heads, num_keys, head = k.shape
    cols = padded_head(head)
    tile = tuned_tile("head_mix_scores", q)
    grid = (
        triton.cdiv(rows.end - rows.begin, tile.rows) * triton.cdiv(num_keys, tile.keys),
        kv_heads,
        batch,
    )
    _score_kernel[grid](
        tile_view(q, tile.rows), tile_view(k, tile.keys), scores, *scores.stride()[:3],
        q.shape[1] // kv_heads, num_keys, rows.begin, rows.end, rows.offset, scale,
        COLS=cols, BM=tile.rows, BN=tile.keys, REACH=mix_backward_tile(q.shape[1]).keys,
        CAUSAL=rows.causal, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _cast_scores(s, dtype: tl.constexpr):
    if dtype == tl.float16:
        s = tl.clamp(s, -65504.0, 65504.0)
    return s.to(dtype)


@triton.jit(do_not_specialize=["group", "begin", "end"])
def _score_kernel(
    q_desc, k_desc, scores_ptr, stride_b, stride_h, stride_n,
    group, num_keys, begin, end, offset, scale,
    COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (row and key tile, key/value head, sequence)."""
    key_tiles = tl.cdiv(num_keys, BN)
    i0, j0 = begin + tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    if CAUSAL and j0 >= tl.minimum(i0 + BM, end) + offset + REACH:
        return
    kv_head, b = tl.program_id(1), tl.program_id(2)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    inside = (i < end)[:, None] & (j < num_keys)[None, :]
    scores_ptr += (
        b.to(tl.int64) * stride_b + (i - begin).to(tl.int64)[:, None] * stride_n + j[None, :]
    )
    k = load_tile(k_desc, b, kv_head, j0, BN, COLS)
    for g in tl.range(0, group):  # type: ignore[misc]
        h = kv_head * group + g
        q = load_tile(q_desc, b, h, i0, BM, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        tl.store(
            scores_ptr + h.to(tl.int64) * stride_h,
            _cast_scores(s, scores_ptr.dtype.element_ty),
            mask=inside,
        )


class MixTile(NamedTuple):
    """Tile of a mixing program: for one query, some keys of all heads.

    ``heads`` is padded to a power of two; a program processes ``rows`` queries one after another.
    """

    heads: int
    keys: int
    rows: int
    warps: int

    def grid(self, scores: Tensor) -> tuple[int, int]:
        """Returns the grid: (span of rows and keys, sequence)."""
        batch, _, num_rows, num_keys = scores.shape
        return triton.cdiv(num_keys, self.keys) * triton.cdiv(num_rows, self.rows), batch


def mix_tile(num_heads: int) -> MixTile:
    """Returns the tile of :func:`mix_heads`.

    It has 8 KiB in 16 bits, or 16 KiB for 64 heads or more, where shared memory also holds a larger
    weight.
    """
    heads = padded_head(num_heads)
    return (
        MixTile(heads, min(256, 4096 // heads), 32, 4)
        if heads < 64
        else MixTile(heads, 8192 // heads, 32, 8)
    )


def mix_backward_tile(num_heads: int) -> MixTile:
    """Returns the tile of :func:`mix_heads_backward`.

    A program holds two such tiles and the gradient of the weight.
    """
    heads = padded_head(num_heads)
    return MixTile(heads, 128, 64, 4) if heads < 64 else MixTile(heads, 64, 64, 8)


def mix_heads(scores: Tensor, weight: Tensor, mixed: Tensor, rows: Rows) -> None:
    """Writes the mixed scores to ``mixed``, which may be ``scores``."""
    tile = mix_tile(scores.shape[1])
    heads, keys = tile.heads, tile.keys
    _mix_heads_kernel[tile.grid(scores)](
        tile_view(scores, 1, keys, heads), weight, mixed, *mixed.stride()[:3],
        scores.shape[1], scores.shape[3], rows.begin, rows.end, rows.offset,
        HEADS=heads, ROWS=tile.rows, BN=keys, CAUSAL=rows.causal, PRECISION=precision(mixed.dtype),
        num_warps=tile.warps, num_stages=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "begin", "end"])
def _mix_heads_kernel(
    s_desc, weight_ptr, mixed_ptr, stride_b, stride_h, stride_n,
    num_heads, num_keys, begin, end, offset,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (span of rows and keys, sequence)."""
    j0, first, last, b = _program_span(num_keys, begin, end, offset, ROWS, BN, CAUSAL)
    h, j = tl.arange(0, HEADS), j0 + tl.arange(0, BN)
    inside = (h < num_heads)[:, None] & (j < num_keys)[None, :]
    mixed_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64)[:, None] * stride_h + j[None, :]
    weight = _load_weight(weight_ptr, h[:, None], h[None, :], num_heads, mixed_ptr.dtype.element_ty)
    for n in tl.range(0, last - first):  # type: ignore[misc]
        row = first + n
        s = tl.reshape(s_desc.load([b, 0, row, j0]), [HEADS, BN])
        mixed = tl.dot(weight, s, input_precision=PRECISION)
        if CAUSAL:
            mixed = tl.where((j <= begin + row + offset)[None, :], mixed, 0.0)
        tl.store(
            mixed_ptr + row.to(tl.int64) * stride_n,
            _cast_scores(mixed, mixed_ptr.dtype.element_ty),
            mask=inside,
        )


def mix_heads_backward(
    scores: Tensor, dmixed: Tensor, weight: Tensor, rows: Rows, scale: float
) -> Tensor:
    """Replaces gradients of mixed scores by those of the unscaled products.

    Returns the gradient of the weight, fp32 ``[H, H]``.
    """
    num_heads = scores.shape[1]
    tile = mix_backward_tile(num_heads)
    heads, keys = tile.heads, tile.keys
    dweight = scores.new_empty(
        (math.prod(tile.grid(scores)), num_heads, num_heads), dtype=torch.float32
    )
    _mix_heads_backward_kernel[tile.grid(scores)](
        tile_view(scores, 1, keys, heads), tile_view(dmixed, 1, keys, heads), weight, dmixed,
        dweight,
        *dmixed.stride()[:3], num_heads, scores.shape[3], rows.begin, rows.end, rows.offset, scale,
        HEADS=heads, ROWS=tile.rows, BN=keys, CAUSAL=rows.causal, PRECISION=precision(dmixed.dtype),
        num_warps=tile.warps, num_stages=3,
    )  # fmt: skip
    return dweight.sum(0)


@triton.jit(do_not_specialize=["num_heads", "begin", "end"])
def _mix_heads_backward_kernel(
    s_desc, da_desc, weight_ptr, da_ptr, dweight_ptr, stride_b, stride_h, stride_n, num_heads,
    num_keys, begin, end, offset,
    scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (span of rows and keys, sequence)."""
    j0, first, last, b = _program_span(num_keys, begin, end, offset, ROWS, BN, CAUSAL)
    h, j = tl.arange(0, HEADS), j0 + tl.arange(0, BN)
    inside = (h < num_heads)[:, None] & (j < num_keys)[None, :]
    da_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64)[:, None] * stride_h + j[None, :]
    transposed = _load_weight(
        weight_ptr, h[None, :], h[:, None], num_heads, da_ptr.dtype.element_ty
    )
    dweight = tl.zeros([HEADS, HEADS], tl.float32)
    for n in tl.range(0, last - first):  # type: ignore[misc]
        row = first + n
        s = tl.reshape(s_desc.load([b, 0, row, j0]), [HEADS, BN])
        da = tl.reshape(da_desc.load([b, 0, row, j0]), [HEADS, BN])
        ds = tl.dot(transposed, da, input_precision=PRECISION) * scale
        tl.store(da_ptr + row.to(tl.int64) * stride_n, ds.to(da_ptr.dtype.element_ty), mask=inside)
        dweight = tl.dot(da, tl.trans(s.to(da.dtype)), dweight, input_precision=PRECISION)
    program = b * tl.num_programs(0) + tl.program_id(0)
    dweight_ptr += (program.to(tl.int64) * num_heads + h[:, None]) * num_heads + h[None, :]
    heads = (h < num_heads)[:, None] & (h < num_heads)[None, :]
    tl.store(dweight_ptr, dweight, mask=heads)


@triton.jit
def _program_span(
    num_keys, begin, end, offset, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns the first key, the rows ``[first, last)`` that see it, and the sequence.

    Rows are counted from ``begin``.
    """
    key_tiles = tl.cdiv(num_keys, BN)
    j0, first = tl.program_id(0) % key_tiles * BN, tl.program_id(0) // key_tiles * ROWS
    last = tl.minimum(first + ROWS, end - begin)
    if CAUSAL:
        first = tl.maximum(first, j0 - offset - begin)
    return j0, first, last, tl.program_id(1)


@triton.jit
def _load_weight(weight_ptr, row, column, num_heads, dtype: tl.constexpr):
    inside = (row < num_heads) & (column < num_heads)
    return tl.load(weight_ptr + row * num_heads + column, mask=inside, other=0.0).to(dtype)

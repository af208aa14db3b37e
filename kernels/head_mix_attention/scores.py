"""Scores of some queries for every head, mixed over the heads, and the way back: what head_mix_attention has in memory.

    write_scores   S_h = scale * Q_h K_(h // group)^T                      dense products, a tile for each program
    mix            A_h = sum over heads g of W[h, g] S_g                   for each pair of query and key, a vector of heads
    unmix          dS_g = scale * sum over h of W[h, g] dA_h               and dW[h, g] = sum over all pairs of dA_h S_g

A program of the last two reads, for one query, a stretch of keys of all heads, ``[heads, BN]``, and multiplies it with the
weight on tensor cores: they move memory, and little else. Matrices are ``[B, H, rows, M]``. Gradients hold 0 where a query does
not see a key, so that nothing has to be masked again. Prefix: p_ pointer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels import tuned
from msattn.kernels.common.primitives import capability, load_tile, padded_head, precision, tile_view, tl, triton
from msattn.kernels.common.score_products import Rows

MOST_HEADS = 128  # whose weight, and the gradient of it, a program can hold


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores of 16-bit inputs are kept in fp16: it holds any below 65504, and bf16 would round them 8 times as coarsely."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def write_scores(q: Tensor, k: Tensor, scores: Tensor, rows: Rows, scale: float) -> None:
    """Fill ``scores [B, H, rows, M]`` as far as :func:`mix` and :func:`unmix` read it; padding of q and k is 0."""
    batch, kv_heads, num_keys, head = k.shape
    cols = padded_head(head)
    tile = tuned.pick("head_mix_scores", cols, q.dtype, capability(q.device))
    grid = triton.cdiv(rows.end - rows.begin, tile.rows) * triton.cdiv(num_keys, tile.keys), kv_heads, batch
    _score_kernel[grid](
        tile_view(q, tile.rows), tile_view(k, tile.keys), scores, *scores.stride()[:3],
        q.shape[1] // kv_heads, num_keys, rows.begin, rows.end, rows.offset, scale,
        COLS=cols, BM=tile.rows, BN=tile.keys, BEYOND=unmix_stretch(q.shape[1]).keys,
        CAUSAL=rows.causal, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _to_stored(s, dtype: tl.constexpr):
    if dtype == tl.float16:
        s = tl.clamp(s, -65504.0, 65504.0)
    return s.to(dtype)


@triton.jit(do_not_specialize=["group", "begin", "end"])
def _score_kernel(
    q_desc, k_desc, p_scores, stride_b, stride_h, stride_n,
    group, num_keys, begin, end, offset, scale,
    COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BEYOND: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (row and key tile, key/value head, sequence)."""
    key_tiles = tl.cdiv(num_keys, BN)
    i0, j0 = begin + tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    if CAUSAL and j0 >= tl.minimum(i0 + BM, end) + offset + BEYOND:
        return
    kv_head, b = tl.program_id(1), tl.program_id(2)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    inside = (i < end)[:, None] & (j < num_keys)[None, :]
    p_scores += b.to(tl.int64) * stride_b + (i - begin).to(tl.int64)[:, None] * stride_n + j[None, :]
    k = load_tile(k_desc, b, kv_head, j0, BN, COLS)
    for g in tl.range(0, group):  # type: ignore[misc]
        h = kv_head * group + g
        q = load_tile(q_desc, b, h, i0, BM, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        tl.store(p_scores + h.to(tl.int64) * stride_h, _to_stored(s, p_scores.dtype.element_ty), mask=inside)


class Stretch(NamedTuple):
    """Keys of all heads, padded to a power of two, that a program holds for one query."""

    heads: int
    keys: int
    rows: int  # that it takes one after the other
    warps: int

    def grid(self, scores: Tensor) -> tuple[int, int]:
        """Programs: (rows and stretch of keys, sequence)."""
        batch, _, num_rows, num_keys = scores.shape
        return triton.cdiv(num_keys, self.keys) * triton.cdiv(num_rows, self.rows), batch


def mix_stretch(num_heads: int) -> Stretch:
    """What :func:`mix` reads at a time: 8 KiB of 16 bits, or 16 KiB beside a large weight."""
    heads = padded_head(num_heads)
    return Stretch(heads, min(256, 4096 // heads), 32, 4) if heads < 64 else Stretch(heads, 8192 // heads, 32, 8)


def unmix_stretch(num_heads: int) -> Stretch:
    """What :func:`unmix` reads at a time, twice, beside the gradient of the weight."""
    heads = padded_head(num_heads)
    return Stretch(heads, 128, 64, 4) if heads < 64 else Stretch(heads, 64, 64, 8)


def mix(scores: Tensor, weight: Tensor, mixed: Tensor, rows: Rows) -> None:
    """Fill ``mixed``, which may be ``scores``."""
    stretch = mix_stretch(scores.shape[1])
    heads, keys = stretch.heads, stretch.keys
    _mix_kernel[stretch.grid(scores)](
        tile_view(scores, 1, keys, heads), weight, mixed, *mixed.stride()[:3],
        scores.shape[1], scores.shape[3], rows.begin, rows.end, rows.offset,
        HEADS=heads, ROWS=stretch.rows, BN=keys, CAUSAL=rows.causal, PRECISION=precision(mixed.dtype),
        num_warps=stretch.warps, num_stages=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "begin", "end"])
def _mix_kernel(
    s_desc, p_weight, p_mixed, stride_b, stride_h, stride_n, num_heads, num_keys, begin, end, offset,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (rows and stretch of keys, sequence)."""
    j0, first, last, b = _place(num_keys, begin, end, offset, ROWS, BN, CAUSAL)
    h, j = tl.arange(0, HEADS), j0 + tl.arange(0, BN)
    inside = (h < num_heads)[:, None] & (j < num_keys)[None, :]
    p_mixed += b.to(tl.int64) * stride_b + h.to(tl.int64)[:, None] * stride_h + j[None, :]
    weight = _load_weight(p_weight, h[:, None], h[None, :], num_heads, p_mixed.dtype.element_ty)
    for n in tl.range(0, last - first):  # type: ignore[misc]
        row = first + n
        s = tl.reshape(s_desc.load([b, 0, row, j0]), [HEADS, BN])
        mixed = tl.dot(weight, s, input_precision=PRECISION)
        if CAUSAL:
            mixed = tl.where((j <= begin + row + offset)[None, :], mixed, 0.0)
        tl.store(p_mixed + row.to(tl.int64) * stride_n, _to_stored(mixed, p_mixed.dtype.element_ty), mask=inside)


def unmix(scores: Tensor, dmixed: Tensor, weight: Tensor, rows: Rows, scale: float) -> Tensor:
    """Turn gradients of mixed scores into those of unscaled products, in place; the gradient of the weight, ``[H, H]`` fp32."""
    num_heads = scores.shape[1]
    stretch = unmix_stretch(num_heads)
    heads, keys = stretch.heads, stretch.keys
    dweight = scores.new_empty((math.prod(stretch.grid(scores)), num_heads, num_heads), dtype=torch.float32)
    _unmix_kernel[stretch.grid(scores)](
        tile_view(scores, 1, keys, heads), tile_view(dmixed, 1, keys, heads), weight, dmixed, dweight,
        *dmixed.stride()[:3], num_heads, scores.shape[3], rows.begin, rows.end, rows.offset, scale,
        HEADS=heads, ROWS=stretch.rows, BN=keys, CAUSAL=rows.causal, PRECISION=precision(dmixed.dtype),
        num_warps=stretch.warps, num_stages=3,
    )  # fmt: skip
    return dweight.sum(0)


@triton.jit(do_not_specialize=["num_heads", "begin", "end"])
def _unmix_kernel(
    s_desc, da_desc, p_weight, p_da, p_dweight, stride_b, stride_h, stride_n, num_heads, num_keys, begin, end, offset, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (rows and stretch of keys, sequence)."""
    j0, first, last, b = _place(num_keys, begin, end, offset, ROWS, BN, CAUSAL)
    h, j = tl.arange(0, HEADS), j0 + tl.arange(0, BN)
    inside = (h < num_heads)[:, None] & (j < num_keys)[None, :]
    p_da += b.to(tl.int64) * stride_b + h.to(tl.int64)[:, None] * stride_h + j[None, :]
    transposed = _load_weight(p_weight, h[None, :], h[:, None], num_heads, p_da.dtype.element_ty)
    dweight = tl.zeros([HEADS, HEADS], tl.float32)
    for n in tl.range(0, last - first):  # type: ignore[misc]
        row = first + n
        s = tl.reshape(s_desc.load([b, 0, row, j0]), [HEADS, BN])
        da = tl.reshape(da_desc.load([b, 0, row, j0]), [HEADS, BN])
        ds = tl.dot(transposed, da, input_precision=PRECISION) * scale
        tl.store(p_da + row.to(tl.int64) * stride_n, ds.to(p_da.dtype.element_ty), mask=inside)
        dweight = tl.dot(da, tl.trans(s.to(da.dtype)), dweight, input_precision=PRECISION)
    program = b * tl.num_programs(0) + tl.program_id(0)
    p_dweight += (program.to(tl.int64) * num_heads + h[:, None]) * num_heads + h[None, :]
    heads = (h < num_heads)[:, None] & (h < num_heads)[None, :]
    tl.store(p_dweight, dweight, mask=heads)


@triton.jit
def _place(num_keys, begin, end, offset, ROWS: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """First key, first and last row (counted from ``begin``) that see it, and sequence of a program."""
    stretches = tl.cdiv(num_keys, BN)
    j0, first = tl.program_id(0) % stretches * BN, tl.program_id(0) // stretches * ROWS
    last = tl.minimum(first + ROWS, end - begin)
    if CAUSAL:
        first = tl.maximum(first, j0 - offset - begin)
    return j0, first, last, tl.program_id(1)


@triton.jit
def _load_weight(p_weight, row, column, num_heads, dtype: tl.constexpr):
    inside = (row < num_heads) & (column < num_heads)
    return tl.load(p_weight + row * num_heads + column, mask=inside, other=0.0).to(dtype)

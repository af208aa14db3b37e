"""The gradient of :mod:`msattn.kernels.conv_attention.forward`: scores ``A_h = sum over t < T of X_t Y_t^T``.

A tile of the score gradient ``dA = scale * P * (dP - row term)`` is multiplied with T tiles on either side. No program can keep
T accumulators, and making the scores again for each term would square their cost. So probabilities and score gradients of as
many rows as fit a scratch are written out, in 16 bits for 16-bit inputs, and read back by plain products with them::

    dV += P^T dO        dX_t += dA Y_t        dY_t += dA^T X_t

In all ``3 T + 2`` products of a tile, where dense attention has 5.
Rows i and keys j are those of the tensors, padding included, which holds zeros and is masked.

Prefix: p_ pointer. Programs: (row tile and span of keys, head of a sequence).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.primitives import (
    LOG2_E,
    load_lse2,
    load_tile,
    padded_head,
    precision,
    sequence_span,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.common.score_products import Rows, add_left, add_right, reach, row_chunks
from msattn.kernels.conv_attention.forward import Scores, heads_apart, mask_and_band, resident_queries, sum_products

LEAST_ROWS = 128  # at a time
TILES_AT_ONCE = 16  # of keys, that a program goes through


class Gradients(NamedTuple):
    """Gradients in fp32, laid out as what they belong to; ``band`` is None where there is none."""

    x: Tensor
    y: Tensor
    v: Tensor
    band: Tensor | None


def attend_backward(
    scores: Scores,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    row_term: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    """Gradients of what :func:`attend` read; ``row_term [B, H, N]`` is ``rowsum(dO * O)`` less the gradient of the LSE."""
    grads = [torch.zeros_like(z, dtype=torch.float32, memory_format=torch.contiguous_format) for z in (scores.x, scores.y, v)]
    dx, dy, dv = grads
    dband = None if scores.band is None else torch.zeros_like(scores.band)
    for rows, (probs, dscores) in row_chunks(scores.x, scores.y, v.dtype, 2, LEAST_ROWS, causal, kv_start):
        _write_gradient(scores, v, dout, lse, row_term, dband, probs, dscores, rows, scale)
        add_right(probs, dout, dv, rows)
        add_right(dscores, scores.x, dy, rows, scores.terms)
        add_left(dscores, scores.y, dx, rows, scores.terms)
    return Gradients(dx, dy, dv, dband)


def _write_gradient(
    scores: Scores,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    row_term: Tensor,
    dband: Tensor | None,
    probs: Tensor,
    dscores: Tensor,
    rows: Rows,
    scale: float,
) -> None:
    """Fill ``probs, dscores [B, H, rows, M]``; what belongs to the band goes there instead, and is 0 in ``dscores``."""
    batch, heads, num_queries, head = dout.shape
    num_keys = v.shape[2]
    tile = scores.tile("conv_attention_scores")
    spans = triton.cdiv(num_keys, tile.keys * TILES_AT_ONCE)
    _gradient_kernel[(triton.cdiv(rows.end - rows.begin, tile.rows) * spans, batch * heads)](
        tile_view(scores.x, tile.rows), tile_view(scores.y, tile.keys),
        tile_view(dout, tile.rows), tile_view(v, tile.keys),
        lse, row_term, scores.band, dband, probs, dscores, rows.kv_start,
        probs.stride(1), probs.stride(2), heads_apart(lse),
        heads, heads // v.shape[1], scores.terms, spans, num_queries, num_keys, rows.begin, rows.end, rows.offset,
        scores.width, scale, scale * LOG2_E,
        COLS=padded_head(head), BM=tile.rows, BN=tile.keys, SPAN=tile.keys * TILES_AT_ONCE, BEYOND=reach(v),
        RESIDENT=scores.resident, CAUSAL=rows.causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "stat_heads", "heads", "group", "terms", "spans", "begin", "end", "width"
    ]
)  # fmt: skip
def _gradient_kernel(
    x_desc, y_desc, do_desc, v_desc, p_lse, p_row_term, p_band, p_dband, p_probs, p_dscores, p_kv_start,
    stride_h, stride_n, stat_heads,
    heads, group, terms, spans, num_queries, num_keys, begin, end, offset, width, scale, scale2,
    COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, BEYOND: tl.constexpr,
    RESIDENT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = probabilities and score gradients of a tile of rows and a span of keys."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    i0, start = begin + tl.program_id(0) // spans * BM, tl.program_id(0) % spans * SPAN
    last, full = num_keys, num_keys  # keys to write, and those that all rows see, beyond the band
    if CAUSAL:
        last = tl.minimum(num_keys, tl.minimum(i0 + BM, end) + offset + BEYOND)
        full = tl.minimum(num_keys, i0 + offset + 1 - width)
    last = tl.minimum(last, start + SPAN)
    if start >= last:
        return
    first_key, first_query, _, _, _ = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    i = i0 + tl.arange(0, BM)
    exists = (i >= first_query) & (i < end)
    band = (b * heads + h).to(tl.int64) * num_queries * width
    if p_band is not None:
        p_band += band
    stats = (b * stat_heads + h).to(tl.int64) * num_queries
    lse2 = load_lse2(p_lse + stats, i, end)
    row_term = tl.load(p_row_term + stats + i, mask=exists, other=0.0)
    rows = tl.program_id(1).to(tl.int64) * stride_h + (i - begin).to(tl.int64)[:, None] * stride_n
    xs = resident_queries(x_desc, b, h, i0, RESIDENT, COLS, BM)
    do = load_tile(do_desc, b, h, i0, BM, COLS)
    for j0 in tl.range(start, last, BN):  # type: ignore[misc]
        j = j0 + tl.arange(0, BN)
        s = sum_products(xs, x_desc, y_desc, b, h, i0, j0, terms, RESIDENT, COLS, BM, BN, PRECISION)
        some_unseen = (j0 + BN > full) | (j0 < first_key) | (i0 < first_query)
        if some_unseen:
            s = mask_and_band(s, p_band, i, exists, i, j, num_keys, offset, width, CAUSAL)
            s = tl.where(exists[:, None] & (j >= first_key)[None, :], s, float("-inf"))
        p = tl.exp2(s * scale2 - lse2[:, None])
        inside = (i < end)[:, None] & (j < num_keys)[None, :]
        tl.store(p_probs + (rows + j[None, :]), p.to(p_probs.dtype.element_ty), mask=inside)
        v = load_tile(v_desc, b, h // group, j0, BN, COLS)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
        ds = p * (dp - row_term[:, None]) * scale
        if some_unseen:
            ds = tl.where(p > 0, ds, 0.0)  # whatever the padding holds
            if p_dband is not None:
                distance = i[:, None] + offset - j[None, :]
                near = (distance >= 0) & (distance < width)
                tl.store(p_dband + band + (i[:, None] * width + distance), ds, mask=near & exists[:, None])
                ds = tl.where(near, 0.0, ds)
        tl.store(p_dscores + (rows + j[None, :]), ds.to(p_dscores.dtype.element_ty), mask=inside)

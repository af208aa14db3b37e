"""Backward pass of conv_attention: scores ``A_h = sum over t < T of X_t Y_t^T``.

A tile of the score gradient ``dA = scale * P * (dP - row_delta)`` is multiplied with T tiles of X
and T tiles of Y. No program can hold T accumulators, and recomputing the scores, T products, for
each of T terms would take T^2 products. Probabilities and score gradients are therefore written to
scratch buffers, for as many rows at a time as fit, in 16 bits for 16-bit inputs, which are factors
of these products::

    dV += P^T dO        dX_t += dA Y_t        dY_t += dA^T X_t

In total there are ``3 T + 2`` products for each tile, where dense attention has 5. Rows i and keys
j index the tensors, including left padding, which holds zeros and is masked.

Grid: (row tile and span of keys, head of a sequence).
"""

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
from msattn.kernels.multi_token.conv_attention.forward import (
    ScoreFactors,
    apply_band_and_mask,
    load_resident_queries,
    parent_heads,
    sum_products,
)
from msattn.kernels.multi_token.score_products import (
    matmul_accumulate,
    matmul_accumulate_transposed,
    reach,
    row_chunks,
)

MIN_ROWS = 128  # query rows of a chunk at least
TILES_PER_PROGRAM = 16  # key tiles in the span of a program


def conv_attention_backward(
    factors: ScoreFactors,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    row_delta: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the fp32 gradients of the factors x and y, of v, and of the band, if there is one, in
    their layouts.

    ``row_delta [B, H, N]`` is ``rowsum(dO * O)``.
    """
    dx, dy, dv = (
        torch.zeros_like(z, dtype=torch.float32, memory_format=torch.contiguous_format)
        for z in (factors.x, factors.y, v)
    )
    dband = None if factors.band is None else torch.zeros_like(factors.band)
    batch, heads, num_queries, head = dout.shape
    num_keys, tile = v.shape[2], factors.tile("conv_attention_scores")
    span = tile.keys * TILES_PER_PROGRAM
    spans = triton.cdiv(num_keys, span)
    for rows, (probs, dscores) in row_chunks(
        factors.x, factors.y, v.dtype, 2, MIN_ROWS, causal, kv_start
    ):
        _score_gradient_kernel[(triton.cdiv(rows.end - rows.begin, tile.rows) * spans,
            batch * heads)](
            tile_view(factors.x, tile.rows), tile_view(factors.y, tile.keys),
            tile_view(dout, tile.rows), tile_view(v, tile.keys),
            lse, row_delta, factors.band, dband, probs, dscores, kv_start,
            probs.stride(1), probs.stride(2), parent_heads(lse),
            heads, heads // v.shape[1], factors.terms, spans,
            num_queries, num_keys, rows.begin, rows.end, rows.offset,
            factors.width, scale, scale * LOG2_E,
            COLS=padded_head(head), BM=tile.rows, BN=tile.keys, SPAN=span, REACH=reach(v),
            RESIDENT=factors.resident, CAUSAL=causal, PRECISION=precision(v.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        matmul_accumulate_transposed(probs, dout, dv, rows)
        matmul_accumulate_transposed(dscores, factors.x, dy, rows, factors.terms)
        matmul_accumulate(dscores, factors.y, dx, rows, factors.terms)
    return dx, dy, dv, dband


@triton.jit(
    do_not_specialize=[
        "stat_heads", "heads", "group", "terms", "spans", "begin", "end", "width"
    ]
)  # fmt: skip
def _score_gradient_kernel(
    x_desc, y_desc, do_desc, v_desc, lse_ptr, row_delta_ptr,
    band_ptr, dband_ptr, probs_ptr, dscores_ptr, kv_start_ptr,
    stride_h, stride_n, stat_heads,
    heads, group, terms, spans, num_queries, num_keys, begin, end, offset, width, scale, scale2,
    COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, REACH: tl.constexpr,
    RESIDENT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes P and dS of a row tile and a span of keys. Gradients within the band go to ``dband``
    and are 0 in ``dscores``.
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    i0, start = begin + tl.program_id(0) // spans * BM, tl.program_id(0) % spans * SPAN
    # end of the keys to write, and of those that all rows see outside the band
    last, full = num_keys, num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, tl.minimum(i0 + BM, end) + offset + REACH)
        full = tl.minimum(num_keys, i0 + offset + 1 - width)
    last = tl.minimum(last, start + SPAN)
    if start >= last:
        return
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    i = i0 + tl.arange(0, BM)
    exists = (i >= first_query) & (i < end)
    band = (b * heads + h).to(tl.int64) * num_queries * width
    if band_ptr is not None:
        band_ptr += band
    stats = (b * stat_heads + h).to(tl.int64) * num_queries
    lse2 = load_lse2(lse_ptr + stats, i, end)
    row_delta = tl.load(row_delta_ptr + stats + i, mask=exists, other=0.0)
    rows = tl.program_id(1).to(tl.int64) * stride_h + (i - begin).to(tl.int64)[:, None] * stride_n
    xs = load_resident_queries(x_desc, b, h, i0, RESIDENT, COLS, BM)
    do = load_tile(do_desc, b, h, i0, BM, COLS)
    for j0 in tl.range(start, last, BN):  # type: ignore[misc]
        j = j0 + tl.arange(0, BN)
        s = sum_products(xs, x_desc, y_desc, b, h, i0, j0, terms, RESIDENT, COLS, BM, BN, PRECISION)
        needs_mask = (j0 + BN > full) | (j0 < first_key) | (i0 < first_query)
        if needs_mask:
            s = apply_band_and_mask(s, band_ptr, i, exists, i, j, num_keys, offset, width, CAUSAL)
            s = tl.where(exists[:, None] & (j >= first_key)[None, :], s, float("-inf"))
        # also in rows that are NaN
        p = tl.where(s == float("-inf"), 0.0, tl.exp2(s * scale2 - lse2[:, None]))
        inside = (i < end)[:, None] & (j < num_keys)[None, :]
        tl.store(probs_ptr + (rows + j[None, :]), p.to(probs_ptr.dtype.element_ty), mask=inside)
        v = load_tile(v_desc, b, h // group, j0, BN, COLS)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
        ds = p * (dp - row_delta[:, None]) * scale
        if needs_mask:
            ds = tl.where(p != 0, ds, 0.0)  # padding rows of dO may hold NaN
            if dband_ptr is not None:
                distance = i[:, None] + offset - j[None, :]
                near = (distance >= 0) & (distance < width)
                tl.store(
                    dband_ptr + band + (i[:, None] * width + distance),
                    ds,
                    mask=near & exists[:, None],
                )
                ds = tl.where(near, 0.0, ds)
        tl.store(
            dscores_ptr + (rows + j[None, :]), ds.to(dscores_ptr.dtype.element_ty), mask=inside
        )

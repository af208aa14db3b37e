"""The gradient of :mod:`msattn.kernels.summed_attention`: scores ``A_h = sum over t < T of X_t Y_t^T``.

A tile of the score gradient ``dA = scale * P * (dP - row term)`` is multiplied with T tiles on either side. No program can keep
T accumulators, and making the scores again for each term would square their cost. So probabilities and score gradients of as
many rows as fit a scratch are written out, in 16 bits for 16-bit inputs, and read back by plain products with them::

    dV += P^T dO        dX_t += dA Y_t        dY_t += dA^T X_t

In all ``3 T + 2`` products of a tile, where dense attention has 5. Sums have one owner and one order: the same bits each time.
Rows i and keys j are those of the tensors, padding included; what lies in it is masked.

Prefixes: p_ pointer. Programs: (row and key tile, head of a sequence), then (tile, head or term, sequence).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels import summed_attention, tuned
from msattn.kernels.checks import query_offset
from msattn.kernels.primitives import (
    LN_2,
    LOG2_E,
    capability,
    load_tile,
    padded_head,
    precision,
    sequence_span,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.summed_attention import Scores, heads_apart, mask_and_band, sum_products


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
    batch, heads, num_queries, _ = dout.shape
    num_keys = v.shape[2]
    grads = [torch.zeros_like(z, dtype=torch.float32, memory_format=torch.contiguous_format) for z in (scores.x, scores.y, v)]
    dx, dy, dv = grads
    dband = None if scores.band is None else torch.zeros_like(scores.band)
    columns = -(-num_keys // 16) * 16  # a row starts at a multiple of 16 bytes
    rows = min(num_queries, max(128, summed_attention.SCRATCH // (batch * heads * columns) // 128 * 128))
    # Zeros: what stands after every query of its tile is never written, though a shifted tile may reach it. It stays
    # unwritten, because later rows see more keys.
    scratch = v.new_zeros((2, batch, heads, rows, columns))
    for begin in range(0, num_queries, rows):
        end = min(begin + rows, num_queries)
        probs, dscores = scratch[:, :, :, : end - begin, :num_keys]
        span = begin, end, query_offset(num_queries, num_keys, causal), causal
        _write_gradient(scores, v, dout, lse, row_term, dband, probs, dscores, kv_start, scale, *span)
        _add_right(probs, dout, dv, 1, heads // v.shape[1], scores.shifted, kv_start, *span)
        per, group = (scores.terms, 1) if scores.shifted else (scores.terms, heads)
        _add_right(dscores, scores.x, dy, per, group, scores.shifted, kv_start, *span)
        _add_left(dscores, scores.y, dx, scores.terms, scores.shifted, kv_start, *span)
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
    kv_start: Tensor | None,
    scale: float,
    begin: int,
    end: int,
    offset: int,
    causal: bool,
) -> None:
    """Fill ``probs, dscores [B, H, end - begin, M]``; what belongs to the band goes there instead, and is 0 here."""
    batch, heads, num_queries, head = dout.shape
    cols, num_keys = padded_head(head), v.shape[2]
    tile = tuned.pick("summed_attention_scores", cols, v.dtype, capability(v.device))
    grid = triton.cdiv(end - begin, tile.rows) * triton.cdiv(num_keys, tile.keys), batch * heads
    _gradient_kernel[grid](
        tile_view(scores.x, tile.rows), tile_view(scores.y, tile.keys),
        tile_view(dout, tile.rows), tile_view(v, tile.keys),
        lse, row_term, scores.band, dband, probs, dscores, kv_start,
        probs.stride(1), probs.stride(2), heads_apart(lse),
        heads, heads // v.shape[1], scores.terms, num_queries, num_keys, begin, end, offset, scores.width,
        scale, scale * LOG2_E,
        COLS=cols, BM=tile.rows, BN=tile.keys, SHIFTED=scores.shifted,
        PADDED=scores.shifted and not causal and kv_start is not None, CAUSAL=causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "stat_heads", "heads", "group", "terms", "begin", "end", "width"
    ]
)  # fmt: skip
def _gradient_kernel(
    x_desc, y_desc, do_desc, v_desc, p_lse, p_row_term, p_band, p_dband, p_probs, p_dscores, p_kv_start,
    stride_h, stride_n, stat_heads,
    heads, group, terms, num_queries, num_keys, begin, end, offset, width, scale, scale2,
    COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = one tile of probabilities and score gradients."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    key_tiles = tl.cdiv(num_keys, BN)
    i0, j0 = begin + tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    if CAUSAL and j0 > tl.minimum(i0 + BM, end) - 1 + offset:
        return
    first_key, first_query, _, _, _ = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    exists = (i >= first_query) & (i < end)
    band = (b * heads + h).to(tl.int64) * num_queries * width
    if p_band is not None:
        p_band += band
    s = sum_products(x_desc, y_desc, b, h, i0, j0, first_query, terms,
                      COLS, BM, BN, SHIFTED, PADDED, PRECISION)  # fmt: skip
    s = mask_and_band(s, p_band, i, exists, i, j, num_keys, offset, width, CAUSAL)
    stats = (b * stat_heads + h).to(tl.int64) * num_queries
    lse2 = tl.load(p_lse + stats + i, mask=exists, other=0.0) * (1.0 / LN_2)
    seen = exists[:, None] & ((j >= first_key) & (j < num_keys))[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + offset)
    p = tl.where(seen, tl.exp2(s * scale2 - lse2[:, None]), 0.0)
    place = tl.program_id(1).to(tl.int64) * stride_h + (i - begin).to(tl.int64)[:, None] * stride_n + j[None, :]
    inside = (i < end)[:, None] & (j < num_keys)[None, :]
    tl.store(p_probs + place, p.to(p_probs.dtype.element_ty), mask=inside)

    do = load_tile(do_desc, b, h, i0, BM, COLS)
    v = load_tile(v_desc, b, h // group, j0, BN, COLS)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
    row_term = tl.load(p_row_term + stats + i, mask=exists, other=0.0)
    ds = tl.where(seen, p * (dp - row_term[:, None]) * scale, 0.0)  # whatever the padding of v holds
    if p_dband is not None:
        distance = i[:, None] + offset - j[None, :]
        near = distance < width
        tl.store(p_dband + band + (i[:, None] * width + distance), ds, mask=seen & near)
        ds = tl.where(near, 0.0, ds)
    tl.store(p_dscores + place, ds.to(p_dscores.dtype.element_ty), mask=inside)


def _add_right(
    matrix: Tensor,
    x: Tensor,
    out: Tensor,
    per: int,
    group: int,
    shifted: bool,
    kv_start: Tensor | None,
    begin: int,
    end: int,
    offset: int,
    causal: bool,
) -> None:
    """``out [B, Z, M, D] += matrix^T x``, summed over ``group`` heads of ``matrix [B, H, end - begin, M]``.

    ``out`` has ``per`` terms for each group: those of one head, shifted, or else terms that all heads have in common.
    """
    batch, total, num_keys, head = out.shape
    cols = padded_head(head)
    tile = tuned.pick("summed_attention_products", cols, x.dtype, capability(x.device))
    _right_kernel[(triton.cdiv(num_keys, tile.rows), total, batch)](
        tile_view(matrix, tile.keys, tile.rows), tile_view(x, tile.keys), out, kv_start,
        per, group, x.shape[2], num_keys, begin, end, offset,
        HEAD=head, COLS=cols, BM=tile.keys, BN=tile.rows,
        SHIFTED=shifted, PADDED=kv_start is not None, CAUSAL=causal, PRECISION=precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["per", "group", "begin", "end"])
def _right_kernel(
    matrix_desc, x_desc, p_out, p_kv_start, per, group, num_queries, num_keys, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = one tile of keys of one term."""
    b, z, j0 = tl.program_id(2), tl.program_id(1), tl.program_id(0) * BN
    _, first_query, _, _, _ = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    term = z % per
    shift = term - (per - 1) if SHIFTED else 0
    first = tl.maximum(first_query - begin, 0)  # row of the matrix
    if CAUSAL:
        first = tl.maximum(first, j0 - offset - begin)
    acc = tl.zeros([BN, COLS], tl.float32)
    for g in tl.range(0, group):  # type: ignore[misc]
        h = z // per * group + g
        x_head = h if SHIFTED else h * per + term
        for row in tl.range(first // BM * BM, end - begin, BM):  # type: ignore[misc]
            matrix = tl.reshape(matrix_desc.load([b, h, row, j0]), [BM, BN])
            x_row = begin + row + shift
            x = load_tile(x_desc, b, x_head, x_row, BM, COLS)
            if PADDED:  # 0 times NaN is NaN
                x = tl.where((x_row + tl.arange(0, BM) >= first_query)[:, None], x, 0.0)
            acc = tl.dot(tl.trans(matrix), x, acc, input_precision=PRECISION)
    _add_tile(p_out, acc, b * tl.num_programs(1) + z, j0, 0, num_keys, num_keys, HEAD, BN, COLS)


def _add_left(
    matrix: Tensor,
    y: Tensor,
    out: Tensor,
    terms: int,
    shifted: bool,
    kv_start: Tensor | None,
    begin: int,
    end: int,
    offset: int,
    causal: bool,
) -> None:
    """``out [B, Z, N, D] += matrix y``: the sum of a head's terms, rows shifted back, or else a product for each."""
    batch, total, num_queries, head = out.shape
    cols, num_keys = padded_head(head), y.shape[2]
    tile = tuned.pick("summed_attention_products", cols, y.dtype, capability(y.device))
    first = max(begin - (terms - 1), 0) if shifted else begin
    _left_kernel[(triton.cdiv(end - first, tile.rows), total, batch)](
        tile_view(matrix, tile.rows, tile.keys), tile_view(y, tile.keys), out, kv_start,
        terms, num_queries, num_keys, first, begin, end, offset,
        HEAD=head, COLS=cols, BM=tile.rows, BN=tile.keys,
        SHIFTED=shifted, PADDED=kv_start is not None, CAUSAL=causal, PRECISION=precision(y.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["terms", "first", "begin", "end"])
def _left_kernel(
    matrix_desc, y_desc, p_out, p_kv_start, terms, num_queries, num_keys, first, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = one tile of queries."""
    b, z, i0 = tl.program_id(2), tl.program_id(1), first + tl.program_id(0) * BM
    first_key, first_query, _, _, _ = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    acc = tl.zeros([BM, COLS], tl.float32)
    for g in tl.range(0, terms if SHIFTED else 1):  # type: ignore[misc]
        if SHIFTED:
            h, y_head, row = z, z * terms + g, i0 + terms - 1 - g
        else:
            h, y_head, row = z // terms, z % terms, i0
        last = num_keys
        if CAUSAL:
            last = tl.minimum(num_keys, tl.minimum(row + BM, end) + offset)
        for j in tl.range(first_key // BN * BN, last, BN):  # type: ignore[misc]
            matrix = tl.reshape(matrix_desc.load([b, h, row - begin, j]), [BM, BN])
            y = load_tile(y_desc, b, y_head, j, BN, COLS)
            if PADDED:  # 0 times NaN is NaN
                y = tl.where((j + tl.arange(0, BN) >= first_key)[:, None], y, 0.0)
            acc = tl.dot(matrix, y, acc, input_precision=PRECISION)
    _add_tile(p_out, acc, b * tl.num_programs(1) + z, i0, first_query, end, num_queries, HEAD, BM, COLS)


@triton.jit
def _add_tile(
    p_out, tile, head, row, first, end, num_rows, HEAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Add to the rows from the given one on, if between ``first`` and ``end``, of a head of ``out [heads, num_rows, D]``."""
    r, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    place = p_out + (head.to(tl.int64) * num_rows + row) * HEAD + (r[:, None] * HEAD + d[None, :])
    inside = ((row + r >= first) & (row + r < end))[:, None] & (d < HEAD)[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + tile, mask=inside)

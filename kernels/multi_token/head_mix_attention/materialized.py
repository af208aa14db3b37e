"""Attention from materialized scores of a chunk of query rows, and its gradient.

    out_h = softmax over keys j of A_h, times V_(h // group)
    dV_z += sum over heads h of group z of P_h^T dO_h        dA_h = P_h * (dO_h V^T - row_delta)

Scores ``[B, H, rows, M]`` are scaled, in base e; V and dO are 0 before the start of a sequence. The
gradient overwrites the scores, in the dtype of V. A program of the backward kernel owns a tile of
keys and iterates over the rows and heads that see it. Grid: (tile, head, sequence).
"""

from torch import Tensor

from msattn.kernels.common.primitives import (
    LOG2_E,
    load_lse2,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    sequence_span,
    softmax_finalize,
    softmax_step,
    store_rows,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.multi_token.score_products import Rows, add_tile, reach

LOGITS_TO_BASE_2 = tl.constexpr(LOG2_E)


def materialized_attention(scores: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows) -> None:
    """Writes a chunk of rows of ``out [B, H, N, D]`` and contiguous ``lse [B, H, N]``."""
    batch, heads, num_queries, head = out.shape
    cols, num_keys = padded_head(head), v.shape[2]
    tile = tuned_tile("materialized_attention", v)
    _materialized_attention_kernel[(triton.cdiv(rows.end - rows.begin, tile.rows), heads, batch)](
        tile_view(scores, tile.rows, tile.keys), tile_view(v, tile.keys), out, lse, rows.kv_start,
        *out.stride()[:3],
        heads // v.shape[1], num_queries, num_keys, rows.begin, rows.end, rows.offset,
        HEAD=head, COLS=cols, BM=tile.rows, BN=tile.keys,
        CAUSAL=rows.causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["group", "begin", "end"])
def _materialized_attention_kernel(
    s_desc, v_desc, out_ptr, lse_ptr, kv_start_ptr, stride_b, stride_h, stride_n,
    group, num_queries, num_keys, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, h, b = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2)
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    i = begin + row + tl.arange(0, BM)
    # end of the keys that some query of the tile sees, and of those that all see
    last, full = num_keys, num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, tl.minimum(begin + row + BM, end) + offset)
        full = tl.minimum(num_keys, begin + row + offset + 1)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    for j0 in tl.range(first_key // BN * BN, last, BN):  # type: ignore[misc]
        j = j0 + tl.arange(0, BN)
        s = tl.reshape(s_desc.load([b, h, row, j0]), [BM, BN]).to(tl.float32)
        if (j0 + BN > full) | (j0 < first_key):
            s = mask_scores(s, i, j, num_keys, offset, CAUSAL)
            s = tl.where((j >= first_key)[None, :], s, float("-inf"))
        v = load_tile(v_desc, b, h // group, j0, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, LOGITS_TO_BASE_2, PRECISION)
    out, lse2 = softmax_finalize(m, l, acc, (i >= first_query) & (i < end))
    store_rows(out_ptr, lse_ptr, out, lse2, b, h, i, 0, tl.num_programs(1), num_queries,
               stride_b, stride_h, stride_n, HEAD, COLS)  # fmt: skip


def materialized_attention_backward(
    scores: Tensor, v: Tensor, dout: Tensor, lse: Tensor, row_delta: Tensor, dv: Tensor, rows: Rows
) -> Tensor:
    """Overwrites the scores by their gradient, and adds to fp32 ``dv [B, Hkv, M, D]``.

    Returns the gradient, a view of ``scores``. It is 0 in the
    :func:`~msattn.kernels.multi_token.score_products.reach` keys past the causal limit of a query.
    ``lse`` and ``row_delta`` (``rowsum(dO * O)`` less the gradient of the LSE) are contiguous
    ``[B, H, N]``.
    """
    batch, kv_heads, num_keys, head = v.shape
    cols, dscores = padded_head(head), scores.view(v.dtype)
    tile = tuned_tile("materialized_attention_backward", v)
    _materialized_attention_backward_kernel[(triton.cdiv(num_keys, tile.keys), kv_heads, batch)](
        tile_view(scores, tile.rows, tile.keys), tile_view(dout, tile.rows),
        tile_view(v, tile.keys),
        lse, row_delta, dscores, dv, rows.kv_start, *scores.stride()[:3],
        dout.shape[1] // kv_heads, dout.shape[2], num_keys, rows.begin, rows.end, rows.offset,
        HEAD=head, COLS=cols, BM=tile.rows, BN=tile.keys, REACH=reach(v),
        PADDED=rows.kv_start is not None, CAUSAL=rows.causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dscores


@triton.jit(do_not_specialize=["group", "begin", "end"])
def _materialized_attention_backward_kernel(
    s_desc, do_desc, v_desc, lse_ptr, row_delta_ptr, dscores_ptr,
    dv_ptr, kv_start_ptr, stride_b, stride_h, stride_n,
    group, num_queries, num_keys, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j0, kv_head, b = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2)
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    j = j0 + tl.arange(0, BN)
    dscores_ptr += b.to(tl.int64) * stride_b
    first = first_query
    if CAUSAL:
        first = tl.maximum(first, j0 - offset)
    # includes the rows whose gradient must be set to 0
    first = tl.maximum(first - begin - REACH, 0) // BM * BM
    tiles = tl.cdiv(tl.maximum(end - begin - first, 0), BM)
    v = load_tile(v_desc, b, kv_head, j0, BN, COLS)
    dv = tl.zeros([BN, COLS], tl.float32)
    for n in tl.range(0, group * tiles):  # type: ignore[misc]
        h, row = kv_head * group + n // tiles, first + n % tiles * BM
        i = begin + row + tl.arange(0, BM)
        s = tl.reshape(s_desc.load([b, h, row, j0]), [BM, BN]).to(tl.float32)
        do = load_tile(do_desc, b, h, begin + row, BM, COLS)
        statistics = (b * tl.num_programs(1) * group + h).to(tl.int64) * num_queries
        lse2 = load_lse2(lse_ptr + statistics, i, end)
        row_delta = tl.load(
            row_delta_ptr + statistics + i, mask=(i >= first_query) & (i < end), other=0.0
        )
        p = tl.exp2(s * LOGITS_TO_BASE_2 - lse2[:, None])
        if CAUSAL and j0 + BN - 1 > begin + row + offset:
            p = tl.where(j[None, :] <= i[:, None] + offset, p, 0.0)
        if PADDED:
            p = tl.where((j >= first_key)[None, :], p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
        ds = tl.where(p != 0, p * (dp - row_delta[:, None]), 0.0)  # row_delta may be NaN
        rows_ptrs = (
            dscores_ptr + h.to(tl.int64) * stride_h + (i - begin).to(tl.int64)[:, None] * stride_n
        )
        inside = (i < end)[:, None] & (j < num_keys)[None, :]
        tl.store(rows_ptrs + j[None, :], ds.to(dscores_ptr.dtype.element_ty), mask=inside)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    add_tile(
        dv_ptr, dv, b * tl.num_programs(1) + kv_head, j0, 0, num_keys, num_keys, HEAD, BN, COLS
    )

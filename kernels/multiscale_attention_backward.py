"""Gradient of multi-scale attention, in passes that each follow what the zooms read.

    P = n exp(scale * Q K^T) / exp(lse)    dP = dO V^T    dS = P * (dP - rowsum(dO * O) + dlse)
    dQ = scale * dS K   dK = scale * dS^T Q    dV = P^T dO

with means for K and V, and n keys in each, where a block is pooled. The first pass owns a row block, walks its list as the
forward does and gives dQ. The second owns a tile of means of a key/value head, one level's means of some neighbouring column
blocks, and walks, for each query head of the group, the row blocks that read any of them at that level. A row block costs the
products of a whole tile: neighbours which share a zoom cost as their tokens do; a lone block of zoom 8 would cost as much by
itself, for its loads are Q and dO. The third does the same for the keys as they are and adds what their means have: a mean of n
keys passes on ``1 / n`` to each. So every sum is one program's, in one order: no atomics, the same bits every time; fp32
gradients of the means, of 7/8 as many rows as K and V, are the only partial results in memory.

Layouts: row term ``rowsum(dO * O) - dlse`` fp32 ``[B, Hq, N]``; lists and means as in :mod:`msattn.kernels.multiscale_levels`.
A tile has BM queries and BN keys (means), each a block or an even part of one, or BP means. Prefix: p_ pointer.
"""

import torch
from torch import Tensor

from msattn.kernels import tuned
from msattn.kernels.checks import check_layout, has_aligned_rows, query_offset
from msattn.kernels.multiscale_levels import (
    find_list,
    find_means,
    find_row_list,
    find_tile,
    first_tile,
    group_size,
    level_of_tile,
    load_means,
    log_size,
    mask_means,
    pool,
    pooled_tiles,
    row_lists,
    store_means,
    tile_lists,
)
from msattn.kernels.primitives import (
    LN_2,
    LOG2_E,
    capability,
    load_lse2,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    sequence_span,
    store_tile,
    tile_view,
    tl,
    triton,
)


def launch(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    zoom: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    causal: bool,
    scale: float,
    dq_tile: tuned.Tile | None = None,
    dkv_tile: tuned.Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; the tiles override the shipped choice, for tuning."""
    check_layout(q=q, k=k, v=v, out=out)
    if not has_aligned_rows(dout) or 0 in dout.stride():  # autograd may hand over an expanded scalar
        dout = dout.contiguous()
    lse, dlse = lse.contiguous(), dlse.contiguous()
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols, sm = padded_head(head), capability(q.device)
    selection = zoom, kv_start, num_queries, num_keys, block_size, causal
    constants = {"HEAD": head, "COLS": cols, "BLOCK": block_size, "CAUSAL": causal, "PRECISION": precision(q.dtype)}
    means = pool(k, v, kv_start, block_size)

    lists, counts = row_lists(*selection)
    sizes = (
        q_heads // kv_heads, kv_heads, num_queries, num_keys, *zoom.shape[2:], *lists.shape[:2],
        query_offset(num_queries, num_keys, causal), scale * LOG2_E,
    )  # fmt: skip
    tile = dq_tile or tuned.pick("multiscale_attention_dq", cols, q.dtype, sm)
    rows, keys = min(block_size, tile.rows), min(block_size, tile.keys)
    dq, row_term = torch.empty_like(q), torch.empty_like(lse)
    _dq_kernel[(batch * q_heads * zoom.shape[2] * (block_size // rows),)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys), tile_view(out, rows), tile_view(dout, rows),
        means, lse, dlse, dq, row_term, lists, counts, kv_start, *dq.stride()[:3], *sizes,
        BM=rows, BN=keys, BP=tile.keys, **constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip

    tile = dkv_tile or tuned.pick("multiscale_attention_dkv", cols, q.dtype, sm)
    rows, keys = min(block_size, tile.rows), min(block_size, tile.keys)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dmeans = torch.empty_like(means, dtype=torch.float32)
    for pooled, x, y in ((True, *means.unbind(3)), (False, k, v)):
        del lists, counts  # room for the next
        lists, counts = tile_lists(*selection, pooled)
        _dkv_kernel[(batch * kv_heads * lists.shape[2] * (block_size // keys),)](
            tile_view(q, rows), tile_view(x, keys), tile_view(y, keys), tile_view(dout, rows),
            lse, row_term, dmeans, dk, dv, lists, counts, kv_start,
            *dk.stride()[:3], *dv.stride()[:3], *sizes,
            BM=rows, BN=keys, POOLED=pooled, **constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dq, dk, dv


SIZES = ["group", "kv_heads", "row_blocks", "col_blocks", "list_batch", "list_heads"]


@triton.jit(do_not_specialize=SIZES)
def _dq_kernel(
    q_desc, k_desc, v_desc, out_desc, dout_desc, p_means,
    p_lse, p_dlse, p_dq, p_row_term, p_lists, p_counts, p_kv_start,
    stride_b, stride_h, stride_n,
    group, kv_heads, num_queries, num_keys, row_blocks, col_blocks, list_batch, list_heads, offset, scale2,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A group's heads come together, to meet in the L2 cache; long rows come first.
    pid = tl.program_id(0)
    tiles = row_blocks * (BLOCK // BM)
    t0 = (tiles - 1 - pid // group % tiles) * BM
    kv_head = pid // (group * tiles) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * tiles * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    p_list, keys8, keys4, keys2, keys1 = find_row_list(
        p_lists, p_counts, b, h, t0 // BLOCK, kv_heads * group, list_batch, list_heads, row_blocks, col_blocks
    )
    p_means = find_means(p_means, b, kv_head, kv_heads, col_blocks, HEAD, BLOCK)

    t = t0 + tl.arange(0, BM)
    first_row = (b * kv_heads * group + h).to(tl.int64) * num_queries + first_query
    lse2 = load_lse2(p_lse + first_row, t, queries)[:, None]
    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
    out = load_tile(out_desc, b, h, first_query + t0, BM, COLS)
    row_term = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    row_term -= tl.load(p_dlse + first_row + t, mask=t < queries, other=0.0)
    row_term = tl.where(lse2 == float("inf"), 0.0, row_term[:, None])  # whatever the loss does with an LSE of -inf
    tl.store(p_row_term + first_row + t[:, None], row_term, mask=(t < queries)[:, None])

    dq = tl.zeros([BM, COLS], tl.float32)
    level, left, row = find_tile(0, p_list, keys8, keys4, keys2, col_blocks, BLOCK, BP)
    for n in tl.range(0, pooled_tiles(keys8, keys4, keys2, BP)):  # type: ignore[misc]
        k = load_means(p_means, row, 0, HEAD, COLS)  # [BP, COLS]
        v = load_means(p_means, row, 1, HEAD, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if left < (BP << level):
            s = mask_means(s, level, left, scale2, BP)
        p = tl.exp2(s * scale2 - (lse2 - level))
        ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - row_term)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        level, left, row = find_tile(n + 1, p_list, keys8, keys4, keys2, col_blocks, BLOCK, BP)  # ahead of its loads

    p_list += tl.cdiv(keys8, BLOCK) + tl.cdiv(keys4, BLOCK) + tl.cdiv(keys2, BLOCK)
    plain_end = tl.minimum(keys, t0 + delta + 1) if CAUSAL else keys  # tiles up to here need no mask
    PARTS: tl.constexpr = BLOCK // BN
    for n in tl.range(0, tl.cdiv(keys1, BLOCK) * PARTS):  # type: ignore[misc]
        u0 = tl.load(p_list + n // PARTS).to(tl.int32) * BLOCK + n % PARTS * BN
        k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
        v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if u0 + BN > plain_end:
            s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
        p = tl.exp2(s * scale2 - lse2)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - row_term)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(p_dq, dq * (scale2 * LN_2), b, h, t, first_query, num_queries, stride_b, stride_h, stride_n, HEAD, COLS)


@triton.jit(do_not_specialize=SIZES)
def _dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, p_lse, p_row_term, p_dmeans, p_dk, p_dv, p_lists, p_counts, p_kv_start,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    group, kv_heads, num_queries, num_keys, row_blocks, col_blocks, list_batch, list_heads, offset, scale2,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    # Scores stand transposed, [BN, BM], so that P^T and dS^T go into their products straight from registers.
    pid = tl.program_id(0)
    num_tiles = first_tile(1, col_blocks) + tl.cdiv(col_blocks, 2) if POOLED else col_blocks
    parts = num_tiles * (BLOCK // BN)
    row0 = pid % parts * BN  # of K, or its means; long columns come first
    kv_head = pid // parts % kv_heads
    b = pid // (parts * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    first = 0 if POOLED else first_key
    k = load_tile(k_desc, b, kv_head, first + row0, BN, COLS)
    v = load_tile(v_desc, b, kv_head, first + row0, BN, COLS)

    tile = row0 // BLOCK
    level, number = level_of_tile(tile, col_blocks, POOLED)
    inside = row0 % BLOCK + tl.arange(0, BN)
    u = (number * BLOCK + inside) << level  # first key of each group
    size = group_size(u, level, keys)
    bias = log_size(tl.maximum(size, 1), scale2)
    bit = (inside << level) // BLOCK  # which of the tile's column blocks

    dk = tl.zeros([BN, COLS], tl.float32)
    dv = tl.zeros([BN, COLS], tl.float32)
    PARTS: tl.constexpr = BLOCK // BM
    for h in tl.range(kv_head * group, (kv_head + 1) * group):  # type: ignore[misc]
        own = find_list(b, h, tile, kv_heads * group, list_batch, list_heads, num_tiles)
        count = tl.load(p_counts + own)
        first_row = (b * kv_heads * group + h).to(tl.int64) * num_queries + first_query
        for n in tl.range(0, count * PARTS):  # type: ignore[misc]
            entry = tl.load(p_lists + own * row_blocks + count - 1 - n // PARTS)
            t0 = (entry >> 8) * BLOCK + n % PARTS * BM
            t = t0 + tl.arange(0, BM)
            q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
            dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
            if POOLED:
                s += tl.where((entry >> bit) & 1 != 0, bias, float("-inf"))[:, None]
            elif CAUSAL and t0 + delta < row0 + BN - 1:
                s = tl.where(u[:, None] <= t[None, :] + delta, s, float("-inf"))
            p = tl.exp2(s * scale2 - load_lse2(p_lse + first_row, t, queries)[None, :])
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            row_term = tl.load(
                p_row_term + first_row + t, mask=t < queries, other=0.0
            )  # late, as LSEs are: registers are short
            ds = p * (dp - row_term[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk *= scale2 * LN_2

    p_dmeans = find_means(p_dmeans, b, kv_head, kv_heads, col_blocks, HEAD, BLOCK)
    if POOLED:
        share = 1.0 / tl.maximum(size, 1).to(tl.float32)[:, None]
        row = row0 + tl.arange(0, BN)
        store_means(p_dmeans, dk * share, row, row >= 0, 0, HEAD, COLS)
        store_means(p_dmeans, dv * share, row, row >= 0, 1, HEAD, COLS)
    else:
        for e in tl.range(1, 4, num_stages=1):  # type: ignore[misc]
            row = first_tile(e, col_blocks) * BLOCK + (tl.maximum(tl.minimum(u, keys - 1), 0) >> e)
            dk += load_means(p_dmeans, row, 0, HEAD, COLS)
            dv += load_means(p_dmeans, row, 1, HEAD, COLS)
        store_tile(p_dk, dk, b, kv_head, u, first_key, num_keys, stride_kb, stride_kh, stride_kn, HEAD, COLS)
        store_tile(p_dv, dv, b, kv_head, u, first_key, num_keys, stride_vb, stride_vh, stride_vn, HEAD, COLS)

"""Multi-scale attention, backward pass.

A dQ kernel runs first, then a dK/dV kernel for the means and again for the keys.

    P = n exp(scale * Q K^T) / exp(lse)    dP = dO V^T    dS = P * (dP - rowsum(dO * O) + dlse)
    dQ = scale * dS K   dK = scale * dS^T Q    dV = P^T dO

With a cap of the scores, S are the capped ones, and dS is multiplied by ``1 - (S / softcap)^2``.

For pooled blocks, K and V are means and n is the number of keys of each. A program of the dQ kernel
owns a row block and iterates over its list like the forward pass. A program of the dK/dV kernel for
means owns a tile of a key/value head: the means, at one level, of adjacent column blocks. It
iterates over the row blocks, of all query heads of the group, that read any of them at that level.
Each row block costs the products of a whole tile, so the cost of adjacent blocks that share a zoom
is proportional to their tokens. An isolated block of zoom 8 costs a whole tile, but a smaller tile
would not be faster, because loading Q and dO dominates. The dK/dV kernel for keys does the same for
blocks of zoom 1 and adds the gradients of the means: a mean of n keys passes ``1 / n`` to each of
them. Each sum is accumulated by one program in a fixed order: no atomics, bitwise reproducible. The
only partial results in memory are fp32 gradients of the means, 7/8 as many rows as K and V.

Layouts: row statistics as in :mod:`msattn.kernels.common.backward_tiles`, lists and means as in
``lists`` and ``levels`` of :mod:`msattn.kernels.multiscale_attention`. A tile has BM queries and BN
keys (means), each a block or an even part of one, or BP means.
"""

import torch
from torch import Tensor

from msattn.kernels.common.backward_tiles import (
    dkv_step,
    dq_step,
    empty_row_stats,
    load_query_rows,
    row_stats_view,
)
from msattn.kernels.common.block_lists import find_list
from msattn.kernels.common.checks import aligned_gradient, check_layout, query_offset
from msattn.kernels.common.primitives import (
    LN_2,
    LOG2_E,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    sequence_span,
    store_tile,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.common.softcap import cap_scores_with_slope, unscaled_limit
from msattn.kernels.multiscale_attention.levels import (
    add_log_sizes,
    first_tile,
    group_size,
    head_means,
    level_ends,
    level_of_tile,
    load_means,
    locate_means,
    pool_means,
    store_means,
)
from msattn.kernels.multiscale_attention.lists import find_row_list, row_lists, tile_lists


def launch(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernels and returns dq, dk, dv."""
    dout = aligned_gradient(dout)
    check_layout(dout=dout, q=q, k=k, v=v, out=out)
    lse, dlse = lse.contiguous(), dlse.contiguous()
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    selection = zoom, kv_start, num_queries, num_keys, block_size, causal
    constants = {
        "HEAD": head,
        "COLS": cols,
        "BLOCK": block_size,
        "CAUSAL": causal,
        "PRECISION": precision(q.dtype),
    }
    group, offset = q_heads // kv_heads, query_offset(num_queries, num_keys, causal)
    sizes = kv_heads, num_queries, num_keys, *zoom.shape[2:]
    means, limit = pool_means(k, v, kv_start, block_size), unscaled_limit(softcap, scale)

    lists, counts = row_lists(*selection)
    tile = tuned_tile("multiscale_attention_dq", q)
    rows, keys = min(block_size, tile.rows), min(block_size, tile.keys)
    dq, row_stats = torch.empty_like(q), empty_row_stats(lse)
    _dq_kernel[(batch * q_heads * zoom.shape[2] * (block_size // rows),)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys), tile_view(out, rows),
        tile_view(dout, rows),
        means, lse, dlse, dq, row_stats, lists, counts,
        kv_start, *dq.stride()[:3], row_stats.stride(2),
        group, *sizes, *lists.shape[:2], offset, scale * LOG2_E, limit,
        BM=rows, BN=keys, BP=tile.keys, **constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip

    tile = tuned_tile("multiscale_attention_dkv", q)
    rows, keys = min(block_size, tile.rows), min(block_size, tile.keys)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dmeans = torch.empty_like(means, dtype=torch.float32)
    for pooled, x, y in ((True, *means.unbind(3)), (False, k, v)):
        del lists, counts  # frees their memory before the next lists are allocated
        lists, counts = tile_lists(*selection, kv_heads, group, pooled)
        # A tile of means also multiplies rows by P = 0 for blocks that they do not read. Where rows
        # are NaN, P is.
        rows_of = [tile_view(row.nan_to_num() if pooled else row, rows) for row in (q, dout)]
        _dkv_kernel[(batch * kv_heads * lists.shape[2] * (block_size // keys),)](
            rows_of[0], tile_view(x, keys), tile_view(y, keys), rows_of[1],
            row_stats_view(row_stats, num_queries, rows),
            dmeans, dk, dv, lists, counts, kv_start, *dk.stride()[:3], *dv.stride()[:3],
            *sizes, lists.shape[0], offset, scale * LOG2_E, limit,
            GROUP=group, BM=rows, BN=keys, POOLED=pooled, **constants, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return dq, dk, dv


UNSPECIALIZED = ["kv_heads", "row_blocks", "col_blocks", "list_batch"]


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group", "list_heads", "stride_stats"])
def _dq_kernel(
    q_desc, k_desc, v_desc, out_desc, dout_desc, means_ptr,
    lse_ptr, dlse_ptr, dq_ptr, stats_ptr, lists_ptr, counts_ptr, kv_start_ptr,
    stride_b, stride_h, stride_n, stride_stats,
    group, kv_heads, num_queries, num_keys, row_blocks,
    col_blocks, list_batch, list_heads, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads of a group are adjacent for L2 reuse; the longest rows come first.
    pid = tl.program_id(0)
    tiles = row_blocks * (BLOCK // BM)
    t0 = (tiles - 1 - pid // group % tiles) * BM
    kv_head = pid // (group * tiles) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * tiles * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    list_ptr, keys8, keys4, keys2, keys1 = find_row_list(
        lists_ptr,
        counts_ptr,
        b,
        h,
        t0 // BLOCK,
        kv_heads * group,
        list_batch,
        list_heads,
        row_blocks,
        col_blocks,
    )
    means_ptr = head_means(means_ptr, b, kv_head, kv_heads, col_blocks, HEAD, BLOCK)

    q, dout, lse2, row_delta = load_query_rows(
        q_desc, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr,
        b, h, kv_heads * group, t0, first_query, queries, num_queries, stride_stats, BM, COLS,
    )  # fmt: skip

    t = t0 + tl.arange(0, BM)
    dq = tl.zeros([BM, COLS], tl.float32)
    _, _, pooled = level_ends(keys8, keys4, keys2)
    level, row = locate_means(0, list_ptr, keys8, keys4, keys2, col_blocks, BLOCK, BP)
    for n in tl.range(0, tl.cdiv(pooled, BP)):  # type: ignore[misc]
        k = load_means(means_ptr, row, 0, HEAD, COLS)  # [BP, COLS]
        v = load_means(means_ptr, row, 1, HEAD, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        slope = None
        if limit is not None:
            s, slope = cap_scores_with_slope(s, limit)
        if level == 0:
            s = add_log_sizes(s, n, keys8, keys4, keys2, scale2, BP)
        dq = dq_step(dq, s, slope, dout, k, v, lse2 - level, row_delta, scale2, PRECISION)
        # early, to prefetch the loads
        level, row = locate_means(n + 1, list_ptr, keys8, keys4, keys2, col_blocks, BLOCK, BP)

    list_ptr += tl.cdiv(keys8, BLOCK) + tl.cdiv(keys4, BLOCK) + tl.cdiv(keys2, BLOCK)
    full_end = tl.minimum(keys, t0 + delta + 1) if CAUSAL else keys  # tiles up to here are full
    PARTS: tl.constexpr = BLOCK // BN
    for n in tl.range(0, tl.cdiv(keys1, BLOCK) * PARTS):  # type: ignore[misc]
        u0 = tl.load(list_ptr + n // PARTS).to(tl.int32) * BLOCK + n % PARTS * BN
        k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
        v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        slope = None
        if limit is not None:
            s, slope = cap_scores_with_slope(s, limit)
        if u0 + BN > full_end:
            s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
        dq = dq_step(dq, s, slope, dout, k, v, lse2, row_delta, scale2, PRECISION)
    store_tile(
        dq_ptr,
        dq * (scale2 * LN_2),
        b,
        h,
        t,
        first_query,
        num_queries,
        stride_b,
        stride_h,
        stride_n,
        HEAD,
        COLS,
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_desc, dmeans_ptr,
    dk_ptr, dv_ptr, lists_ptr, lengths_ptr, kv_start_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    kv_heads, num_queries, num_keys, row_blocks, col_blocks, list_batch, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_tiles = first_tile(1, col_blocks) + tl.cdiv(col_blocks, 2) if POOLED else col_blocks
    parts = num_tiles * (BLOCK // BN)
    row0 = pid % parts * BN  # row of K, or of its means; the longest columns come first
    kv_head = pid // parts % kv_heads
    b = pid // (parts * kv_heads)
    first_key, first_query, keys, _, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    tile = row0 // BLOCK
    list_ptr, full, all_blocks = find_list(
        lists_ptr,
        lengths_ptr,
        b,
        kv_head,
        tile,
        kv_heads,
        list_batch,
        kv_heads,
        num_tiles,
        row_blocks * GROUP,
    )
    list_ptr += all_blocks - 1  # iterated backwards

    level, number = level_of_tile(tile, col_blocks, POOLED)
    inside = row0 % BLOCK + tl.arange(0, BN)
    u = (number * BLOCK + inside) << level  # first key of each group
    size = tl.maximum(group_size(u, level, keys), 1).to(tl.float32)
    log_size = tl.log2(size) / scale2  # bias of the unscaled scores
    column = (inside << level) // BLOCK  # number of the column block within the tile
    first = 0 if POOLED else first_key
    k = load_tile(k_desc, b, kv_head, first + row0, BN, COLS)
    v = load_tile(v_desc, b, kv_head, first + row0, BN, COLS)
    if COLS * k.dtype.primitive_bitwidth <= 2048:
        # stays in registers, as q does in the dQ kernel; v does not fit there
        k = tl.where((u < keys)[:, None], k, 0.0)

    dk = tl.zeros([BN, COLS], tl.float32)
    dv = tl.zeros([BN, COLS], tl.float32)
    PARTS: tl.constexpr = BLOCK // BM
    for n in tl.range(0, full * PARTS):  # type: ignore[misc]
        entry = tl.load(list_ptr - n // PARTS)
        bias = tl.where((entry >> column) & 1 != 0, log_size, float("-inf")) if POOLED else None
        h, t0 = (
            kv_head * GROUP + (entry >> 8) % GROUP,
            (entry >> 8) // GROUP * BLOCK + n % PARTS * BM,
        )
        dk, dv = dkv_step(
            dk, dv, k, v, bias, q_desc, dout_desc, stats_desc, b, h, first_query, t0,
            u, delta, scale2, limit, BM, COLS, False, PRECISION,
        )  # fmt: skip
    # The remaining row blocks are on the diagonal, where no block is pooled.
    for n in tl.range(full * PARTS, all_blocks * PARTS, num_stages=1):  # type: ignore[misc]
        entry = tl.load(list_ptr - n // PARTS)
        h, t0 = (
            kv_head * GROUP + (entry >> 8) % GROUP,
            (entry >> 8) // GROUP * BLOCK + n % PARTS * BM,
        )
        dk, dv = dkv_step(
            dk, dv, k, v, None, q_desc, dout_desc, stats_desc, b, h, first_query, t0,
            u, delta, scale2, limit, BM, COLS, CAUSAL, PRECISION,
        )  # fmt: skip
    dk *= scale2 * LN_2

    dmeans_ptr = head_means(dmeans_ptr, b, kv_head, kv_heads, col_blocks, HEAD, BLOCK)
    if POOLED:
        share = 1.0 / size[:, None]
        row = row0 + tl.arange(0, BN)
        store_means(dmeans_ptr, dk * share, row, row >= 0, 0, HEAD, COLS)
        store_means(dmeans_ptr, dv * share, row, row >= 0, 1, HEAD, COLS)
    else:
        for e in tl.range(1, 4, num_stages=1):  # type: ignore[misc]
            row = first_tile(e, col_blocks) * BLOCK + (tl.maximum(tl.minimum(u, keys - 1), 0) >> e)
            dk += load_means(dmeans_ptr, row, 0, HEAD, COLS)
            dv += load_means(dmeans_ptr, row, 1, HEAD, COLS)
        store_tile(
            dk_ptr,
            dk,
            b,
            kv_head,
            u,
            first_key,
            num_keys,
            stride_kb,
            stride_kh,
            stride_kn,
            HEAD,
            COLS,
        )
        store_tile(
            dv_ptr,
            dv,
            b,
            kv_head,
            u,
            first_key,
            num_keys,
            stride_vb,
            stride_vh,
            stride_vn,
            HEAD,
            COLS,
        )

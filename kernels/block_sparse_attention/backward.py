"""Block-sparse attention, backward pass: a dQ kernel, then a dK/dV kernel.

    P = exp(S - lse)    dP = dO V^T    dS = P * (dP - rowsum(dO * O) + dlse)
    dQ = scale * dS K   dK = scale * dS^T Q    dV = P^T dO

With a cap of the scores, S are the capped ones, and dS is multiplied by ``1 - (S / softcap)^2``.

A program of the dQ kernel owns a row block and iterates over its list of column blocks. A program
of the dK/dV kernel owns a column block of a key/value head and iterates over its list of row
blocks, for all query heads of the group. Each sum is accumulated in the registers of one program in
a fixed order: no atomics, no partial results in memory, bitwise reproducible. This takes seven
products for each block read, 14 * BM * BN * D FLOPs, where a single kernel would take five and
accumulate dQ with atomics. Each kernel loads two tiles for a block; the dQ kernel stores the row
statistics for the dK/dV kernel.

Row lists are iterated from the first key forwards, column lists from the last query backwards, so
that concurrent programs share tiles in the L2 cache and both kernels process the blocks on the
diagonal last.

Layouts: row statistics as in :mod:`msattn.kernels.common.backward_tiles`, lists as in
:mod:`msattn.kernels.common.block_lists`. Blocks have ROWS queries and KEYS keys, tiles BM queries
and BN keys, each a block or an even part of one.
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
from msattn.kernels.common.block_lists import compact_columns, compact_rows, find_list
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


def launch(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    key_block_size: int,
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
    offset = query_offset(num_queries, num_keys, causal)
    group, limit = q_heads // kv_heads, unscaled_limit(softcap, scale)
    selection = (
        block_mask,
        kv_start,
        num_queries,
        num_keys,
        offset,
        block_size,
        key_block_size,
        causal,
    )
    row_blocks, col_blocks = block_mask.shape[2], triton.cdiv(num_keys, key_block_size)
    sizes = {"HEAD": head, "COLS": cols, "ROWS": block_size, "KEYS": key_block_size}
    constants = {**sizes, "CAUSAL": causal, "PRECISION": precision(q.dtype)}

    lists, lengths = compact_rows(*selection)
    shared = kv_heads, num_queries, num_keys
    tile = tuned_tile("block_sparse_attention_dq", q)
    rows, keys = min(block_size, tile.rows), min(key_block_size, tile.keys)
    dq = torch.empty_like(q)
    row_stats = empty_row_stats(lse)
    _dq_kernel[(batch * q_heads * row_blocks * (block_size // rows),)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys), tile_view(out, rows),
        tile_view(dout, rows),
        lse, dlse, dq, row_stats, lists, lengths, kv_start, *dq.stride()[:3], row_stats.stride(2),
        group, *shared, row_blocks, *lists.shape[:2], lists.shape[3], offset, scale * LOG2_E, limit,
        BM=rows, BN=keys, **constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip

    del lists, lengths  # frees their memory before the next lists are allocated
    lists, lengths = compact_columns(*selection, kv_heads, group)
    tile = tuned_tile("block_sparse_attention_dkv", q)
    rows, keys = min(block_size, tile.rows), min(key_block_size, tile.keys)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _dkv_kernel[(batch * kv_heads * col_blocks * (key_block_size // keys),)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys), tile_view(dout, rows),
        row_stats_view(row_stats, num_queries, rows),
        dk, dv, lists, lengths, kv_start, *dk.stride()[:3], *dv.stride()[:3],
        *shared, col_blocks, lists.shape[0], lists.shape[3], offset, scale * LOG2_E, limit,
        GROUP=group, BM=rows, BN=keys, **constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv


@triton.jit(
    do_not_specialize=[
        "kv_heads",
        "row_blocks",
        "list_batch",
        "group",
        "list_heads",
        "stride_stats",
    ]
)
def _dq_kernel(
    q_desc, k_desc, v_desc, out_desc, dout_desc, lse_ptr, dlse_ptr,
    dq_ptr, stats_ptr, lists_ptr, lengths_ptr, kv_start_ptr,
    stride_b, stride_h, stride_n, stride_stats,
    group, kv_heads, num_queries, num_keys, row_blocks,
    list_batch, list_heads, entries, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads of a group are adjacent for L2 reuse; the longest rows come first.
    pid = tl.program_id(0)
    tiles = row_blocks * (ROWS // BM)
    t0 = (tiles - 1 - pid // group % tiles) * BM
    kv_head = pid // (group * tiles) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * tiles * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    list_ptr, full, all_blocks = find_list(
        lists_ptr,
        lengths_ptr,
        b,
        h,
        t0 // ROWS,
        kv_heads * group,
        list_batch,
        list_heads,
        row_blocks,
        entries,
    )

    q, dout, lse2, row_delta = load_query_rows(
        q_desc, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr,
        b, h, kv_heads * group, t0, first_query, queries, num_queries, stride_stats, BM, COLS,
    )  # fmt: skip

    t = t0 + tl.arange(0, BM)
    dq = tl.zeros([BM, COLS], tl.float32)
    PARTS: tl.constexpr = KEYS // BN
    for n in tl.range(0, full * PARTS):  # type: ignore[misc]
        u0 = tl.load(list_ptr + n // PARTS).to(tl.int32) * KEYS + n % PARTS * BN
        dq = _dq_step(
            dq, q, dout, lse2, row_delta, k_desc, v_desc, b, kv_head, first_key, u0, t,
            keys, delta, scale2, limit, BN, COLS, False, CAUSAL, PRECISION,
        )  # fmt: skip
    for n in tl.range(full * PARTS, all_blocks * PARTS, num_stages=1):  # type: ignore[misc]
        u0 = tl.load(list_ptr + n // PARTS).to(tl.int32) * KEYS + n % PARTS * BN
        dq = _dq_step(
            dq, q, dout, lse2, row_delta, k_desc, v_desc, b, kv_head, first_key, u0, t,
            keys, delta, scale2, limit, BN, COLS, True, CAUSAL, PRECISION,
        )  # fmt: skip
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


@triton.jit
def _dq_step(
    dq, q, dout, lse2, row_delta, k_desc, v_desc, b,
    kv_head, first_key, u0, t, keys, delta, scale2, limit,
    BN: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates the contribution of the key tile at u0 to dQ."""
    k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
    v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
    slope = None
    if limit is not None:
        s, slope = cap_scores_with_slope(s, limit)
    if MASK:
        s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
    return dq_step(dq, s, slope, dout, k, v, lse2, row_delta, scale2, PRECISION)


@triton.jit(do_not_specialize=["kv_heads", "col_blocks", "list_batch"])
def _dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_desc,
    dk_ptr, dv_ptr, lists_ptr, lengths_ptr, kv_start_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    kv_heads, num_queries, num_keys, col_blocks, list_batch, entries, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles = col_blocks * (KEYS // BN)
    u0 = pid % tiles * BN  # the longest columns come first
    kv_head = pid // tiles % kv_heads
    b = pid // (tiles * kv_heads)
    first_key, first_query, keys, _, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    list_ptr, full, all_blocks = find_list(
        lists_ptr,
        lengths_ptr,
        b,
        kv_head,
        u0 // KEYS,
        kv_heads,
        list_batch,
        kv_heads,
        col_blocks,
        entries,
    )
    list_ptr += all_blocks - 1  # iterated backwards
    u = u0 + tl.arange(0, BN)
    k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
    v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
    if COLS * k.dtype.primitive_bitwidth <= 2048:
        # stays in registers, as q does in the dQ kernel; v does not fit there
        k = tl.where((u < keys)[:, None], k, 0.0)

    dk = tl.zeros([BN, COLS], tl.float32)
    dv = tl.zeros([BN, COLS], tl.float32)
    PARTS: tl.constexpr = ROWS // BM
    for n in tl.range(0, full * PARTS):  # type: ignore[misc]
        entry = tl.load(list_ptr - n // PARTS).to(tl.int32)
        h, t0 = kv_head * GROUP + entry % GROUP, entry // GROUP * ROWS + n % PARTS * BM
        dk, dv = dkv_step(
            dk, dv, k, v, None, q_desc, dout_desc, stats_desc, b, h, first_query, t0,
            u, delta, scale2, limit, BM, COLS, False, PRECISION,
        )  # fmt: skip
    for n in tl.range(full * PARTS, all_blocks * PARTS, num_stages=1):  # type: ignore[misc]
        entry = tl.load(list_ptr - n // PARTS).to(tl.int32)
        h, t0 = kv_head * GROUP + entry % GROUP, entry // GROUP * ROWS + n % PARTS * BM
        dk, dv = dkv_step(
            dk, dv, k, v, None, q_desc, dout_desc, stats_desc, b, h, first_query, t0,
            u, delta, scale2, limit, BM, COLS, CAUSAL, PRECISION,
        )  # fmt: skip
    store_tile(
        dk_ptr,
        dk * (scale2 * LN_2),
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
        dv_ptr, dv, b, kv_head, u, first_key, num_keys, stride_vb, stride_vh, stride_vn, HEAD, COLS
    )

"""Tile steps shared by the backward kernels of sparse attention.

    P = exp(S - lse)    dP = dO V^T    dS = P * (dP - rowsum(dO * O) + dlse)

With a cap of the scores, S are the capped ones, and dS is multiplied by the slope of the cap
(:mod:`.softcap`).

A program of the dQ kernel owns query rows. It also stores their row statistics, fp32
``[B, Hq, 2, N]``: the LSE in base 2, and ``row_delta = rowsum(dO * O) - dlse`` (delta in
FlashAttention, less the gradient of the LSE). Queries count from the start of the sequence. A
program of the dK/dV kernel owns keys and loads these statistics through a tensor descriptor, whose
loads can be pipelined.
"""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import load_lse2, load_tile, tile_view, tl, triton
from msattn.kernels.common.softcap import cap_scores_with_slope

# rows per descriptor tile: 128 bytes in fp32, the alignment that pipelined tiles need
MIN_STATS_ROWS = tl.constexpr(32)


def empty_row_stats(lse: Tensor) -> Tensor:
    """Allocates row statistics, with the 16-byte strides of descriptors."""
    batch, heads, num_queries = lse.shape
    return torch.empty(
        (batch, heads, 2, (num_queries + 3) // 4 * 4), dtype=torch.float32, device=lse.device
    )


def row_stats_view(row_stats: Tensor, num_queries: int, rows: int):
    """Tensor descriptor of the row statistics, for tiles of ``rows`` query rows."""
    return tile_view(row_stats[..., :num_queries], 1, max(rows, MIN_STATS_ROWS.value))


@triton.jit
def load_query_rows(
    q_desc, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr,
    b, h, q_heads, t0, first_query, queries, num_queries,
    stride_stats,
    BM: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Loads rows of q and dO from query t0 on; computes and stores their statistics."""
    t = t0 + tl.arange(0, BM)
    head = (b * q_heads + h).to(tl.int64)
    lse2 = load_lse2(lse_ptr + head * num_queries + first_query, t, queries)
    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
    out = load_tile(out_desc, b, h, first_query + t0, BM, COLS)
    row_delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    row_delta -= tl.load(
        dlse_ptr + head * num_queries + first_query + t, mask=t < queries, other=0.0
    )
    # the gradient of an LSE of -inf may be any number, also NaN
    row_delta = tl.where(lse2 == float("inf"), 0.0, row_delta)
    lse2 = tl.where(row_delta == row_delta, lse2, float("nan"))  # so that P is NaN wherever dS is
    stats_ptr += head * 2 * stride_stats + t
    tl.store(stats_ptr, lse2, mask=t < num_queries)
    tl.store(stats_ptr + stride_stats, row_delta, mask=t < num_queries)
    if COLS * q.dtype.primitive_bitwidth <= 2048:
        # The compiler keeps a computed (not loaded) first operand that two loops use in registers.
        # That saves shared memory traffic, and leaves shared memory to prefetch further ahead.
        exists = (t < queries)[:, None]
        q, dout = tl.where(exists, q, 0.0), tl.where(exists, dout, 0.0)
    return q, dout, lse2, row_delta


@triton.jit
def dq_step(dq, s, slope, dout, k, v, lse2, row_delta, scale2, PRECISION: tl.constexpr):
    """Accumulates the contribution of a key tile to dQ.

    ``s [BM, BN]`` are its unscaled scores, ``slope [BM, BN]`` the slope of their cap, if any.
    """
    p = tl.exp2(s * scale2 - lse2[:, None])
    ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - row_delta[:, None])
    if slope is not None:
        ds *= slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dkv_step(
    dk, dv, k, v, bias, q_desc, dout_desc, stats_desc,
    b, h, first_query, t0, u, delta, scale2, limit,
    BM: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates the contribution of BM queries to dK and dV of a key tile.

    The queries are those of head h from t0 on. ``limit``, if any, caps the unscaled scores, to
    which ``bias [BN]``, if any, is added; -inf hides a key, also from rows that are NaN. Scores are
    computed transposed, [BN, BM], so that P^T and dS^T enter their products from registers.
    """
    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    slope = None
    if limit is not None:
        s, slope = cap_scores_with_slope(s, limit)
    if bias is not None:
        s += bias[:, None]
    if MASK:
        s = tl.where(u[:, None] <= (t0 + tl.arange(0, BM))[None, :] + delta, s, float("-inf"))
    p = tl.exp2(s * scale2 - _load_row_stat(stats_desc, b, h, 0, t0, BM))
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    ds = p * (dp - _load_row_stat(stats_desc, b, h, 1, t0, BM))
    if slope is not None:
        ds *= slope
    if bias is not None:
        read = (bias > float("-inf"))[:, None]
        p, ds = tl.where(read, p, 0.0), tl.where(read, ds, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def _load_row_stat(desc, b, h, index, t0, BM: tl.constexpr):
    """Loads the LSE (index 0) or row_delta (1) of BM rows, ``[1, BM]``."""
    SETS: tl.constexpr = max(1, MIN_STATS_ROWS // BM)  # type: ignore[assignment]  # row sets of a tile, of which the first is needed
    stats = tl.reshape(desc.load([b, h, index, t0]), [SETS, BM])
    if SETS == 1:
        return stats
    return tl.sum(tl.where(tl.arange(0, SETS)[:, None] == 0, stats, 0.0), 0)[None, :]

"""Attention masses of a few queries in blocks of keys.

A program multiplies the queries of a head with a tile of keys and stores the exponentials summed by
block, their sum, and the maximum that they are relative to. The softmax over all keys then
multiplies the sums of each tile by one factor per query.
"""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import LOG2_E, padded_head, precision, tl, triton
from msattn.kernels.common.softcap import cap_scores, unscaled_limit

TILE = 128  # keys of a program
CHANNELS = 64  # channels of a product


def launch(
    q: Tensor,
    k: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Returns the masses of the last queries, fp32 ``[B, Hq, n, ceil(M / block)]``; 0 for queries
    of padding.

    ``q [B, Hq, n, D]`` are the last of ``k [B, Hkv, M, D]``; each sees no later key. Blocks are
    counted from the end of the padding ``kv_start``, int32 ``[B]``.
    """
    (batch, q_heads, queries, head), (kv_heads, keys) = q.shape, k.shape[1:3]
    tiles = triton.cdiv(keys, TILE)
    sums = q.new_empty((batch, q_heads, queries, tiles, TILE // block_size), dtype=torch.float32)
    maxima, totals = q.new_empty((2, batch, q_heads, queries, tiles), dtype=torch.float32)
    _block_masses_kernel[(tiles, q_heads, batch)](
        q, k, sums, maxima, totals, kv_start, *q.stride(), *k.stride(),
        q_heads // kv_heads, queries, keys, scale * LOG2_E, unscaled_limit(softcap, scale),
        HEAD=head, ROWS=max(16, triton.next_power_of_2(queries)), TILE=TILE, BLOCK=block_size,
        CHANNELS=min(CHANNELS, padded_head(head)), PRECISION=precision(q.dtype), num_warps=4,
    )  # fmt: skip
    # -inf - -inf is NaN
    largest = maxima.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    factors = (maxima - largest).exp2_()
    factors /= (factors * totals).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return sums.mul_(factors[..., None]).flatten(3)[..., : triton.cdiv(keys, block_size)]


@triton.jit(do_not_specialize=["group", "queries", "keys"])
def _block_masses_kernel(
    q_ptr, k_ptr, sums_ptr, maxima_ptr, totals_ptr, kv_start_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    group, queries, keys, scale2, limit,
    HEAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.zeros((), tl.int32)
    if kv_start_ptr is not None:
        first = tl.load(kv_start_ptr + b)
    i, u, d = tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE), tl.arange(0, CHANNELS)
    q_ptr += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + i[:, None] * stride_qn
    k_ptr += b.to(tl.int64) * stride_kb + (h // group).to(tl.int64) * stride_kh
    k_ptr += (first + u).to(tl.int64)[None, :] * stride_kn
    s = tl.zeros([ROWS, TILE], tl.float32)
    for start in tl.static_range(0, HEAD, CHANNELS):
        inside = start + d < HEAD
        q = tl.load(
            q_ptr + (start + d)[None, :] * stride_qd,
            mask=(i < queries)[:, None] & inside[None, :],
            other=0.0,
        )
        k = tl.load(
            k_ptr + (start + d)[:, None] * stride_kd,
            mask=(first + u < keys)[None, :] & inside[:, None],
            other=0.0,
        )
        s = tl.dot(q, k, s, input_precision=PRECISION)
    if limit is not None:
        s = cap_scores(s, limit)
    position = keys - queries + i - first  # below 0: a query of padding
    seen = (u[None, :] <= position[:, None]) & (first + u < keys)[None, :]
    s = tl.where(seen, s * scale2, float("-inf"))
    m = tl.max(s, 1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * queries + i
    place = row * tl.num_programs(0) + tile
    tl.store(maxima_ptr + place, m, mask=i < queries)
    tl.store(totals_ptr + place, tl.sum(p, 1), mask=i < queries)
    blocks = tl.sum(tl.reshape(p, [ROWS, TILE // BLOCK, BLOCK]), 2)
    block = tl.arange(0, TILE // BLOCK)[None, :]
    tl.store(
        sums_ptr + place[:, None] * (TILE // BLOCK) + block, blocks, mask=(i < queries)[:, None]
    )

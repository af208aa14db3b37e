"""Keys sorted by bucket and copied to where :mod:`msattn.kernels.bucket_mass.forward` can add them up without leaving a register.

A bucket's keys are cut into granules of G keys; its last one is filled up with copies of its own first key, whose number is
written down. The granules, bucket after bucket, are dealt out in equal runs to lanes: a tile holds one granule of each lane,
and the next tile the next granule of each::

    granules     a0 a1 | b0 | c0 c1 c2 | d0 | e0        a bucket each letter; 8 granules, 4 lanes: runs of 2
    tile 0       a0  b0  c1  d0
    tile 1       a1  c0  c2  e0                         the run of lane 1 ends inside bucket c, lane 2 goes on with it

A lane's sum goes out after the last granule of a bucket, or of its run: to row c for bucket c, but to row C + r where lane r
goes on with a bucket that an earlier lane began. ``carried[r]`` names that bucket.

Where a key of a granule stands among the columns of its tile follows the accumulators of tensor cores: of 8 adjacent columns,
a thread holds columns 2 t and 2 t + 1, so that lane ``4 g + t`` has these two in each of G / 2 adjacent groups of 8.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.primitives import padded_head, tl, triton


class PackedKeys(NamedTuple):
    """Keys in the order of tiles; T tiles for each of S splits, of BN keys, L lanes each. int32 but for ``keys``, ``copies``.

    Attributes
    ----------
    keys : ``[B, Hkv, S * T * BN, D]``.
    slots : ``[B, Hkv, S * T * BN]``, their indices in k.
    ends : ``[B, Hkv, S * T * L]``: the row that a lane's sum goes to after this granule, or -1 where the lane goes on.
    copies : fp32 ``[B, Hkv, S * T * L]``: how many of a granule's keys are copies of its first one; G past a lane's end.
    carried : ``[B, Hkv, S * L]``: the bucket that a lane goes on with, or -1.
    first : ``[B, Hkv, C + 1]``: the first granule of each bucket, and how many there are.
    """

    keys: Tensor
    slots: Tensor
    ends: Tensor
    copies: Tensor
    carried: Tensor
    first: Tensor


def most_granules(num_keys: int, num_buckets: int, granule: int) -> int:
    """How many granules there can be: the full ones, and a partial one for each bucket that has keys."""
    return num_keys // granule + min(num_buckets, num_keys)


def pack_keys(k: Tensor, buckets: Tensor, num_buckets: int, granule: int, tile: int, splits: int) -> PackedKeys:
    """Sort ``k [B, Hkv, n_k, D]`` by ``buckets``; sizes follow shapes alone, so that nothing waits for the device.

    Keys whose bucket is not in 0 to ``num_buckets - 1`` are left out.
    """
    batch, kv_heads, num_keys, head = k.shape
    lanes = splits * tile // granule
    tiles = triton.cdiv(most_granules(num_keys, num_buckets, granule), lanes)
    order, begin = _sort(buckets.reshape(-1, num_keys), num_buckets)

    def empty(count: int) -> Tensor:
        return torch.empty((batch, kv_heads, count), dtype=torch.int32, device=k.device)

    first, slots, ends = empty(num_buckets + 1), empty(splits * tiles * tile), empty(tiles * lanes)
    copies = torch.empty_like(ends, dtype=torch.float32)
    keys = k.new_empty((batch, kv_heads, splits * tiles * tile, head))
    carried = empty(lanes).fill_(-1)
    _first_kernel[(batch * kv_heads,)](begin, first, num_buckets, GRANULE=granule, BC=1024, num_warps=4)
    _pack_kernel[(splits * tiles, kv_heads, batch)](
        k, order, begin, first, keys, slots, ends, copies, carried, *k.stride(),
        num_keys, num_buckets, num_buckets.bit_length(), splits,
        HEAD=head, GRANULE=granule, BN=tile, BD=padded_head(head), num_warps=4,
    )  # fmt: skip
    return PackedKeys(keys, slots, ends, copies, carried, first)


def _sort(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Of ``buckets [H, n_k]``: the keys' places among all heads', by bucket, and where each bucket begins, ``[H, C + 1]``.

    One sort for all heads, by head and bucket; keys that are left out stand behind a head's last bucket.
    """
    heads, num_keys = buckets.shape
    known = (buckets >= 0) & (buckets < num_buckets)
    short = heads * (num_buckets + 1) < 2**15  # half the passes of a radix sort
    names = torch.arange(heads * (num_buckets + 1), dtype=torch.int16 if short else torch.int32, device=buckets.device)
    label = torch.where(known, buckets, num_buckets).to(names.dtype) + names[:: num_buckets + 1, None]
    label, order = label.flatten().sort(stable=True)
    return order, torch.searchsorted(label, names, out_int32=heads * num_keys < 2**31)


@triton.jit(do_not_specialize=["num_buckets"])
def _first_kernel(begin, first, num_buckets, GRANULE: tl.constexpr, BC: tl.constexpr):
    """``first [H, C + 1]`` of one head, from ``begin [H, C + 1]``."""
    head = tl.program_id(0).to(tl.int64)
    begin += head * (num_buckets + 1)
    first += head * (num_buckets + 1)
    total = tl.zeros((), tl.int32)
    for c in tl.range(0, num_buckets, BC):
        bucket = c + tl.arange(0, BC)
        m_bucket = bucket < num_buckets
        size = tl.load(begin + bucket + 1, mask=m_bucket, other=0) - tl.load(begin + bucket, mask=m_bucket, other=0)
        granules = tl.cdiv(size.to(tl.int32), GRANULE)
        tl.store(first + bucket, total + tl.cumsum(granules, 0) - granules, mask=m_bucket)
        total += tl.sum(granules, 0)
    tl.store(first + num_buckets, total)


@triton.jit(do_not_specialize=["num_keys", "num_buckets", "steps", "num_splits"])
def _pack_kernel(
    k, order, begin, first, keys, slots, ends, copies, carried,
    stride_kb, stride_kh, stride_km, stride_kd, num_keys, num_buckets, steps, num_splits,
    HEAD: tl.constexpr, GRANULE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Fill one tile; programs: (split and tile, key/value head, sequence)."""
    LANES: tl.constexpr = BN // GRANULE
    tiles = tl.num_programs(0) // num_splits
    split, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = batch * tl.num_programs(1) + kv_head
    begin += head * (num_buckets + 1)
    first += head * (num_buckets + 1)
    total = tl.load(first + num_buckets)
    run = tl.cdiv(total, num_splits * LANES)
    if n < run:
        o_col = tl.arange(0, BN)
        lane_in_tile, place = _lane_of(o_col, GRANULE)
        lane = split * LANES + lane_in_tile
        granule = tl.minimum(lane * run + n, total - 1)
        low, high = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32) + num_buckets
        for _ in tl.range(0, steps):  # the bucket: the last one whose first granule is not after this one
            middle = (low + high + 1) // 2
            after = tl.load(first + tl.minimum(middle, num_buckets - 1)) > granule
            high = tl.where(after | (middle >= num_buckets), tl.minimum(high, middle - 1), high)
            low = tl.where(after | (middle >= num_buckets), low, middle)
        bucket_begin, bucket_end = tl.load(first + low), tl.load(first + low + 1)
        sorted_place = tl.load(begin + low) + (granule - bucket_begin) * GRANULE
        live = lane * run + n < total
        size = tl.where(live, tl.load(begin + low + 1) - sorted_place, 0).to(tl.int32)  # past the last one: copies only
        key = tl.load(order + sorted_place + tl.where(place < size, place, 0)) - head * num_keys

        tile = head * tl.num_programs(0) + tl.program_id(0)
        tl.store(slots + tile * BN + o_col, key.to(tl.int32))
        over = live & ((granule + 1 == bucket_end) | (n + 1 == run))
        goes_on = bucket_begin < lane * run
        p_granule = tile * LANES + lane_in_tile
        tl.store(ends + p_granule, tl.where(over, tl.where(goes_on, num_buckets + lane, low), -1), mask=place == 0)
        tl.store(copies + p_granule, tl.maximum(GRANULE - size, 0).to(tl.float32), mask=place == 0)
        p_carried = carried + head * num_splits * LANES + lane
        tl.store(p_carried, tl.where(live & goes_on, low, -1), mask=(place == 0) & (n == 0))

        o_d = tl.arange(0, BD)
        m_d = (o_d < HEAD)[None, :]
        p_k = k + batch * stride_kb + kv_head * stride_kh + key.to(tl.int64)[:, None] * stride_km + o_d[None, :] * stride_kd
        tl.store(keys + (tile * BN + o_col[:, None]) * HEAD + o_d[None, :], tl.load(p_k, mask=m_d), mask=m_d)


@triton.jit
def _lane_of(column, GRANULE: tl.constexpr):
    """Lane of a column of a tile, and its place in that lane's granule."""
    HALF: tl.constexpr = GRANULE // 2
    lane = column // (8 * HALF) * 4 + column // 2 % 4
    return lane, column // 8 % HALF * 2 + column % 2


@triton.jit
def column_of(lane, place, GRANULE: tl.constexpr):
    """The column of a tile that holds the given place of a lane's granule."""
    return (lane // 4 * (GRANULE // 2) + place // 2) * 8 + lane % 4 * 2 + place % 2

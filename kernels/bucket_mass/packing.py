"""Sorts keys by bucket and packs them in tiles for :mod:`.forward`.

Terms:

- A *key group* holds G keys of one bucket. The last group of a bucket is filled up with copies of
  its first key; the number of copies is stored, and the copies are subtracted from the group's sum.
- A *segment* is one of the equal parts into which the sequence of all key groups, bucket after
  bucket, is divided. A tile holds one key group of each of its segments, and the next tile holds
  the following ones::

    key groups   a0 a1 | b0 | c0 c1 c2 | d0 | e0    one letter a bucket; 8 groups, 4 segments of 2
    tile 0       a0  b0  c1  d0
    tile 1       a1  c0  c2  e0                     segment 1 ends inside bucket c, 2 continues it

- The sum of a segment is written after the last key group of a bucket or of the segment: to *output
  row* c for bucket c, but to row C + r if segment r continues a bucket that an earlier segment
  began. ``continued[r]`` is this *continuation bucket*.

The columns of a key group within a tile follow the accumulator layout of tensor cores: of 8
adjacent columns, thread t holds columns 2 t and 2 t + 1. Segment ``4 g + t`` therefore has these
two columns in each of G / 2 adjacent groups of 8 columns, and one thread holds all scores of a row
and key group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.primitives import padded_head, tl, triton


class PackedKeys(NamedTuple):
    """Keys in tile order: T tiles for each of S splits, of BN keys and L segments.

    All are int32 but ``keys`` and ``copies``.

    Attributes
    ----------
    keys : ``[B, Hkv, S * T * BN, D]``.
    indices : ``[B, Hkv, S * T * BN]``, their indices in k.
    out_rows : ``[B, Hkv, S * T * L]``: the output row to write after this key group, or -1 if the
        bucket continues.
    copies : fp32 ``[B, Hkv, S * T * L]``: the number of copies in a key group; G past the end of a
        segment.
    continued : ``[B, Hkv, S * L]``: the continuation bucket of a segment, or -1.
    first : ``[B, Hkv, C + 1]``: the first key group of each bucket, and the number of all groups.
    """

    keys: Tensor
    indices: Tensor
    out_rows: Tensor
    copies: Tensor
    continued: Tensor
    first: Tensor


def max_key_groups(num_keys: int, num_buckets: int, group_size: int) -> int:
    """Returns the maximum number of key groups, with a partial one in every bucket."""
    return num_keys // group_size + min(num_buckets, num_keys)


def pack_keys(
    k: Tensor, buckets: Tensor, num_buckets: int, group_size: int, tile: int, splits: int
) -> PackedKeys:
    """Packs ``k [B, Hkv, n_k, D]`` by ``buckets [B, Hkv, n_k]``.

    Sizes depend only on shapes, so that the host does not wait for the device. Keys whose bucket is
    not in 0 to ``num_buckets - 1`` are left out.
    """
    batch, kv_heads, num_keys, head = k.shape
    segments = splits * tile // group_size
    tiles = triton.cdiv(max_key_groups(num_keys, num_buckets, group_size), segments)
    order, begin = _sort(buckets.reshape(-1, num_keys), num_buckets)

    def empty(count: int) -> Tensor:
        return torch.empty((batch, kv_heads, count), dtype=torch.int32, device=k.device)

    first = empty(num_buckets + 1)
    indices = empty(splits * tiles * tile)
    out_rows = empty(tiles * segments)
    copies = torch.empty_like(out_rows, dtype=torch.float32)
    keys = k.new_empty((batch, kv_heads, splits * tiles * tile, head))
    continued = empty(segments).fill_(-1)
    _first_kernel[(batch * kv_heads,)](
        begin, first, num_buckets, GROUP_SIZE=group_size, BC=1024, num_warps=4
    )
    _pack_kernel[(splits * tiles, kv_heads, batch)](
        k, order, begin, first, keys, indices, out_rows, copies, continued, *k.stride(),
        num_keys, num_buckets, num_buckets.bit_length(), splits,
        HEAD=head, GROUP_SIZE=group_size, BN=tile, BD=padded_head(head), num_warps=4,
    )  # fmt: skip
    return PackedKeys(keys, indices, out_rows, copies, continued, first)


def _sort(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Sorts all keys by head and bucket.

    Returns the order of the keys of all heads, ``[H * n_k]``, and the begin of each bucket in it,
    ``[H, C + 1]``. Keys that are left out come after the last bucket of their head.
    """
    heads, num_keys = buckets.shape
    known = (buckets >= 0) & (buckets < num_buckets)
    short = heads * (num_buckets + 1) < 2**15  # 16 bits halve the passes of the radix sort
    names = torch.arange(
        heads * (num_buckets + 1),
        dtype=torch.int16 if short else torch.int32,
        device=buckets.device,
    )
    label = (
        torch.where(known, buckets, num_buckets).to(names.dtype) + names[:: num_buckets + 1, None]
    )
    label, order = label.flatten().sort(stable=True)
    return order, torch.searchsorted(label, names, out_int32=heads * num_keys < 2**31)


@triton.jit(do_not_specialize=["num_buckets"])
def _first_kernel(begin_ptr, first_ptr, num_buckets, GROUP_SIZE: tl.constexpr, BC: tl.constexpr):
    """Computes ``first [H, C + 1]`` of one head from ``begin [H, C + 1]``."""
    head = tl.program_id(0).to(tl.int64)
    begin_ptr += head * (num_buckets + 1)
    first_ptr += head * (num_buckets + 1)
    total = tl.zeros((), tl.int32)
    for c in tl.range(0, num_buckets, BC):
        bucket = c + tl.arange(0, BC)
        m_bucket = bucket < num_buckets
        size = tl.load(begin_ptr + bucket + 1, mask=m_bucket, other=0) - tl.load(
            begin_ptr + bucket, mask=m_bucket, other=0
        )
        groups = tl.cdiv(size.to(tl.int32), GROUP_SIZE)
        tl.store(first_ptr + bucket, total + tl.cumsum(groups, 0) - groups, mask=m_bucket)
        total += tl.sum(groups, 0)
    tl.store(first_ptr + num_buckets, total)


@triton.jit(do_not_specialize=["num_keys", "num_buckets", "steps", "num_splits"])
def _pack_kernel(
    k_ptr, order_ptr, begin_ptr, first_ptr, keys_ptr,
    indices_ptr, out_rows_ptr, copies_ptr, continued_ptr,
    stride_kb, stride_kh, stride_km, stride_kd, num_keys, num_buckets, steps, num_splits,
    HEAD: tl.constexpr, GROUP_SIZE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Fills one tile. Grid: (split and tile, key/value head, sequence)."""
    SEGMENTS: tl.constexpr = BN // GROUP_SIZE
    tiles = tl.num_programs(0) // num_splits
    split, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = batch * tl.num_programs(1) + kv_head
    begin_ptr += head * (num_buckets + 1)
    first_ptr += head * (num_buckets + 1)
    total = tl.load(first_ptr + num_buckets)
    run = tl.cdiv(total, num_splits * SEGMENTS)
    if n < run:
        o_col = tl.arange(0, BN)
        segment_in_tile, place = _segment_of(o_col, GROUP_SIZE)
        segment = split * SEGMENTS + segment_in_tile
        key_group = tl.minimum(segment * run + n, total - 1)
        low, high = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32) + num_buckets
        # bisection: the last bucket whose first key group is not after this one
        for _ in tl.range(0, steps):
            middle = (low + high + 1) // 2
            after = tl.load(first_ptr + tl.minimum(middle, num_buckets - 1)) > key_group
            high = tl.where(after | (middle >= num_buckets), tl.minimum(high, middle - 1), high)
            low = tl.where(after | (middle >= num_buckets), low, middle)
        bucket_begin, bucket_end = tl.load(first_ptr + low), tl.load(first_ptr + low + 1)
        sorted_place = tl.load(begin_ptr + low) + (key_group - bucket_begin) * GROUP_SIZE
        live = segment * run + n < total
        # past the last group: copies only
        size = tl.where(live, tl.load(begin_ptr + low + 1) - sorted_place, 0).to(tl.int32)
        key = tl.load(order_ptr + sorted_place + tl.where(place < size, place, 0)) - head * num_keys

        tile = head * tl.num_programs(0) + tl.program_id(0)
        tl.store(indices_ptr + tile * BN + o_col, key.to(tl.int32))
        is_last = live & ((key_group + 1 == bucket_end) | (n + 1 == run))
        continues = bucket_begin < segment * run
        o_group = tile * SEGMENTS + segment_in_tile
        tl.store(
            out_rows_ptr + o_group,
            tl.where(is_last, tl.where(continues, num_buckets + segment, low), -1),
            mask=place == 0,
        )
        tl.store(
            copies_ptr + o_group, tl.maximum(GROUP_SIZE - size, 0).to(tl.float32), mask=place == 0
        )
        continued_ptrs = continued_ptr + head * num_splits * SEGMENTS + segment
        tl.store(continued_ptrs, tl.where(live & continues, low, -1), mask=(place == 0) & (n == 0))

        o_d = tl.arange(0, BD)
        m_d = (o_d < HEAD)[None, :]
        k_ptrs = (
            k_ptr
            + batch * stride_kb
            + kv_head * stride_kh
            + key.to(tl.int64)[:, None] * stride_km
            + o_d[None, :] * stride_kd
        )
        tl.store(
            keys_ptr + (tile * BN + o_col[:, None]) * HEAD + o_d[None, :],
            tl.load(k_ptrs, mask=m_d),
            mask=m_d,
        )


@triton.jit
def _segment_of(column, GROUP_SIZE: tl.constexpr):
    """Returns the segment of a column, and its place in the key group."""
    HALF: tl.constexpr = GROUP_SIZE // 2
    segment = column // (8 * HALF) * 4 + column // 2 % 4
    return segment, column // 8 % HALF * 2 + column % 2


@triton.jit
def column_of(segment, place, GROUP_SIZE: tl.constexpr):
    """Returns the column of the given place in a segment's key group."""
    return (segment // 4 * (GROUP_SIZE // 2) + place // 2) * 8 + segment % 4 * 2 + place % 2

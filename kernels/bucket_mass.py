"""Attention mass by bucket (SAAP, arXiv 2502.08246, section 3: the training target ``A . H_k``), without the attention matrix.

The keys are sorted by bucket and laid out in tiles of one bucket each, a bucket's last tile filled up with -1::

    slots        7 19 40 52 | 61 -1 -1 -1 | 3 8 -1 -1 | ...      with 4 keys a tile
    bucket_of    0          | 0           | 2         | ...      bucket 1 is empty
    first_tile   0, 2, 2, 3, ...                                 first tile of bucket 0, 1, 2, ...

One pass over the tiles gives each bucket's log-sum of exponentials, held as ``[C, n_q]`` so that the rows of a tile are written
side by side; a second kernel normalises over the buckets.

Tiles: BM queries, BN keys, BD head size, BC buckets. Prefixes: p_ pointer. Programs: (query tile, query head, split of the
buckets and sequence), then (query tile, query head, sequence).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.checks import check_bucket_mass, resolve_backend, resolve_scale, statistics_dtype
from msattn.kernels.primitives import LN_2, LOG2_E, num_processors, padded_head, precision, tl, triton
from msattn.kernels.tuned import Tile
from msattn.kernels.types import Backend, BucketMass


def bucket_mass(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    *,
    num_buckets: int,
    causal: bool = False,
    scale: float | None = None,
    min_distance: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    backend: Backend | None = None,
) -> BucketMass:
    """How much of each query's attention falls into each bucket (SAAP, the training target).

    ``mass[i, c] = sum over keys j in bucket c of softmax_j(scale * q_i k_j)``. Memory grows with ``n_q * C``, never with
    ``n_q * n_k``.

    Parameters
    ----------
    q : Tensor ``[B, Hq, n_q, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Strided views are read as they are.
    k : Tensor ``[B, Hkv, n_k, D]``
        Keys; query head h reads head ``h // (Hq // Hkv)``.
    buckets : Tensor int32 ``[B, Hkv, n_k]``
        The bucket of each key, 0 to ``num_buckets - 1``; -1 leaves a key out of the softmax altogether.
    num_buckets : int
        Number of buckets, C.
    causal : bool
        Keep only keys with ``k_pos <= q_pos``.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    min_distance : int, optional
        Keep only pairs with ``|q_pos - k_pos| > min_distance``, in tokens.
    q_pos, k_pos : Tensor int32 ``[n_q]``, ``[n_k]``, optional
        Positions, in tokens. By default keys count from 0 and the last query stands at the last key.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    BucketMass
        ``mass [B, Hq, n_q, C]`` fp32, whose rows sum to 1; ``lse [B, Hq, n_q]`` (natural logarithm, fp32); ``top_key`` int32
        ``[B, Hq, n_q]``, the index in k of the largest score (of any such key if several tie). A query that no key is left for
        has mass 0, lse -inf and top_key -1.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name. Bucket numbers are checked by the reference alone; the kernel leaves out keys
        whose number is out of range.
    NotImplementedError
        In the backward pass: this makes targets.
    """
    check_bucket_mass(q, k, buckets, num_buckets, min_distance, q_pos, k_pos)
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    return BucketMass(*_operator(q, k, buckets, q_pos, k_pos, num_buckets, causal, scale, min_distance, backend))


@torch.library.custom_op("msattn::bucket_mass", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    num_buckets: int,
    causal: bool,
    scale: float,
    min_distance: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton":
        return launch(q, k, buckets, q_pos, k_pos, num_buckets, causal, scale, min_distance)
    return reference.bucket_mass(
        q, k, buckets, num_buckets=num_buckets, causal=causal, scale=scale, min_distance=min_distance, q_pos=q_pos, k_pos=k_pos
    )  # fmt: skip


@_operator.register_fake
def _(q, k, buckets, q_pos, k_pos, num_buckets, causal, scale, min_distance, backend):
    statistics = statistics_dtype(q)
    mass = q.new_empty((*q.shape[:3], num_buckets), dtype=statistics)
    return mass, q.new_empty(q.shape[:3], dtype=statistics), q.new_empty(q.shape[:3], dtype=torch.int32)


def _backward(ctx, dmass, dlse, dtop_key):
    raise NotImplementedError("bucket_mass makes targets and has no gradient: detach its inputs, or use torch.no_grad()")


_operator.register_autograd(_backward)


def launch(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    num_buckets: int,
    causal: bool,
    scale: float,
    min_distance: int | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the keys into tiles and run both kernels; ``tile`` overrides the shipped choice, for tuning."""
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    tile = tile or default_tile(cols, q.dtype, num_queries, num_keys // num_buckets)
    tiles = tile_keys(buckets, num_buckets, tile.keys)
    row_tiles = triton.cdiv(num_queries, tile.rows)
    splits = max(1, min(tile.programs * num_processors(q.device) // (row_tiles * q_heads * batch), num_buckets))
    if causal or min_distance is not None:
        q_pos, k_pos = _positions(q_pos, k_pos, num_queries, num_keys, q.device)

    shape = (batch, q_heads, num_queries)
    log_mass = q.new_full((batch, q_heads, num_buckets, num_queries), float("-inf"), dtype=torch.float32)
    part_score = q.new_empty((splits, *shape), dtype=torch.float32)
    part_key = q.new_empty((splits, *shape), dtype=torch.int32)
    _mass_kernel[(row_tiles, q_heads, batch * splits)](
        q, k, *tiles, q_pos, k_pos, log_mass, part_score, part_key, *q.stride(), *k.stride(),
        q_heads // kv_heads, num_queries, num_buckets, tiles.bucket_of.shape[2], splits, min_distance or 0, scale * LOG2_E,
        HEAD=head, CAUSAL=causal, FAR=min_distance is not None,
        BM=tile.rows, BN=tile.keys, BD=cols, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    mass = q.new_empty((*shape, num_buckets), dtype=torch.float32)
    lse, top_key = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int32)
    _normalise_kernel[(triton.cdiv(num_queries, 64), q_heads, batch)](
        log_mass, part_score, part_key, mass, lse, top_key, num_queries, num_buckets, splits, BM=64, BC=64,
    )  # fmt: skip
    return mass, lse, top_key


def default_tile(cols: int, dtype: torch.dtype, num_queries: int, keys_per_bucket: int) -> Tile:
    """Key tiles of at most half a mean bucket (but 16 keys), so that few slots stay empty; two programs on a multiprocessor."""
    full = dtype == torch.float32
    rows = 64 if full or num_queries <= 64 else 128
    keys = min(32 if full else 128 if cols <= 128 else 64, triton.next_power_of_2(max(64, keys_per_bucket)) // 4)
    return Tile(rows=rows, keys=keys, warps=rows // 16, stages=1 if full else 5 if cols <= 128 else 3, programs=2)


def _positions(
    q_pos: Tensor | None, k_pos: Tensor | None, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions that are not given: keys from 0, queries such that the last one stands at the last key."""
    if q_pos is None:
        q_pos = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int32, device=device)
    if k_pos is None:
        k_pos = torch.arange(num_keys, dtype=torch.int32, device=device)
    return q_pos.contiguous(), k_pos.contiguous()


class KeyTiles(NamedTuple):
    """Tiles of keys: ``slots [B, Hkv, (T + 1) * BN]``, ``bucket_of [B, Hkv, T]``, ``first_tile [B, Hkv, C + 1]``; all int32."""

    slots: Tensor
    bucket_of: Tensor
    first_tile: Tensor


def tile_keys(buckets: Tensor, num_buckets: int, size: int) -> KeyTiles:
    """Sort ``buckets [B, Hkv, n_k]`` into tiles of ``size`` keys; T follows shapes alone, so that nothing waits for the device.

    There are at most ``n_k // size`` full tiles, and a partial one for each bucket that has keys. Keys that are left out go to
    one more tile at the end, which nobody reads.
    """
    num_keys, device = buckets.shape[-1], buckets.device
    num_tiles = num_keys // size + min(num_buckets, num_keys)

    def numbers(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=device).expand(*buckets.shape[:2], -1).contiguous()

    label = torch.where((buckets >= 0) & (buckets < num_buckets), buckets, num_buckets)  # left out: sorted to the end
    label, order = label.sort(dim=-1, stable=True)
    begin = torch.searchsorted(label, numbers(num_buckets + 1))  # [B, Hkv, C + 1]
    tiles = (begin.diff() + size - 1) // size
    first_tile = torch.nn.functional.pad(tiles.cumsum(-1), (1, 0))
    bucket_of = torch.searchsorted(first_tile, numbers(num_tiles).long(), right=True) - 1
    index = label.long()
    slot = first_tile.gather(-1, index) * size + numbers(num_keys) - begin.gather(-1, index)
    slot = torch.where(label < num_buckets, slot, num_tiles * size)
    slots = torch.full((*buckets.shape[:2], (num_tiles + 1) * size), -1, dtype=torch.int32, device=device)
    return KeyTiles(slots.scatter_(-1, slot, order.int()), bucket_of.int(), first_tile.int())


@triton.jit(do_not_specialize=["group", "num_tiles", "num_splits", "min_distance"])
def _mass_kernel(
    q, k, slots, bucket_of, first_tile, q_pos, k_pos, log_mass, part_score, part_key,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_km, stride_kd,
    group, num_queries, num_buckets, num_tiles, num_splits, min_distance, scale2,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split's buckets: base-2 ``log_mass [B, Hq, C, n_q]``, best score and key ``[S, B, Hq, n_q]``."""
    head, q_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    batch, split = tl.program_id(2).to(tl.int64) // num_splits, tl.program_id(2) % num_splits
    kv_head = head // group
    tiles = batch * (q_heads // group) + kv_head
    slots += tiles * (num_tiles + 1) * BN
    bucket_of += tiles * num_tiles
    first_tile += tiles * (num_buckets + 1)
    k += batch * stride_kb + kv_head * stride_kh
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = row < num_queries
    o_d = tl.arange(0, BD)
    m_d = o_d < HEAD
    p_q = q + batch * stride_qb + head * stride_qh + row.to(tl.int64)[:, None] * stride_qn + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BM, BD]
    if CAUSAL or FAR:
        b_q_pos = tl.load(q_pos + row, mask=m_row, other=0)
    log_mass += (batch * q_heads + head) * num_buckets * num_queries + row

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    top_score = tl.full([BM], float("-inf"), tl.float32)
    top_slot = tl.zeros([BM], tl.int32)
    current = -1
    begin = tl.load(first_tile + split * num_buckets // num_splits)
    end = tl.load(first_tile + (split + 1) * num_buckets // num_splits)
    for tile in tl.range(begin, end):
        bucket = tl.load(bucket_of + tile)
        key = tl.load(slots + tile * BN + tl.arange(0, BN)).to(tl.int64)
        real = key >= 0
        p_k = k + key[:, None] * stride_km + o_d[None, :] * stride_kd
        b_k = tl.load(p_k, mask=real[:, None] & m_d[None, :], other=0.0)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        s = s * scale2 + tl.where(real, 0.0, float("-inf"))[None, :]
        if CAUSAL or FAR:
            distance = b_q_pos[:, None] - tl.load(k_pos + key, mask=real, other=0)[None, :]
            if CAUSAL:
                s = tl.where(distance >= 0, s, float("-inf"))
            if FAR:
                s = tl.where(tl.abs(distance) > min_distance, s, float("-inf"))

        s_max = tl.max(s, 1)
        s_top = tl.min(tl.where(s == s_max[:, None], tl.arange(0, BN)[None, :], BN), 1)
        better = s_max > top_score
        top_score = tl.where(better, s_max, top_score)
        top_slot = tl.where(better, tile * BN + s_top, top_slot)

        m = tl.where(bucket == current, m, float("-inf"))  # a new bucket begins with nothing, l then weighs 0
        m_new = tl.maximum(m, s_max)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        m = m_new
        # Written at each tile, so that the loop has no branch: the last tile of a bucket leaves its total.
        tl.store(log_mass + bucket.to(tl.int64) * num_queries, m + tl.log2(tl.where(l == 0.0, 1.0, l)), mask=m_row)
        current = bucket

    part = (split * (tl.num_programs(2) // num_splits) + batch) * q_heads + head
    top_key = tl.load(slots + top_slot, mask=m_row & (top_score > float("-inf")), other=-1)
    tl.store(part_score + part * num_queries + row, top_score, mask=m_row)
    tl.store(part_key + part * num_queries + row, top_key, mask=m_row)


@triton.jit(do_not_specialize=["num_splits"])
def _normalise_kernel(
    log_mass, part_score, part_key, mass, lse, top_key,
    num_queries, num_buckets, num_splits, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``mass [B, Hq, n_q, C]``, natural-log ``lse`` and ``top_key [B, Hq, n_q]`` from what the splits left."""
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    heads = tl.num_programs(1) * tl.num_programs(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = row < num_queries
    log_mass += head * num_buckets * num_queries
    mass += head * num_queries * num_buckets

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    for c in tl.range(0, num_buckets, BC):
        bucket = (c + tl.arange(0, BC)).to(tl.int64)
        p_log = log_mass + bucket[:, None] * num_queries + row[None, :]
        b_log = tl.load(p_log, mask=(bucket < num_buckets)[:, None] & m_row[None, :], other=float("-inf"))  # [BC, BM]
        m_new = tl.maximum(m, tl.max(b_log, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(b_log - base[None, :]), 0)
        m = m_new
    lse2 = tl.where(l > 0.0, m + tl.log2(tl.where(l > 0.0, l, 1.0)), float("-inf"))
    tl.store(lse + head * num_queries + row, lse2 * LN_2, mask=m_row)

    base = tl.where(l > 0.0, lse2, 0.0)
    for c in tl.range(0, num_buckets, BC):
        bucket = (c + tl.arange(0, BC)).to(tl.int64)
        m_bucket = bucket < num_buckets
        p_log = log_mass + bucket[:, None] * num_queries + row[None, :]
        b_log = tl.load(p_log, mask=m_bucket[:, None] & m_row[None, :], other=float("-inf"))  # [BC, BM]
        p_mass = mass + row.to(tl.int64)[:, None] * num_buckets + bucket[None, :]
        tl.store(p_mass, tl.trans(tl.exp2(b_log - base[None, :])), mask=m_row[:, None] & m_bucket[None, :])

    score = tl.full([BM], float("-inf"), tl.float32)
    key = tl.full([BM], -1, tl.int32)
    for split in tl.range(num_splits):
        part = (split * heads + head) * num_queries + row
        part_best = tl.load(part_score + part, mask=m_row, other=float("-inf"))
        better = part_best > score
        score = tl.where(better, part_best, score)
        key = tl.where(better, tl.load(part_key + part, mask=m_row, other=-1), key)
    tl.store(top_key + head * num_queries + row, key, mask=m_row)

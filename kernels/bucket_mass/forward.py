"""Attention mass of each bucket, without materializing the attention matrix.

This is the training target ``A . H_k`` of SAAP (arXiv 2502.08246, section 3). The queries of a
query group form the rows of one matrix, which is multiplied with the group's keys in one pass. Keys
are packed into key groups of one bucket each, and these into segments
(:mod:`msattn.kernels.bucket_mass.packing` defines both), such that one thread holds all scores of a
row and key group. A thread keeps a running maximum for each of its rows and, for each of its
segments, a sum relative to this maximum. At the end of a bucket it writes the sum in a logarithmic
encoding. Threads do not communicate, and the product of the next tile overlaps with the sums of
this one. The copies that fill up a key group need no mask: they equal the group's first key, so
they do not change the maximum and are subtracted from the sum.

The loop keeps only the tile and thread of each row's largest score. A second kernel computes the
scores of that thread's keys again to find the key, and a third one normalizes.

Tiles: BM rows (row r = query r % n_q of the group's head r // n_q), BN keys, BD head size, BC
buckets.
Grid: (row tile, key/value head, split of the keys and sequence), then (row tile, bucket tile,
key/value head of a sequence).
"""

import torch
from torch import Tensor

from msattn.kernels.bucket_mass.finalize import (
    INTEGER_RANGE,
    load_rows,
    mask_by_distance,
    normalize_kernel,
    to_log_fixed,
    top_key_kernel,
)
from msattn.kernels.bucket_mass.packing import max_key_groups, pack_keys
from msattn.kernels.common.bucket_checks import check_num_buckets
from msattn.kernels.common.checks import (
    check_qkv,
    check_tensor,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
    statistics_dtype,
)
from msattn.kernels.common.primitives import (
    LOG2_E,
    load_tile,
    num_sms,
    padded_head,
    precision,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.common.registration import USE_NO_GRAD, register_op
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.common.splits import choose_splits
from msattn.kernels.reference import bucket_mass as reference
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
    softcap: float | None = None,
    min_distance: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    backend: Backend | None = None,
) -> BucketMass:
    """Computes the attention mass of each bucket for each query (SAAP's target).

    ``mass[i, c] = sum over keys j in bucket c of softmax_j(scale * q_i k_j)``. Memory grows with
    ``n_q * C``, not with ``n_q * n_k``.

    Parameters
    ----------
    q : Tensor ``[B, Hq, n_q, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Strided views are not copied.
    k : Tensor ``[B, Hkv, n_k, D]``
        Keys; query head h reads head ``h // (Hq // Hkv)``.
    buckets : Tensor int32 ``[B, Hkv, n_k]``
        The bucket of each key, 0 to ``num_buckets - 1``; -1 excludes a key from the softmax.
    num_buckets : int
        Number of buckets, C.
    causal : bool
        Keep only keys with ``k_pos <= q_pos``.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before
        masking (Gemma 2).
    min_distance : int, optional
        Keep only pairs with ``|q_pos - k_pos| > min_distance``, in tokens.
    q_pos, k_pos : Tensor int32 ``[n_q]``, ``[n_k]``, optional
        Positions, in tokens. By default keys count from 0 and the last query is at the last key.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    BucketMass
        ``mass [B, Hq, n_q, C]`` fp32, whose rows sum to 1; ``lse [B, Hq, n_q]`` (natural logarithm,
        fp32); ``top_key`` int32 ``[B, Hq, n_q]``, the index in k of the largest score (of any such
        key if several tie). A query without visible keys has mass 0, lse -inf and top_key -1.

    Raises
    ------
    ValueError
        If an argument is invalid. Bucket numbers are checked only by the reference; the kernel
        excludes keys whose number is out of range.
    NotImplementedError
        In the backward pass, as the operation makes training targets.
    """
    check_qkv(q, k, k)
    check_tensor("buckets", buckets, torch.int32, k.shape[:3], "q", q)
    for name, positions, tokens in (("q_pos", q_pos, q.shape[2]), ("k_pos", k_pos, k.shape[2])):
        if positions is not None:
            check_tensor(name, positions, torch.int32, (tokens,), "q", q)
    check_num_buckets(num_buckets)
    if min_distance is not None and min_distance < 0:
        raise ValueError(f"min_distance={min_distance!r}: expected a number of tokens, 0 or more")
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    return BucketMass(
        *_operator(
            q, k, buckets, q_pos, k_pos, num_buckets, causal, scale, softcap, min_distance, backend
        )
    )


def _empty(q, k, buckets, q_pos, k_pos, num_buckets, *others):
    statistics, rows = statistics_dtype(q), q.shape[:3]
    mass = q.new_empty((*rows, num_buckets), dtype=statistics)
    return mass, q.new_empty(rows, dtype=statistics), q.new_empty(rows, dtype=torch.int32)


def launch(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    num_buckets: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    min_distance: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the keys and launches the kernels."""
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    rows, cols = q_heads // kv_heads * num_queries, padded_head(head)
    tile = default_tile(cols, q.dtype)
    group_size = default_group_size(num_keys // num_buckets, tile.keys)
    row_tiles = triton.cdiv(rows, tile.rows)
    max_tiles = triton.cdiv(
        max_key_groups(num_keys, num_buckets, group_size) * group_size, tile.keys
    )
    concurrent = tile.programs * num_sms(q.device)
    # Merging takes time for each split, hence fewer splits than the fastest main pass would have.
    splits = choose_splits(
        row_tiles * kv_heads * batch, concurrent, max_tiles, efficiency=0.9, saturation=1.0
    )
    packed = pack_keys(k, buckets, num_buckets, group_size, tile.keys, splits)
    if causal or min_distance is not None:
        q_pos, k_pos = _positions(q_pos, k_pos, num_queries, num_keys, q.device)

    segments = packed.continued.shape[2]
    sums = q.new_empty((batch, kv_heads, num_buckets + segments, rows), dtype=torch.int32)
    part_lse = q.new_empty((splits, batch, kv_heads, rows), dtype=torch.float32)
    references = torch.empty_like(part_lse[0])
    part_score = torch.empty_like(part_lse)
    part_place = torch.empty_like(part_lse, dtype=torch.int32)
    _mass_kernel[(row_tiles, kv_heads, batch * splits)](
        q, tile_view(packed.keys, tile.keys), packed.indices, packed.out_rows, packed.copies,
        packed.first, q_pos, k_pos,
        sums, references, part_lse, part_score, part_place, *q.stride(),
        q_heads // kv_heads, num_queries, num_buckets, packed.indices.shape[2] // tile.keys, splits,
        min_distance or 0,
        scale * LOG2_E, unscaled_limit(softcap, scale), HEAD=head, CAUSAL=causal,
        FAR=min_distance is not None,
        BM=tile.rows, BN=tile.keys, BD=cols, GROUP_SIZE=group_size, PRECISION=precision(q.dtype),
        ROW_WARPS=min(tile.warps, tile.rows // 16), Q_IN_REGISTERS=cols * q.element_size() <= 256,
        num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=min(255, 65536 // (32 * tile.warps * tile.programs)),
    )  # fmt: skip
    mass = q.new_empty((batch, q_heads, num_queries, num_buckets), dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    top_key = q.new_empty(q.shape[:3], dtype=torch.int32)
    top_rows = max(1, 512 // cols)
    top_key_kernel[(triton.cdiv(rows, top_rows), kv_heads, batch)](
        q, packed.keys, packed.indices, q_pos, k_pos, part_score, part_place, top_key, *q.stride(),
        q_heads // kv_heads, num_queries, packed.indices.shape[2], splits, min_distance or 0,
        HEAD=head, CAUSAL=causal, FAR=min_distance is not None, BM=top_rows, BD=cols,
        PLACES=tile.keys // 4,
    )  # fmt: skip
    normalize_kernel[(triton.cdiv(rows, 32), triton.cdiv(num_buckets, 64), batch * kv_heads)](
        sums, references, part_lse, packed.first, packed.continued,
        mass, lse, rows, num_buckets, segments, splits,
        BM=32, BC=64, BL=32,
    )  # fmt: skip
    return mass, lse, top_key


_operator = register_op(
    "bucket_mass", launch, reference.bucket_mass, _empty, no_gradient=USE_NO_GRAD
)


def default_tile(cols: int, dtype: torch.dtype) -> Tile:
    """Returns a small tile: several programs per SM overlap products and exponentials."""
    if dtype == torch.float32:
        return Tile(rows=64, keys=32, warps=8, stages=1, programs=2)
    return Tile(64, 64, 4, 3, 4) if cols <= 128 else Tile(64, 64, 4, 2, 2)


def default_group_size(keys_per_bucket: int, tile: int) -> int:
    """Returns the size of key groups, at most a quarter of a tile.

    With large groups fewer sums are written, with small ones fewer copies are needed.
    """
    return min(16 if keys_per_bucket >= 32 else 8, tile // 4)


def _positions(
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Fills in default positions: keys from 0, the last query at the last key."""
    if q_pos is None:
        q_pos = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int32, device=device)
    if k_pos is None:
        k_pos = torch.arange(num_keys, dtype=torch.int32, device=device)
    return q_pos.contiguous(), k_pos.contiguous()


@triton.jit(
    do_not_specialize=[
        "group",
        "num_queries",
        "num_buckets",
        "num_tiles",
        "num_splits",
        "min_distance",
    ]
)
def _mass_kernel(
    q_ptr, keys_desc, indices_ptr, out_rows_ptr, copies_ptr,
    first_ptr, q_pos_ptr, k_pos_ptr, sums_ptr, references_ptr,
    part_lse_ptr, part_score_ptr, part_place_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    group, num_queries, num_buckets, num_tiles, num_splits, min_distance, scale2, limit,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    GROUP_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    ROW_WARPS: tl.constexpr, Q_IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Writes the bucket sums and the row statistics of one split of the keys.

    ``sums [B, Hkv, C + R, rows]``, encoded by :func:`to_log_fixed`, are divided by 2 to the power
    of ``references [B, Hkv, rows]``. The statistics ``[S, B, Hkv, rows]`` are the base-2 LSE minus
    the reference, the best score, and the place of the first key of the thread that found it.
    """
    SEGMENTS: tl.constexpr = BN // GROUP_SIZE
    GROUPS: tl.constexpr = SEGMENTS // 4
    MASKED: tl.constexpr = CAUSAL or FAR
    kv_heads = tl.num_programs(1)
    kv_head, batch, split = (
        tl.program_id(1),
        tl.program_id(2) // num_splits,
        tl.program_id(2) % num_splits,
    )
    kv_row = (batch * kv_heads + kv_head).to(tl.int64)
    num_tiles = num_tiles // num_splits
    first_tile = split * num_tiles
    indices_ptr += kv_row * num_splits * num_tiles * BN
    run = tl.cdiv(
        tl.load(first_ptr + kv_row * (num_buckets + 1) + num_buckets), num_splits * SEGMENTS
    )

    rows = group * num_queries
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = row < rows
    m_tile = m_row[:, None] & (tl.arange(0, BD) < HEAD)[None, :]
    b_q = load_rows(
        q_ptr,
        row,
        m_tile,
        batch,
        kv_head,
        group,
        num_queries,
        stride_qb,
        stride_qh,
        stride_qn,
        stride_qd,
        BD,
    )
    if Q_IN_REGISTERS:  # a computed operand stays in registers, which saves shared memory bandwidth
        b_q = tl.where(m_tile, b_q, 0.0)
    if MASKED:
        b_q_pos = tl.load(q_pos_ptr + row % num_queries, mask=m_row, other=0)[:, None]
    sample = tl.max(
        tl.dot(b_q, load_tile(keys_desc, batch, kv_head, 0, BN, BD).T, input_precision=PRECISION), 1
    )
    if limit is not None:
        sample = cap_scores(sample, limit)
    sample = tl.where(tl.abs(sample) < float("inf"), sample, 0.0)  # a row may not see these keys
    reference = tl.floor(sample * scale2)[:, None]  # the same for all splits
    all_sums_ptr = sums_ptr + kv_row * (num_buckets + num_splits * SEGMENTS) * rows
    row_in_layout = _accumulator_order(row[:, None, None], ROW_WARPS)  # [1, BM, 1]

    column = tl.arange(0, BN)
    segment = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [GROUPS, 4]
    o_group = kv_row * num_splits * num_tiles * SEGMENTS + segment
    m = tl.full([BM, 4], float("-inf"), tl.float32)
    acc = tl.zeros([BM, GROUPS, 4], tl.float32)  # sum of the current bucket of each segment
    l = tl.zeros([BM, 4], tl.float32)
    top = tl.full([BM, 4], float("-inf"), tl.float32)
    top_tile = tl.zeros([BM, 4], tl.int32)
    b_k = load_tile(keys_desc, batch, kv_head, first_tile * BN, BN, BD)
    s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BM, BN]
    out_row = tl.load(out_rows_ptr + o_group + first_tile * SEGMENTS)
    copied = tl.load(copies_ptr + o_group + first_tile * SEGMENTS)
    if MASKED:
        b_k_pos = tl.load(
            k_pos_ptr + tl.load(indices_ptr + first_tile * BN + column, mask=run > 0, other=0)
        )
    for n in tl.range(first_tile, first_tile + run):
        if limit is not None:
            s = cap_scores(s, limit)
        if MASKED:
            s = mask_by_distance(s, b_q_pos - b_k_pos[None, :], min_distance, CAUSAL, FAR)  # pyrefly: ignore[unbound-name]
        s = tl.reshape(s, [BM, GROUPS, GROUP_SIZE // 2, 4, 2])
        largest = tl.max(tl.max(tl.max(s, 4), 2), 1)  # [BM, 4]
        better = largest > top
        top = tl.where(better, largest, top)
        top_tile = tl.where(better, n, top_tile)
        m_new = tl.maximum(m, (largest * scale2 + INTEGER_RANGE) - INTEGER_RANGE)  # an integer
        base = m_new
        if MASKED:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        exponents = s * scale2 - base[:, None, None, :, None]

        ahead = tl.minimum(n + 1, first_tile + run - 1)
        b_k = load_tile(keys_desc, batch, kv_head, ahead * BN, BN, BD)
        s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # overlaps with the rest of this tile
        out_row_ahead = tl.load(out_rows_ptr + o_group + ahead * SEGMENTS)
        copied_ahead = tl.load(copies_ptr + o_group + ahead * SEGMENTS)
        if MASKED:
            b_k_pos = tl.load(k_pos_ptr + tl.load(indices_ptr + ahead * BN + column))

        even, odd = tl.split(tl.exp2(exponents))  # [BM, GROUPS, G / 2, 4]
        total, key = _sum_and_first(even + odd, even, GROUP_SIZE // 2)
        mass = total - copied[None] * key
        alpha = tl.exp2(m - base)
        acc = acc * alpha[:, None, :] + mass
        is_last = (out_row >= 0)[None]  # last key group of its bucket or segment
        l = l * alpha + tl.sum(tl.where(is_last, acc, 0.0), 1)
        encoded = to_log_fixed(acc, (m_new - reference)[:, None, :])
        row_of_sum = tl.trans(out_row)[:, None, :]  # [4, 1, GROUPS]
        end_ptrs = all_sums_ptr + row_of_sum.to(tl.int64) * rows + row_in_layout
        tl.store(
            end_ptrs,
            _accumulator_order(encoded, ROW_WARPS),
            mask=(row_of_sum >= 0) & (row_in_layout < rows),
        )
        acc = tl.where(is_last, 0.0, acc)
        m, out_row, copied = m_new, out_row_ahead, copied_ahead

    part = split * (tl.num_programs(2) // num_splits) + batch
    part = (part * kv_heads + kv_head).to(tl.int64) * rows + row
    best = tl.max(top, 1)
    place = tl.where(top == best[:, None], top_tile * BN + 2 * tl.arange(0, 4)[None, :], -1)
    if split == 0:
        tl.store(references_ptr + kv_row * rows + row[:, None], reference, mask=m_row[:, None])
    base = tl.where(best == float("-inf"), 0.0, tl.max(m, 1))[:, None]
    total = tl.sum(l * tl.exp2(m - base), 1)[:, None]
    lse = tl.where(
        total != 0, base - reference + tl.log2(tl.where(total != 0, total, 1.0)), float("-inf")
    )
    tl.store(part_lse_ptr + part[:, None], lse, mask=m_row[:, None])
    tl.store(part_score_ptr + part, best, mask=m_row)
    tl.store(part_place_ptr + part, tl.max(place, 1), mask=m_row)


@triton.jit
def _sum_and_first(sums, firsts, SIZE: tl.constexpr):
    """Reduces the third dimension of ``[BM, GROUPS, SIZE, 4]`` in registers.

    Returns the sum of ``sums`` and the first of ``firsts``. Summation is pairwise, so that equal
    numbers, such as copies, add up without rounding.
    """
    if SIZE > 1:
        sums, other = _halves(sums, SIZE)
        firsts, _ = _halves(firsts, SIZE)
        total, first = _sum_and_first(sums + other, firsts, SIZE // 2)
    else:
        total = tl.reshape(sums, [sums.shape[0], sums.shape[1], 4])
        first = tl.reshape(firsts, [sums.shape[0], sums.shape[1], 4])
    return total, first


@triton.jit
def _halves(x, SIZE: tl.constexpr):
    """Splits the third dimension into its even and odd elements."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1], SIZE // 2, 2, 4])
    return tl.split(tl.permute(pairs, [0, 1, 2, 4, 3]))


@triton.jit
def _accumulator_order(x, ROW_WARPS: tl.constexpr):
    """Permutes ``x [BM, GROUPS, 4]`` to ``[4, BM, GROUPS]`` in accumulator row order.

    Each thread of a warp holds rows r and r + 8 of the warp's 16. Stores in this order come
    directly from registers. Any other order of the same elements, such as Triton's 8 rows of each
    warp in turn, goes through shared memory with two barriers.
    """
    BM: tl.constexpr = x.shape[0]
    parts = tl.reshape(x, [BM // (16 * ROW_WARPS), ROW_WARPS, 2, 8, x.shape[1], x.shape[2]])
    return tl.reshape(tl.permute(parts, [5, 0, 2, 1, 3, 4]), [x.shape[2], BM, x.shape[1]])

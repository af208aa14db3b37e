"""Kernels after the main pass of :mod:`.forward`: best keys, normalized masses."""

from msattn.kernels.bucket_mass.packing import column_of
from msattn.kernels.common.primitives import LN_2, tl, triton

# fp32 numbers near it are integers, so that adding it rounds
INTEGER_RANGE: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def load_rows(
    q_ptr,
    row,
    m_tile,
    batch,
    kv_head,
    group,
    num_queries,
    stride_b,
    stride_h,
    stride_n,
    stride_d,
    BD: tl.constexpr,
):
    """Loads the queries ``[BM, BD]`` of a query group's rows, 0 outside the mask."""
    q_ptrs = (
        q_ptr
        + batch.to(tl.int64) * stride_b
        + (kv_head * group + row // num_queries).to(tl.int64) * stride_h
    )
    q_ptrs = (q_ptrs + (row % num_queries).to(tl.int64) * stride_n)[:, None] + tl.arange(0, BD)[
        None, :
    ] * stride_d
    return tl.load(q_ptrs, mask=m_tile, other=0.0)


@triton.jit
def mask_by_distance(s, distance, min_distance, CAUSAL: tl.constexpr, FAR: tl.constexpr):
    """Masks scores by ``distance``, the query's position minus the key's."""
    if CAUSAL:
        s = tl.where(distance >= 0, s, float("-inf"))
    if FAR:
        s = tl.where(tl.abs(distance) > min_distance, s, float("-inf"))
    return s


@triton.jit
def to_log_fixed(x, exponent):
    """Encodes ``x * 2**exponent`` as int32: 12 bits of exponent, 19 of mantissa.

    ``x`` is not negative, and the integer exponent is clamped to -1900 to 1900. The encoding has
    the range of a logarithm but takes three instructions, where a logarithm takes about thirty.
    """
    exponent = tl.minimum(tl.maximum(exponent, -1900.0), 1900.0)
    # the last bits of the sum are the exponent
    shifted = (exponent + INTEGER_RANGE).to(tl.int32, bitcast=True) << 19
    return ((x.to(tl.int32, bitcast=True) + 8) >> 4) + shifted


@triton.jit
def from_log_fixed(encoded, exponent):
    """Decodes ``encoded / 2**exponent`` to fp32; 0 below 2**-119, as is an encoded 0."""
    bits = encoded - exponent.to(tl.int32) * (1 << 19)
    return tl.where(bits >= 8 << 19, bits << 4, 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["group", "num_queries", "num_packed", "num_splits", "min_distance"])
def top_key_kernel(
    q_ptr, keys_ptr, indices_ptr, q_pos_ptr, k_pos_ptr, part_score_ptr, part_place_ptr, top_key_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, group,
    num_queries, num_packed, num_splits, min_distance,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Writes ``top_key [B, Hq, n_q]``, the index of the key with the best score.

    It computes the scores of PLACES keys again, those of the thread that found the best score in
    the main pass.
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    kv_row, kv_rows = (
        (batch * tl.num_programs(1) + kv_head).to(tl.int64),
        tl.num_programs(1) * tl.num_programs(2),
    )
    rows = group * num_queries
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = row < rows
    score = tl.full([BM], float("-inf"), tl.float32)
    first_place = tl.zeros([BM], tl.int32)
    for split in tl.range(0, num_splits):
        part = (split * kv_rows + kv_row) * rows + row
        part_best = tl.load(part_score_ptr + part, mask=m_row, other=float("-inf"))
        first_place = tl.where(
            part_best > score, tl.load(part_place_ptr + part, mask=m_row, other=0), first_place
        )
        score = tl.maximum(score, part_best)

    seen = score > float("-inf")
    o_d = tl.arange(0, BD)
    m_tile = seen[:, None] & (o_d < HEAD)[None, :]
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
    place = (
        kv_row * num_packed
        + first_place[:, None]
        + column_of(0, tl.arange(0, PLACES), PLACES)[None, :]
    )
    b_k = tl.load(
        keys_ptr + place[:, :, None] * HEAD + o_d[None, None, :], mask=m_tile[:, None, :], other=0.0
    )
    s = tl.sum(b_q.to(tl.float32)[:, None, :] * b_k.to(tl.float32), 2)  # [BM, PLACES]
    key = tl.load(indices_ptr + place, mask=seen[:, None], other=0)
    if CAUSAL or FAR:
        distance = tl.load(q_pos_ptr + row % num_queries, mask=m_row, other=0)[:, None] - tl.load(
            k_pos_ptr + key
        )
        s = mask_by_distance(s, distance, min_distance, CAUSAL, FAR)
    key = tl.where(s == tl.max(s, 1)[:, None], key, -1)
    tl.store(top_key_ptr + kv_row * rows + row, tl.where(seen, tl.max(key, 1), -1), mask=m_row)


@triton.jit(do_not_specialize=["rows", "num_buckets", "num_segments", "num_splits"])
def normalize_kernel(
    sums_ptr, references_ptr, part_lse_ptr, first_ptr, continued_ptr,
    mass_ptr, lse_ptr, rows, num_buckets, num_segments,
    num_splits,
    BM: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Writes ``mass [B, Hq, n_q, C]`` and natural-log ``lse [B, Hq, n_q]``.

    It merges the results of the splits. Grid: (row tile, bucket tile, key/value head of a
    sequence).
    """
    kv_row, kv_rows = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = row < rows
    first_bucket = tl.program_id(1) * BC
    bucket = first_bucket + tl.arange(0, BC)
    m_bucket = bucket < num_buckets
    sums_ptr += kv_row * (num_buckets + num_segments) * rows + row[None, :]
    sum_ptrs = sums_ptr + bucket.to(tl.int64)[:, None] * rows
    # [BC, BM], in flight while the rest is loaded
    b_sum = tl.load(sum_ptrs, mask=m_bucket[:, None] & m_row[None, :], other=0)
    first_ptr += kv_row * (num_buckets + 1) + bucket
    filled = tl.load(first_ptr + 1, mask=m_bucket, other=0) > tl.load(
        first_ptr, mask=m_bucket, other=0
    )

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    for split in tl.range(0, num_splits):
        b_lse = tl.load(
            part_lse_ptr + (split * kv_rows + kv_row) * rows + row, mask=m_row, other=float("-inf")
        )
        m_new = tl.maximum(m, b_lse)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - base) + tl.exp2(b_lse - base)
        m = m_new
    seen = l != 0.0
    base = tl.where(seen, m + tl.log2(tl.where(seen, l, 1.0)), 0.0)
    if tl.program_id(1) == 0:
        b_lse = base + tl.load(references_ptr + kv_row * rows + row, mask=m_row, other=0.0)
        tl.store(
            lse_ptr + kv_row * rows + row, tl.where(seen, b_lse, float("-inf")) * LN_2, mask=m_row
        )

    whole = tl.floor(base)
    b_mass = tl.where(filled[:, None], from_log_fixed(b_sum, whole[None, :]), 0.0)
    for segment in tl.range(0, num_segments, BL):
        o_segment = segment + tl.arange(0, BL)
        b_continued = tl.load(
            continued_ptr + kv_row * num_segments + o_segment,
            mask=o_segment < num_segments,
            other=-1,
        )
        if (
            tl.max(
                ((b_continued >= first_bucket) & (b_continued < first_bucket + BC)).to(tl.int32), 0
            )
            > 0
        ):
            for r in tl.range(segment, tl.minimum(segment + BL, num_segments)):
                b_bucket = tl.load(continued_ptr + kv_row * num_segments + r)
                if (b_bucket >= first_bucket) & (b_bucket < first_bucket + BC):
                    continues = (bucket == b_bucket)[:, None]
                    segment_ptrs = sums_ptr + (num_buckets + r).to(tl.int64) * rows
                    b_sum = tl.load(segment_ptrs, mask=continues & m_row[None, :], other=-(1 << 30))
                    b_mass += tl.where(continues, from_log_fixed(b_sum, whole[None, :]), 0.0)
    b_mass *= tl.exp2(whole - base)[None, :]
    mass_ptrs = mass_ptr + (kv_row * rows + row[:, None]) * num_buckets + bucket[None, :]
    tl.store(mass_ptrs, tl.trans(b_mass), mask=m_row[:, None] & m_bucket[None, :])

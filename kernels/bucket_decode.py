"""Decoding over a dense window and probed buckets.

This is Algorithm 2 of SAAP (arXiv 2502.08246).

One query group, the ``G = Hq / Hkv`` query heads of a key/value head, reads a list of keys::

    [ first `sink` keys | last `recent` keys | members of bucket probes[0] | of probes[1] | ... ]

This list is not materialized. For up to 64 probes at a time, each program computes the prefix sums
of the bucket sizes, takes an equal part of the list's positions, and finds the bucket of a position
by comparing it with these sums. The time depends on the number of keys read, not on the largest
bucket. A second kernel merges the partial results of the splits.

Tiles: BH query heads of a group (padded to the 16 rows that tensor cores need), BN keys, BD head
size, BL probes.
Grid: (split, key/value head, sequence); then the merge kernel.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.bucket_checks import (
    check_counts,
    check_dense_window,
    check_lists,
    check_one_query,
)
from msattn.kernels.common.checks import (
    check_no_gradient,
    check_per_sequence,
    check_qkv,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
)
from msattn.kernels.common.decode_tiles import default_tile, dense_window, load_group, store_split
from msattn.kernels.common.primitives import (
    LOG2_E,
    num_sms,
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    precision,
    softmax_step,
    tl,
    triton,
)
from msattn.kernels.common.registration import USE_NO_GRAD, empty_decoding, register_op
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.common.splits import Parts, one_wave_splits
from msattn.kernels.reference import bucket_decode as reference
from msattn.kernels.types import Backend, BucketIndex, SparseAttention

MAX_SPLITS = 128
PROBES_AT_ONCE = 64  # that a program processes at once


def bucket_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BucketIndex,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    distinct: bool = False,
    counts: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes a decoding step over the dense window and the keys of probed buckets.

    Every key counts once, even if the index lists it inside the dense window or a bucket is probed
    twice. Entries of the index outside the sequence, ``kv_start[b] <= j < kv_len[b]``, are skipped.

    Several queries of one sequence are a batch with its keys, values and index expanded
    (``k.expand(B, -1, -1, -1)``) and a ``kv_len`` for each query: tensors of stride 0 are not
    copied.

    Parameters
    ----------
    q : Tensor ``[B, Hq, 1, D]``
        Query of the newest token, at position ``kv_len - 1``; fp32, fp16 or bf16 (fp64 on the torch
        backend).
    k, v : Tensor ``[B, Hkv, M, D]``
        The cache, keys after RoPE; query head h reads head ``h // (Hq // Hkv)``. Strided views are
        not copied.
    index : BucketIndex
        ``offsets`` int32 ``[B, Hkv, C + 1]``, ``order`` int32 ``[B, Hkv, n]``: cache positions,
        none in two buckets. Entries of ``order`` past the last offset are not read. Both are copied
        only if their rows are not contiguous.
    probes : Tensor int32 ``[B, Hkv, L]``
        Buckets to read, shared by a query group. -1 means no bucket; L may be 0.
    recent : int or Tensor int32 ``[B]``
        Number of newest keys that are always read; a tensor if sequences differ, or if it changes
        between replays of a CUDA graph.
    sink : int
        Number of first keys after the padding that are always read.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2).
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
    kv_len : Tensor int32 ``[B]``, optional
        Number of filled positions among the M, padding included; all by default.
    distinct : bool
        No bucket is in a row of ``probes`` twice; more than 64 of them then need no sorting. Not
        checked.
    counts : Tensor int64 ``[B, Hkv]``, optional
        The number of keys read for each key/value head is added to it, in place. Contiguous.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]`` (natural logarithm, fp32); 0 and -inf for a
        sequence without keys.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of tensors (probes, lengths, offsets) are checked only
        by the reference; the kernel reads only inside the cache for any values, and nothing for a
        probe out of range.
    NotImplementedError
        In the backward pass, as the operation is for inference; with ``counts`` when it is called,
        if a gradient would be needed.
    """
    check_qkv(q, k, v)
    check_one_query(q)
    for name, x, least in (
        ("index.offsets", index.offsets, 2),
        ("index.order", index.order, 0),
        ("probes", probes, 0),
    ):
        check_lists(name, x, k.shape[1], least, q)
    check_per_sequence(q, kv_start=kv_start, kv_len=kv_len)
    check_dense_window(recent, sink, q)
    check_counts(counts, k.shape[1], q)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    recent_of, recent = (recent, 0) if isinstance(recent, Tensor) else (None, recent)
    arguments = (
        q,
        k,
        v,
        *index,
        probes,
        recent_of,
        recent,
        sink,
        scale,
        softcap,
        kv_start,
        kv_len,
        distinct,
    )
    if counts is None:
        return SparseAttention(*_operator(*arguments, backend))
    check_no_gradient("bucket_decode with counts", q, k, v)
    return SparseAttention(*_counting_operator(*arguments, counts, backend))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    order: Tensor,
    probes: Tensor,
    recent_of: Tensor | None,
    recent: int,
    sink: int,
    scale: float,
    softcap: float | None,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    distinct: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches both kernels.

    The grid depends only on shapes, so that a captured CUDA graph serves any index, probes and
    lengths.
    """
    batch, q_heads, _, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group, cols = q_heads // kv_heads, padded_head(head)
    tile = default_tile(cols, q.element_size())
    concurrent = tile.programs * num_sms(q.device)
    splits = one_wave_splits(
        batch * kv_heads, concurrent, triton.cdiv(num_keys, tile.keys), MAX_SPLITS
    )
    if probes.shape[2] > PROBES_AT_ONCE and not distinct:
        probes = _distinct(probes)
    offsets, order, probes = (
        x if x.stride(2) == 1 else x.contiguous() for x in (offsets, order, probes)
    )

    parts = Parts.empty(q, splits)
    _split_bucket_decode_kernel[(splits, kv_heads, batch)](
        q, k, v, offsets, order, probes, recent_of, kv_start,
        kv_len, counts, *parts,
        q.stride(0), q.stride(1), q.stride(3), *k.stride(), *v.stride(),
        *offsets.stride()[:2], *order.stride()[:2], *probes.stride()[:2],
        group, num_keys, order.shape[2], offsets.shape[2] - 1, probes.shape[2],
        recent, sink, scale * LOG2_E, unscaled_limit(softcap, scale),
        HEAD=head, BH=max(tile.rows, triton.next_power_of_2(group)), BN=tile.keys, BD=cols,
        BL=max(16, min(PROBES_AT_ONCE, triton.next_power_of_2(probes.shape[2]))),
        PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages, **pdl_args(q.device),
    )  # fmt: skip
    return parts.merged(q.dtype)


def _reference(
    offsets: Tensor,
    order: Tensor,
    recent_of: Tensor | None,
    recent: int,
    distinct: bool,
    **others: Any,
) -> SparseAttention:
    recently = recent if recent_of is None else recent_of
    return reference.bucket_decode(index=BucketIndex(offsets, order), recent=recently, **others)


# PyTorch registers a backward pass only for operators that mutate nothing, hence two operators.
_operator = register_op(
    "bucket_decode", launch, _reference, empty_decoding, no_gradient=USE_NO_GRAD
)
_counting_operator = register_op(
    "bucket_decode_counts", launch, _reference, empty_decoding, mutates=("counts",)
)


def _distinct(probes: Tensor) -> Tensor:
    """Sorts probes and sets repetitions to -1.

    The kernel itself detects repetitions only among the probes that it processes at once.
    """
    probes = probes.sort(-1).values
    repeated = probes.diff(prepend=torch.full_like(probes[..., :1], -1)) == 0
    return probes.masked_fill(repeated, -1)


@triton.jit(
    do_not_specialize=[
        "stride_ob", "stride_oh", "stride_lb", "stride_lh", "stride_pb", "stride_ph",
        "group", "num_keys", "num_listed", "num_buckets", "num_probes", "recent", "sink",
    ]
)  # fmt: skip
def _split_bucket_decode_kernel(
    q_ptr, k_ptr, v_ptr, offsets_ptr, order_ptr, probes_ptr,
    recent_of_ptr, kv_start_ptr, kv_len_ptr, counts_ptr, part_max_ptr,
    part_sum_ptr, part_out_ptr,
    stride_qb, stride_qh, stride_qd,
    stride_kb, stride_kh, stride_km, stride_kd, stride_vb, stride_vh, stride_vm, stride_vd,
    stride_ob, stride_oh, stride_lb, stride_lh, stride_pb, stride_ph,
    group, num_keys, num_listed, num_buckets, num_probes, recent, sink, scale2, limit,
    HEAD: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes one split's result, and adds its number of keys to ``counts``."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    split, kv_head, batch = (
        tl.program_id(0),
        tl.program_id(1).to(tl.int64),
        tl.program_id(2).to(tl.int64),
    )
    num_splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    offsets_ptr += batch * stride_ob + kv_head * stride_oh
    order_ptr += batch * stride_lb + kv_head * stride_lh
    probes_ptr += batch * stride_pb + kv_head * stride_ph
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    start = tl.maximum(tl.load(kv_start_ptr + batch), 0) if kv_start_ptr is not None else 0
    end = tl.minimum(tl.load(kv_len_ptr + batch), num_keys) if kv_len_ptr is not None else num_keys
    if recent_of_ptr is not None:
        recent = tl.load(recent_of_ptr + batch)
    end = tl.maximum(end, start)
    sink_end, recent_begin = dense_window(start, end, recent, sink)
    num_sink = sink_end - start
    dense = num_sink + end - recent_begin

    o_d = tl.arange(0, BD)
    m_d = o_d < HEAD
    b_q = load_group(q_ptr, batch, kv_head, group, stride_qb, stride_qh, stride_qd, HEAD, BH, BD)
    m = tl.full([BH], float("-inf"), tl.float32)
    l = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, BD], tl.float32)
    count = tl.zeros([BH, BN], tl.int32)  # rows are equal

    for first in tl.range(0, tl.maximum(num_probes, 1), BL):
        begin, size = _bucket_ranges(probes_ptr, offsets_ptr, first, num_probes, num_buckets, BL)
        window = tl.where(first == 0, dense, 0)
        list_end = window + tl.cumsum(size, 0)
        list_begin = list_end - size
        total = window + tl.sum(size, 0)
        share = tl.cdiv(total, num_splits)
        stop = tl.minimum((split + 1) * share, total)
        for n in tl.range(split * share, stop, BN):
            position = n + tl.arange(0, BN)
            # [BN, BL]
            inside = (position[:, None] >= list_begin[None, :]) & (
                position[:, None] < list_end[None, :]
            )
            listed = position + tl.sum(tl.where(inside, (begin - list_begin)[None, :], 0), 1)
            window_key = tl.where(
                position < num_sink, start + position, recent_begin + position - num_sink
            )
            window_key = tl.where(position < tl.minimum(window, stop), window_key, -1)
            m_listed = (
                (position >= window) & (position < stop) & (listed >= 0) & (listed < num_listed)
            )
            member = tl.load(order_ptr + listed, mask=m_listed, other=-1)
            # Keys of the index that are in the dense window are skipped, since the window has its
            # own positions in the list.
            key = tl.where((member >= sink_end) & (member < recent_begin), member, window_key)
            live = key >= 0
            m_tile = live[:, None] & m_d[None, :]
            key = key.to(tl.int64)
            # [BN, BD]
            b_k = tl.load(
                k_ptr + key[:, None] * stride_km + o_d[None, :] * stride_kd, mask=m_tile, other=0.0
            )
            # [BN, BD]
            b_v = tl.load(
                v_ptr + key[:, None] * stride_vm + o_d[None, :] * stride_vd, mask=m_tile, other=0.0
            )
            s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BH, BN]
            if limit is not None:
                s = cap_scores(s, limit)
            if counts_ptr is not None:
                # The second operand is always true. It gives the sum the layout of s, in which
                # `live` is computed anyway; in another layout, each tile would load its index
                # entries once more, outside the pipeline.
                count += tl.where(live[None, :] & ((s == s) | (s != s)), 1, 0)
            s = tl.where(live[None, :], s, float("-inf"))
            m, l, acc = softmax_step(s, tl.max(s, 1), b_v, m, l, acc, scale2, PRECISION)

    if counts_ptr is not None:
        num_read = tl.max(tl.sum(count, 1), 0)
        tl.atomic_add(counts_ptr + batch * kv_heads + kv_head, num_read.to(tl.int64), sem="relaxed")
    store_split(
        part_max_ptr, part_sum_ptr, part_out_ptr, m, l, acc, batch, kv_head, group, HEAD, BH, BD
    )


@triton.jit
def _bucket_ranges(probes_ptr, offsets_ptr, first, num_probes, num_buckets, BL: tl.constexpr):
    """Returns begin and size ``[BL]`` of buckets ``probes[first : first + BL]``.

    The size is 0 for -1 and for repetitions. Only these BL probes are compared with each other: a
    loop over earlier probes, inside the caller's loop, would hide the alignment of K and V from the
    compiler, which would then load two bytes at a time.
    """
    place = first + tl.arange(0, BL)
    bucket = tl.load(probes_ptr + place, mask=place < num_probes, other=-1)
    repeated = (bucket[:, None] == bucket[None, :]) & (place[:, None] < place[None, :])
    live = (bucket >= 0) & (bucket < num_buckets) & (tl.max(repeated.to(tl.int32), 0) == 0)
    begin = tl.load(offsets_ptr + bucket, mask=live, other=0)
    end = tl.load(offsets_ptr + bucket + 1, mask=live, other=0)
    return begin, end - begin

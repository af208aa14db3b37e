"""Decoding over a dense window and probed buckets of a paged cache.

The same attention as :mod:`msattn.kernels.bucket_decode`, without lists: nothing is rebuilt when
keys arrive, and a page may be shared, moved or freed, since the bucket of a key is stored by its
slot.

Each program takes a share of the positions of a sequence, for one key/value head:

1. It sets the bits of the probed buckets in a bit mask.
2. It appends its share of the dense window to its own list of slots. Windows are divided evenly:
   the newest keys are adjacent, and would otherwise all belong to one program.
3. It reads the bucket ids of its tiles of positions between sink and newest keys, tests their bits,
   and appends the matching slots to its list, compacted by a prefix sum. Adjacent tiles belong to
   different programs, because adjacent keys tend to be in the same buckets.
4. It attends to the listed slots, in full tiles.

Bit mask and list are scratch in global memory that no other program reads. A second kernel merges
the partial results of the splits.

Tiles: BH query heads of a group, BN keys, BD head size, BS positions of the scan. Prefixes: b_
tile, o_ offset, m_ mask. Grid: (split, key/value head, sequence); then the merge kernel.
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
    check_tensor,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
)
from msattn.kernels.common.decode_tiles import default_tile, dense_window, load_group, store_split
from msattn.kernels.common.fp8 import head_stride, load_scale, queries_of_products
from msattn.kernels.common.paged_checks import MAX_BUCKETS, check_paged_decode
from msattn.kernels.common.paged_tiles import load_pages
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
from msattn.kernels.common.registration import USE_NO_GRAD, empty_decoding, on_pages, register_op
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.common.splits import Parts, one_wave_splits
from msattn.kernels.reference import paged as reference
from msattn.kernels.types import Backend, PagedKeys, SparseAttention

MAX_SPLITS = 128
SCAN = 1024  # positions that a program reads the buckets of at a time


def paged_bucket_decode(
    q: Tensor,
    cache: PagedKeys,
    buckets: Tensor,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    counts: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes a decoding step over the dense window and probed buckets of a paged cache.

    The result is that of ``bucket_decode`` on the gathered cache. Every key counts once, even if
    its bucket is probed twice or it is in the dense window.

    Parameters
    ----------
    q : Tensor ``[B, Hq, 1, D]``
        Query of the newest token, at position ``cache.kv_len - 1``; fp32, fp16 or bf16 (fp64 on the
        torch backend).
    cache : PagedKeys
        The cache, keys after RoPE; query head h reads head ``h // (Hq // Hkv)``. Its views are not
        copied.
    buckets : Tensor int16 ``[P, page_size, Hkv]``
        Bucket of each slot, -1 for none.
    probes : Tensor int32 ``[B, Hkv, L]``
        Buckets to read, shared by a query group. -1, or a number that is no bucket, reads nothing;
        L may be 0.
    recent : int or Tensor int32 ``[B]``
        Number of newest keys that are always read; a tensor if sequences differ, or if it changes
        between replays of a CUDA graph.
    sink : int
        Number of first keys that are always read.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2).
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
        If an argument is invalid. The values of ``cache.table`` and ``cache.kv_len`` are checked
        only by the reference.
    NotImplementedError
        In the backward pass, as the operation is for inference; with ``counts`` when it is called,
        if a gradient would be needed.
    """
    check_paged_decode(q, cache)
    check_one_query(q)
    check_tensor(
        "buckets", buckets, torch.int16, cache.k.shape[:3], "q", q, "one for each slot and head"
    )
    check_lists("probes", probes, cache.k.shape[2], 0, q)
    check_dense_window(recent, sink, q)
    check_counts(counts, cache.k.shape[2], q)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    recent_of, recent = (recent, 0) if isinstance(recent, Tensor) else (None, recent)
    arguments = (q, *cache, buckets, probes, recent_of, recent, sink, scale, softcap)
    if counts is None:
        return SparseAttention(*_operator(*arguments, backend))
    check_no_gradient("paged_bucket_decode with counts", q, cache.k, cache.v)
    return SparseAttention(*_counting_operator(*arguments, counts, backend))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    buckets: Tensor,
    probes: Tensor,
    recent_of: Tensor | None,
    recent: int,
    sink: int,
    scale: float,
    softcap: float | None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches both kernels.

    The grid depends only on shapes, so that a captured CUDA graph serves any pages, buckets, probes
    and lengths.
    """
    batch, q_heads, _, head = q.shape
    page_size, kv_heads = k.shape[1:3]
    capacity = table.shape[1] * page_size
    group, cols = q_heads // kv_heads, padded_head(head)
    # half the tile and fewer buffers than with lists, for more programs that scan at once
    tile = default_tile(cols, 2 * q.element_size())._replace(stages=3, programs=4)
    splits = one_wave_splits(
        batch * kv_heads,
        tile.programs * num_sms(q.device),
        triton.cdiv(capacity, tile.keys),
        MAX_SPLITS,
    )
    table, probes = (x if x.stride(-1) == 1 else x.contiguous() for x in (table, probes))
    num_words = MAX_BUCKETS // 32
    # Shares of window and scan, which are disjoint: up to one position more than an equal share,
    # and up to one tile more.
    listed = triton.cdiv(capacity, splits) + 1 + SCAN
    words, slots = (
        table.new_empty((batch, kv_heads, splits, size)) for size in (num_words, listed)
    )

    parts = Parts.empty(q, splits)
    _split_paged_bucket_decode_kernel[(splits, kv_heads, batch)](
        q, k, v, table, kv_len, k_scale, v_scale, buckets, probes,
        recent_of, counts, words, slots, *parts,
        q.stride(0), q.stride(1), q.stride(3), *k.stride()[:3], *v.stride()[:3],
        table.stride(0), head_stride(k_scale), head_stride(v_scale),
        *buckets.stride(), *probes.stride()[:2],
        group, capacity, probes.shape[2], num_words, listed, recent,
        sink, scale * LOG2_E, unscaled_limit(softcap, scale),
        PAGE=page_size, HEAD=head, BH=max(tile.rows, triton.next_power_of_2(group)), BN=tile.keys,
        BD=cols,
        BS=SCAN, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages, **pdl_args(q.device),
    )  # fmt: skip
    return parts.merged(q.dtype)


def _reference(recent_of: Tensor | None, recent: int, **others: Any) -> SparseAttention:
    return on_pages(reference.paged_bucket_decode)(
        recent=recent if recent_of is None else recent_of, **others
    )


# PyTorch registers a backward pass only for operators that mutate nothing, hence two operators.
_operator = register_op(
    "paged_bucket_decode", launch, _reference, empty_decoding, no_gradient=USE_NO_GRAD
)
_counting_operator = register_op(
    "paged_bucket_decode_counts", launch, _reference, empty_decoding, mutates=("counts",)
)


@triton.jit(
    do_not_specialize=[
        "stride_tb", "stride_bp", "stride_bs", "stride_bh", "stride_pb", "stride_ph",
        "group", "capacity", "num_probes", "num_words", "listed", "recent", "sink",
    ]
)  # fmt: skip
def _split_paged_bucket_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, k_scale_ptr, v_scale_ptr, buckets_ptr, probes_ptr,
    recent_of_ptr, counts_ptr, words_ptr, slots_ptr,
    part_max_ptr, part_sum_ptr, part_out_ptr,
    stride_qb, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs,
    stride_vh, stride_tb, stride_k_scale, stride_v_scale,
    stride_bp, stride_bs, stride_bh, stride_pb, stride_ph,
    group, capacity, num_probes, num_words, listed, recent, sink, scale2, limit,
    PAGE: tl.constexpr, HEAD: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
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
    program = (batch * kv_heads + kv_head) * num_splits + split
    words_ptr += program * num_words
    slots_ptr += program * listed
    table_ptr += batch * stride_tb
    probes_ptr += batch * stride_pb + kv_head * stride_ph
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    buckets_ptr += kv_head * stride_bh

    end = tl.minimum(tl.maximum(tl.load(kv_len_ptr + batch), 0), capacity)
    if recent_of_ptr is not None:
        recent = tl.load(recent_of_ptr + batch)
    sink_end, recent_begin = dense_window(0, end, recent, sink)

    _set_bits(words_ptr, probes_ptr, num_probes, num_words, BS)
    count = _list_window(
        slots_ptr, table_ptr, split, num_splits, sink_end, recent_begin, end, PAGE, BS
    )
    position = split * BS + tl.arange(0, BS)
    slot, bucket = _load_buckets(
        buckets_ptr, table_ptr, position, sink_end, recent_begin, stride_bp, stride_bs, PAGE
    )
    for _ in tl.range(split * BS, recent_begin, num_splits * BS):
        position += num_splits * BS
        next_slot, next_bucket = _load_buckets(  # early, to overlap with the work on this tile
            buckets_ptr, table_ptr, position, sink_end, recent_begin, stride_bp, stride_bs, PAGE
        )
        word = bucket >> 5
        bits = tl.load(words_ptr + word, mask=(bucket >= 0) & (word < num_words), other=0)
        match = (bits >> (bucket & 31)) & 1
        tl.store(slots_ptr + count + tl.cumsum(match, 0) - 1, slot, mask=match > 0)
        count += tl.sum(match, 0)
        slot, bucket = next_slot, next_bucket
    tl.debug_barrier()  # slots are read by other threads than wrote them

    # scores are products with stored keys, and acc is a sum of stored values
    k_scale = load_scale(k_scale_ptr, kv_head, stride_k_scale)
    scale2 *= k_scale
    if limit is not None:
        limit /= k_scale
    o_d = tl.arange(0, BD)
    m_d = o_d < HEAD
    b_q = load_group(q_ptr, batch, kv_head, group, stride_qb, stride_qh, stride_qd, HEAD, BH, BD)
    b_q = queries_of_products(b_q, k_ptr)
    m = tl.full([BH], float("-inf"), tl.float32)
    l = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, BD], tl.float32)
    for n in tl.range(0, count, BN):
        o_n = n + tl.arange(0, BN)
        live = o_n < count
        key = tl.load(slots_ptr + o_n, mask=live, other=0)
        page, offset = (key // PAGE).to(tl.int64), (key % PAGE).to(tl.int64)
        m_tile = live[:, None] & m_d[None, :]
        k_ptrs = k_ptr + (page * stride_kp + offset * stride_ks)[:, None] + o_d[None, :]
        v_ptrs = v_ptr + (page * stride_vp + offset * stride_vs)[:, None] + o_d[None, :]
        b_k = tl.load(k_ptrs, mask=m_tile, other=0.0).to(b_q.dtype)  # [BN, BD]
        b_v = tl.load(v_ptrs, mask=m_tile, other=0.0).to(b_q.dtype)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BH, BN]
        if limit is not None:
            s = cap_scores(s, limit)
        s = tl.where(live[None, :], s, float("-inf"))
        m, l, acc = softmax_step(s, tl.max(s, 1), b_v, m, l, acc, scale2, PRECISION)

    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + batch * kv_heads + kv_head, count.to(tl.int64), sem="relaxed")
    acc *= load_scale(v_scale_ptr, kv_head, stride_v_scale)
    store_split(
        part_max_ptr, part_sum_ptr, part_out_ptr, m, l, acc, batch, kv_head, group, HEAD, BH, BD
    )


@triton.jit
def _set_bits(words_ptr, probes_ptr, num_probes, num_words, BS: tl.constexpr):
    """Writes the bit mask of probed buckets, ``words [num_words]``."""
    o_s = tl.arange(0, BS)
    for first in tl.range(0, num_words, BS):
        tl.store(words_ptr + first + o_s, tl.zeros([BS], tl.int32), mask=first + o_s < num_words)
    tl.debug_barrier()
    for first in tl.range(0, num_probes, BS):
        bucket = tl.load(probes_ptr + first + o_s, mask=first + o_s < num_probes, other=-1)
        word = bucket >> 5
        tl.atomic_or(
            words_ptr + word,
            1 << (bucket & 31),
            mask=(bucket >= 0) & (word < num_words),
            sem="relaxed",
        )
    tl.debug_barrier()


@triton.jit
def _list_window(
    slots_ptr, table_ptr, split, num_splits, sink_end, recent_begin, end, PAGE: tl.constexpr,
    BS: tl.constexpr
):  # fmt: skip
    """Lists the slots of a split's share of the dense window, and returns their number."""
    size = sink_end + end - recent_begin
    share = tl.cdiv(size, num_splits)
    begin = split * share
    count = tl.minimum(tl.maximum(size - begin, 0), share)
    for first in tl.range(0, count, BS):
        o_s = first + tl.arange(0, BS)
        listed = begin + o_s
        position = tl.where(listed < sink_end, listed, recent_begin - sink_end + listed)
        page, offset = load_pages(table_ptr, position, o_s < count, PAGE)
        tl.store(slots_ptr + o_s, page * PAGE + offset, mask=o_s < count)
    return count


@triton.jit
def _load_buckets(
    buckets_ptr,
    table_ptr,
    position,
    sink_end,
    recent_begin,
    stride_bp,
    stride_bs,
    PAGE: tl.constexpr,
):
    """Returns slots and buckets of positions; the bucket is -1 in the dense window and after it."""
    live = (position >= sink_end) & (position < recent_begin)
    page, offset = load_pages(table_ptr, position, live, PAGE)
    bucket_ptrs = buckets_ptr + page.to(tl.int64) * stride_bp + offset.to(tl.int64) * stride_bs
    bucket = tl.load(bucket_ptrs, mask=live, other=-1).to(tl.int32)
    return page * PAGE + offset, bucket

"""Decoding step of Multi-Token Attention: the newest query over a long cache.

The result is the last row of :mod:`msattn.kernels.multi_token.conv_attention.operation`. Let
``q_a`` be the last c_q queries, of which ``q_(c_q - 1)`` is the newest, at position i, and
``p = (c_k - 1) // 2``::

    A[j] = sum_c U_c[j - p + c]
    U_c[k'] = sum of W[a, c] scale * q_a . k_k' over the a with k' <= i - (c_q - 1) + a
              (with mask="key" over all a)
    out  = softmax over keys j <= i of A[j], times v_j

The weights are applied to the queries, ``x_c = sum_a W[a, c] q_a``, so that ``U_c = x_c . k`` is a
single product for all taps (columns c of the kernel). The columns of U must then be shifted against
each other along the keys. To shift within a thread, a program processes 32 streams, each a
contiguous range of keys, at two keys per step. One thread holds all taps of a stream and head: it
adds tap c to the result c keys away, which is completed in the same step, or kept in registers
until a later one. Only the c_k - 1 keys after a stream are read twice, so that the memory traffic
is that of dense decoding: keys and values once. The alternatives are slower: products with shifted
keys read each key c_k times, and shifting tiles of U through shared memory or between threads takes
longer than reading the keys.

With ``mask="query"`` some ``q_a`` count as 0 for the last c_q - 1 keys. The results that involve
these keys, or keys past the end, are computed by a separate program, which multiplies shifted keys
by the unweighted queries.

Tiles: four heads of a group; BA queries, BC taps; BW streams of two keys, BN keys in total; BD head
size. Four copies of the heads fill the 16 rows that ``tl.dot`` needs. Prefixes: b_ tile, o_ offset,
m_ mask. Grid: (split and head block, key/value head, sequence), where split 0 computes the results
at the end of the keys; then the merge kernel.
"""

from typing import Any

from torch import Tensor

from msattn.kernels.common.checks import (
    check_per_sequence,
    check_qkv,
    check_splits,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.primitives import (
    LOG2_E,
    num_sms,
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    tl,
    triton,
)
from msattn.kernels.common.registration import register_op
from msattn.kernels.common.splits import Parts, choose_splits
from msattn.kernels.multi_token.checks import check_convolution, key_taps_before
from msattn.kernels.multi_token.reference import conv_decode as reference
from msattn.kernels.types import Backend, ConvMask

STREAMS = 32  # 4 warps of 8 rows: one thread then holds the taps of a stream and head
# fp32 products are three TF32 products, accurate to about 21 bits. With "ieee" (CUDA cores), Triton
# 3.6 returns wrong products for 8 and 32 columns of taps.
PRECISION = "tf32x3"


def conv_decode(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    mask: ConvMask = "query",
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Computes the last row of ``conv_attention`` on the same sequence.

    Parameters
    ----------
    q_window : Tensor ``[B, Hq, c_q, D]``
        The newest c_q queries, the last one at position ``kv_len - 1``; fp32, fp16 or bf16 (fp64 on
        the torch backend).
        Queries before the start of a sequence count as 0.
    k, v : Tensor ``[B, Hkv, M, D]``
        The cache; query head h reads head ``h // (Hq // Hkv)``. Strided views are not copied.
    weight : Tensor ``[Hq, c_q, c_k]``
        One convolution kernel per head, up to 32 x 32, in q_window's dtype or fp32.
    mask : {"query", "key"}
        Scores that count as 0, as in ``conv_attention``: for keys after their own query, or none in
        the cache.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
    kv_len : Tensor int32 ``[B]``, optional
        Number of filled positions among the M, padding included; all by default.
    splits : int, optional
        Number of parts that the keys of a sequence are divided into; by default chosen from shapes
        and GPU.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor ``[B, Hq, 1, D]``
        0 for a sequence without keys.

    Raises
    ------
    ValueError
        If an argument is invalid. Lengths are checked only by the reference; the kernel reads only
        inside the cache.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    check_qkv(q_window, k, v)
    check_convolution(weight, mask, q_window)
    check_per_sequence(q_window, kv_start=kv_start, kv_len=kv_len)
    check_splits(splits)
    if q_window.shape[2] != weight.shape[1]:
        raise ValueError(
            f"q_window.shape={tuple(q_window.shape)}: expected {weight.shape[1]} queries, as "
            f"weight.shape={tuple(weight.shape)}"
        )
    scale = resolve_scale(scale, q_window.shape[3])
    backend = resolve_backend(backend, q_window, "q_window")
    return _operator(q_window, k, v, weight, kv_start, kv_len, scale, mask, splits, backend)


def launch(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    scale: float,
    mask: str,
    splits: int | None,
) -> Tensor:
    """Launches both kernels.

    The grid depends only on shapes, so that a captured CUDA graph serves any lengths.
    """
    batch, q_heads, window, head = q_window.shape
    kv_heads, num_keys = k.shape[1:3]
    group, taps, cols = q_heads // kv_heads, weight.shape[2], padded_head(head)
    head_blocks = triton.cdiv(group, 4)
    # Pipeline stages and programs per SM, by the bytes of a head. For 64 columns four programs fit,
    # but three split better.
    stages, programs = (max(1, min(3, size // (cols * k.element_size()))) for size in (1024, 512))
    blocks, concurrent = batch * kv_heads * head_blocks, programs * num_sms(q_window.device)
    taps_width = max(4, triton.next_power_of_2(taps))
    # Products keep the weighted queries of four heads in shared memory, of fp32 two parts; where
    # they do not fit, one program multiplies the queries by every key.
    streamed = taps_width * cols * k.element_size() <= 16384
    splits = 1 + streamed * (
        splits
        or choose_splits(
            blocks,
            concurrent,
            triton.cdiv(num_keys, 128),
            efficiency=0.97,
            saturation=0.9,
            extra_tiles=4,
        )
    )

    parts = Parts.empty(q_window, splits)
    _split_conv_decode_kernel[(splits * head_blocks, kv_heads, batch)](
        q_window, k, v, weight.contiguous(), kv_start, kv_len, *parts,
        *q_window.stride(), *k.stride(), *v.stride(),
        group, head_blocks, num_keys, key_taps_before(weight), scale * LOG2_E,
        HEAD=head, WINDOW=window, TAPS=taps, BA=max(4, triton.next_power_of_2(window)),
        BC=taps_width, BW=STREAMS, BD=cols, PRECISION=PRECISION,
        KEY_MASK=mask == "key", STREAMED=streamed, num_warps=4, num_stages=stages,
        **pdl_args(q_window.device),
    )  # fmt: skip
    return parts.merged(q_window.dtype)[0]


def _empty(q_window: Tensor, *others: Any) -> Tensor:
    return q_window.new_empty((*q_window.shape[:2], 1, q_window.shape[3]))


_operator = register_op(
    "conv_decode",
    launch,
    reference.conv_decode,
    _empty,
    no_gradient="use conv_attention, or torch.no_grad()",
)


@triton.jit(do_not_specialize=["group", "head_blocks", "num_keys", "before"])
def _split_conv_decode_kernel(
    q_ptr, k_ptr, v_ptr, weight_ptr, kv_start_ptr,
    kv_len_ptr, part_max_ptr, part_sum_ptr, part_out_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_km, stride_kd,
    stride_vb, stride_vh, stride_vm, stride_vd,
    group, head_blocks, num_keys, before, scale2,
    HEAD: tl.constexpr, WINDOW: tl.constexpr, TAPS: tl.constexpr,
    BA: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr, KEY_MASK: tl.constexpr, STREAMED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes ``part_out [B, Hq, S, D]``, maxima (base 2) and sums of four heads."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    split, head_block = tl.program_id(0) // head_blocks, tl.program_id(0) % head_blocks
    num_splits = tl.num_programs(0) // head_blocks
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.maximum(tl.load(kv_start_ptr + batch), 0) if kv_start_ptr is not None else 0
    end = tl.minimum(tl.load(kv_len_ptr + batch), num_keys) if kv_len_ptr is not None else num_keys
    oldest = end - WINDOW  # position of the window's first query
    seen = end - 1 if KEY_MASK else oldest  # last key whose scores with all queries count
    # first result that involves a later key
    tail = tl.maximum(seen + 1 - (TAPS - 1 - before), start) if STREAMED else start

    m_d = tl.arange(0, BD) < HEAD
    q_ptr += batch * stride_qb + kv_head * group * stride_qh
    weight_ptr += kv_head * group * WINDOW * TAPS
    k_ptr += batch * stride_kb + kv_head * stride_kh + tl.arange(0, BD)[None, :] * stride_kd
    v_ptr += batch * stride_vb + kv_head * stride_vh + tl.arange(0, BD)[None, :] * stride_vd
    if split == 0 or not STREAMED:
        m, l, acc = _tail_keys(
            q_ptr, k_ptr, v_ptr, weight_ptr, stride_qh, stride_qn, stride_qd, stride_km, stride_vm,
            group, head_block, before, start, end, oldest, tail, scale2, HEAD, WINDOW, TAPS, BA, BD,
            PRECISION, KEY_MASK,
        )  # fmt: skip
    else:
        m, l, acc = _stream_keys(
            q_ptr, k_ptr, v_ptr, weight_ptr, stride_qh, stride_qn, stride_qd, stride_km, stride_vm,
            group, head_block, before, start, tail, split - 1, num_splits - 1, scale2,
            HEAD, WINDOW, TAPS, BC, BW, BD, PRECISION,
        )  # fmt: skip

    head, row = head_block * 4 + tl.arange(0, 4), tl.arange(0, 16)
    part = (batch * tl.num_programs(1) + kv_head) * group * num_splits + split
    tl.store(part_max_ptr + part + head * num_splits, m, mask=head < group)
    tl.store(part_sum_ptr + part + head * num_splits, l, mask=head < group)
    out_ptrs = (
        part_out_ptr
        + (part + (head_block * 4 + row) * num_splits)[:, None] * HEAD
        + tl.arange(0, BD)[None, :]
    )
    tl.store(
        out_ptrs, acc, mask=((row < 4) & (head_block * 4 + row < group))[:, None] & m_d[None, :]
    )


@triton.jit
def _stream_keys(
    q_ptr, k_ptr, v_ptr, weight_ptr, stride_qh, stride_qn, stride_qd, stride_km, stride_vm,
    group, head_block, before, start, tail, split, num_splits, scale2,
    HEAD: tl.constexpr, WINDOW: tl.constexpr, TAPS: tl.constexpr,
    BC: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Processes a split of the results before ``tail``, in BW streams."""
    BN: tl.constexpr = 2 * BW
    length = tl.cdiv(tl.maximum(tail - start, 0), num_splits * BN) * 2
    first = start + split * length * BW
    x = _weighted_queries(
        q_ptr,
        weight_ptr,
        stride_qh,
        stride_qn,
        stride_qd,
        group,
        head_block,
        HEAD,
        WINDOW,
        TAPS,
        BC,
        BD,
    )

    m_d, o_tile = tl.arange(0, BD) < HEAD, tl.arange(0, BN)
    # in the row order of the product
    key = first + (o_tile // 16 * 8 + o_tile % 8) * length + o_tile // 8 % 2 - before
    key_end = tail + (TAPS - 1 - before)
    place = o_tile % 2 - (TAPS - 1)  # place in the stream of the result that a key completes
    result = first + o_tile // 2 * length + place
    place_end = tl.minimum(length, tail - result + place)
    k_ptrs, v_ptrs = (
        k_ptr + key.to(tl.int64)[:, None] * stride_km,
        v_ptr + result.to(tl.int64)[:, None] * stride_vm,
    )
    o_term = tl.arange(0, 2 * BC)  # key of the step, tap
    # results from the first one completed
    ahead = tl.where(o_term % BC < TAPS, o_term // BC + TAPS - 1 - o_term % BC, -1)

    pending = (tl.zeros([BW, 4], tl.float32),) * (TAPS - 1)
    m = tl.full([4], float("-inf"), tl.float32)
    l, acc = tl.zeros([4, BN], tl.float32), tl.zeros([16, BD], tl.float32)
    for n in tl.range(0, tl.where(first < tail, length + TAPS - 1, 0), 2):
        m_key = (key + n >= start) & (key + n < key_end)
        b_k = tl.load(k_ptrs, mask=m_key[:, None] & m_d[None, :], other=0.0)
        u = tl.dot(b_k, tl.trans(x), input_precision=PRECISION)  # [BN, 4 * BC]
        u = tl.permute(tl.reshape(u, [BW // 8, 2, 8, BC // 2, 4, 2]), [0, 2, 4, 1, 3, 5])
        u = tl.reshape(u, [BW, 4, 2 * BC])
        sums = ()
        for d in tl.static_range(TAPS + 1):
            # The mask is a compile-time constant, and adding -0.0 is an identity, so that the
            # compiler drops most additions.
            total = tl.sum(tl.where((ahead == d)[None, None, :], u, -0.0), 2)
            if d < TAPS - 1:
                total += pending[d]
            sums = sums + (total,)  # noqa: RUF005
        pending = sums[2:]
        s = tl.reshape(tl.permute(tl.join(sums[0], sums[1]), [1, 0, 2]), [4, BN])  # pyrefly: ignore[bad-index]

        live = (place + n >= 0) & (place + n < place_end)
        b_v = tl.load(v_ptrs, mask=live[:, None] & m_d[None, :], other=0.0)
        m, l, acc = _softmax_step(s, live, b_v, m, l, acc, scale2, BN, PRECISION)
        k_ptrs += 2 * stride_km
        v_ptrs += 2 * stride_vm
    return m, tl.sum(l, 1), acc


@triton.jit
def _weighted_queries(
    q_ptr, weight_ptr, stride_qh, stride_qn, stride_qd, group, head_block,
    HEAD: tl.constexpr, WINDOW: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Returns ``x [4 * BC, BD]``, the queries weighted by the taps.

    The order of rows puts the taps of a head, which are columns of the product, into one thread.
    """
    row, o_d = tl.arange(0, 4 * BC), tl.arange(0, BD)
    column, head = row // 8 * 2 + row % 2, head_block * 4 + row // 2 % 4
    m_row = (head < group) & (column < TAPS)
    head = tl.minimum(head, group - 1)
    q_ptrs = q_ptr + head[:, None] * stride_qh + o_d[None, :] * stride_qd
    x = tl.zeros([4 * BC, BD], tl.float32)
    for a in tl.static_range(WINDOW):
        w = tl.load(weight_ptr + (head * WINDOW + a) * TAPS + column, mask=m_row, other=0.0).to(
            tl.float32
        )
        x += w[:, None] * tl.load(q_ptrs + a * stride_qn, mask=(o_d < HEAD)[None, :], other=0.0).to(
            tl.float32
        )
    return x.to(q_ptr.dtype.element_ty)


@triton.jit
def _tail_keys(
    q_ptr, k_ptr, v_ptr, weight_ptr, stride_qh, stride_qn, stride_qd, stride_km, stride_vm,
    group, head_block, before, start, end, oldest, tail, scale2,
    HEAD: tl.constexpr, WINDOW: tl.constexpr, TAPS: tl.constexpr,
    BA: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    KEY_MASK: tl.constexpr,
):  # fmt: skip
    """Processes the results from ``tail`` on by one product per tap.

    A query contributes only to scores of keys that it sees, with the key mask to all.
    """
    row, o_d = tl.arange(0, 4 * BA), tl.arange(0, BD)
    m_d = o_d < HEAD
    a, head = row % BA, head_block * 4 + row // BA
    m_row = (head < group) & (a < WINDOW) & (oldest + a >= start)
    q_ptrs = q_ptr + (head * stride_qh + a * stride_qn)[:, None] + o_d[None, :] * stride_qd
    b_q = tl.load(q_ptrs, mask=m_row[:, None] & m_d[None, :], other=0.0)
    weight_ptrs = weight_ptr + (head * WINDOW + a) * TAPS

    m = tl.full([4], float("-inf"), tl.float32)
    l, acc = tl.zeros([4, 64], tl.float32), tl.zeros([16, BD], tl.float32)
    for first in tl.range(tail, end, 64):
        j = first + tl.arange(0, 64)
        s = tl.zeros([64, 4], tl.float32)
        for c in tl.range(0, TAPS):
            key = j - before + c
            m_key = (key >= start) & (key < end)
            b_k = tl.load(
                k_ptr + key.to(tl.int64)[:, None] * stride_km,
                mask=m_key[:, None] & m_d[None, :],
                other=0.0,
            )
            w = tl.load(weight_ptrs + c, mask=m_row, other=0.0).to(tl.float32)
            each = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [64, 4 * BA]
            each = tl.where(
                (key[:, None] <= (oldest + a)[None, :]) | KEY_MASK, each * w[None, :], 0.0
            )
            s += tl.sum(tl.reshape(each, [64, 4, BA]), 2)
        live = j < end
        b_v = tl.load(
            v_ptr + j.to(tl.int64)[:, None] * stride_vm,
            mask=live[:, None] & m_d[None, :],
            other=0.0,
        )
        m, l, acc = _softmax_step(tl.trans(s), live, b_v, m, l, acc, scale2, 64, PRECISION)
    return m, tl.sum(l, 1), acc


@triton.jit
def _softmax_step(s, live, b_v, m, l, acc, scale2, BN: tl.constexpr, PRECISION: tl.constexpr):
    """Updates the online softmax with ``s [4, BN]``, copied to fill the 16 dot rows."""
    s = tl.where(live[None, :], s * scale2, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
    p, alpha = tl.exp2(s - base[:, None]), tl.exp2(m - base)
    rows = tl.reshape(tl.broadcast_to(p.to(b_v.dtype)[None, :, :], [4, 4, BN]), [16, BN])
    alphas = tl.reshape(tl.broadcast_to(alpha[None, :], [4, 4]), [16])
    return (
        m_new,
        l * alpha[:, None] + p,
        tl.dot(rows, b_v, acc * alphas[:, None], input_precision=PRECISION),
    )

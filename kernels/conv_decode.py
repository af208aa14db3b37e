"""The newest query of :mod:`msattn.kernels.conv_attention` over a long cache (Multi-Token Attention while decoding).

With the last c_q queries ``q_a``, of which ``a = c_q - 1`` is the newest, at position i, and ``p = (c_k - 1) // 2``::

    A[j] = sum_c U_c[j - p + c]         U_c[k'] = sum of W[a, c] scale * q_a . k_k' over the a with k' <= i - (c_q - 1) + a
    out  = softmax over keys j <= i of A[j], times v_j

Weights move into the queries, ``x_c = sum_a W[a, c] q_a``, so that ``U_c = x_c . k``: a tile of rows (head of a query group,
column c of its kernel) meets each key once, on tensor cores; the rows then shift against each other along the keys and are
added up. A tile of BN keys gives ``BN - c_k + 1`` results; the rest is read twice, the second time from the L2 cache. So the
bytes are those of dense decoding, keys and values once. Other ways: raw scores, c_q rows a head, would shift c_k times;
products with shifted keys would read each key c_k times. Only for the last c_q - 1 keys do some ``q_a`` count as 0: one dot a
query there.

Tiles: HB heads of a group, BC columns (HB * BC rows), BN keys, BD head size; COPIES of each head make up 16 rows of output.
Prefix: b_ tile. Programs: (split and head block, key/value head, sequence), then (query head of a sequence).
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.checks import check_conv_decode, key_taps_before, resolve_backend, resolve_scale
from msattn.kernels.primitives import LOG2_E, num_processors, padded_head, precision, softmax_step, tl, triton
from msattn.kernels.splits import SPLITS_AT_ONCE, choose_splits, merge_kernel
from msattn.kernels.types import Backend


def conv_decode(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """One decoding step of attention with convolved scores: the last row of ``conv_attention`` on the same sequence.

    Parameters
    ----------
    q_window : Tensor ``[B, Hq, c_q, D]``
        The newest c_q queries, the last one at position ``kv_len - 1``; fp32, fp16 or bf16 (fp64 on the torch backend). Those
        before the start of a sequence count as 0.
    k, v : Tensor ``[B, Hkv, M, D]``
        The cache; query head h reads head ``h // (Hq // Hkv)``. Strided views are read as they are.
    weight : Tensor ``[Hq, c_q, c_k]``
        A kernel for each head, up to 32 x 32, of q_window's dtype or fp32.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
    kv_len : Tensor int32 ``[B]``, optional
        How many of the M positions are filled, padding included; all by default.
    splits : int, optional
        Parts that the keys of a sequence are divided into; by default as many as fill the GPU.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor ``[B, Hq, 1, D]``
        0 for a sequence without keys.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name. Lengths are checked by the reference alone; the kernel never leaves the cache.
    NotImplementedError
        In the backward pass: this is for inference.
    """
    check_conv_decode(q_window, k, v, weight, kv_start, kv_len, splits)
    scale = resolve_scale(scale, q_window.shape[3])
    backend = resolve_backend(backend, q_window, "q_window")
    return _operator(q_window, k, v, weight, kv_start, kv_len, scale, splits, backend)


@torch.library.custom_op("msattn::conv_decode", mutates_args=())
def _operator(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    scale: float,
    splits: int | None,
    backend: str,
) -> Tensor:
    if backend == "triton":
        with torch.cuda.device_of(q_window):
            return launch(q_window, k, v, weight, kv_start, kv_len, scale, splits)
    return reference.conv_decode(q_window, k, v, weight, scale=scale, kv_start=kv_start, kv_len=kv_len)


@_operator.register_fake
def _(q_window, k, v, weight, kv_start, kv_len, scale, splits, backend):
    return q_window.new_empty((*q_window.shape[:2], 1, q_window.shape[3]))


def _backward(ctx, dout):
    raise NotImplementedError("conv_decode is for inference and has no gradient: use conv_attention, or torch.no_grad()")


_operator.register_autograd(_backward)


def launch(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    scale: float,
    splits: int | None,
) -> Tensor:
    """Run both kernels. The grid follows shapes alone, so that a captured graph serves any lengths."""
    batch, q_heads, window, head = q_window.shape
    kv_heads, num_keys = k.shape[1:3]
    group, taps, cols = q_heads // kv_heads, weight.shape[2], padded_head(head)
    full = q_window.dtype == torch.float32  # on CUDA cores
    columns, rows = triton.next_power_of_2(taps), 16 if full else 64
    heads = max(1, min(triton.next_power_of_2(group), rows // columns))
    columns = max(columns, 16 // heads)  # of the 16 rows that a dot wants
    head_blocks = triton.cdiv(group, heads)
    keys = 64 if taps <= 16 else 128
    stages = 1 if full else max(1, min(3, 256 * 128 // (keys * cols)))  # two programs fit a multiprocessor
    slots = 2 * num_processors(q_window.device)
    splits = splits or choose_splits(batch * kv_heads * head_blocks, slots, triton.cdiv(num_keys, keys))

    part_out = q_window.new_empty((batch, q_heads, splits, head), dtype=torch.float32)
    part_max, part_sum = (torch.empty_like(part_out[..., 0]) for _ in range(2))
    _split_kernel[(splits * head_blocks, kv_heads, batch)](
        q_window, k, v, weight.contiguous(), kv_start, kv_len, part_max, part_sum, part_out,
        *q_window.stride(), *k.stride(), *v.stride(),
        group, head_blocks, num_keys, window, taps, key_taps_before(weight), scale * LOG2_E,
        HEAD=head, HB=heads, BC=columns, COPIES=max(1, 16 // heads), BN=keys, BD=cols, PRECISION=precision(q_window.dtype),
        num_warps=8 if full else 4, num_stages=stages,
    )  # fmt: skip
    out = q_window.new_empty((batch, q_heads, 1, head))
    lse = q_window.new_empty((batch, q_heads, 1), dtype=torch.float32)
    merge_kernel[(batch * q_heads,)](
        part_max, part_sum, part_out, out, lse, splits,
        HEAD=head, BS=SPLITS_AT_ONCE, BD=cols, REBASE=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["group", "head_blocks", "num_keys", "window", "taps", "before"])
def _split_kernel(
    q, k, v, weight, kv_start, kv_len, part_max, part_sum, part_out,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_km, stride_kd,
    stride_vb, stride_vh, stride_vm, stride_vd,
    group, head_blocks, num_keys, window, taps, before, scale2,
    HEAD: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr, COPIES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some heads' attention to one split of the keys: ``part_out [B, Hq, S, D]``, and its maxima (base 2) and sums."""
    split, head_block = tl.program_id(0) // head_blocks, tl.program_id(0) % head_blocks
    num_splits = tl.num_programs(0) // head_blocks
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.maximum(tl.load(kv_start + batch), 0) if kv_start is not None else 0
    end = tl.minimum(tl.load(kv_len + batch), num_keys) if kv_len is not None else num_keys
    share = tl.cdiv(tl.maximum(end - start, 0), num_splits)
    first = start + split * share
    stop = tl.minimum(first + share, end)
    oldest = end - window  # position of the window's first query; keys after it miss some queries

    o_row, o_d, o_key = tl.arange(0, HB * BC), tl.arange(0, BD), tl.arange(0, BN)
    m_d = o_d < HEAD
    column, head = o_row % BC, head_block * HB + o_row // BC
    m_row = (head < group) & (column < taps)
    head = kv_head * group + tl.minimum(head, group - 1)
    p_q = q + batch * stride_qb + head[:, None] * stride_qh + o_d[None, :] * stride_qd
    p_weight = weight + head * window * taps + column
    k += batch * stride_kb + kv_head * stride_kh + o_d[None, :] * stride_kd
    v += batch * stride_vb + kv_head * stride_vh + o_d[None, :] * stride_vd

    x = tl.zeros([HB * BC, BD], tl.float32)
    for a in tl.range(0, window):
        w = tl.load(p_weight + a * taps, mask=m_row & (oldest + a >= start), other=0.0).to(tl.float32)
        x += w[:, None] * tl.load(p_q + a * stride_qn, mask=m_d[None, :], other=0.0).to(tl.float32)
    x = x.to(q.dtype.element_ty)

    m = tl.full([COPIES * HB], float("-inf"), tl.float32)
    l = tl.zeros([COPIES * HB], tl.float32)
    acc = tl.zeros([COPIES * HB, BD], tl.float32)
    shifted = tl.minimum(column[:, None] + o_key[None, :], BN - 1)
    results = BN - taps + 1
    # Only tiles that reach past the window's first query need more: a loop of their own leaves the other one pipelined.
    early_stop = first + tl.maximum(tl.minimum(stop, oldest + 2 + before - BN) - first + results - 1, 0) // results * results
    for j0 in tl.range(first, early_stop, results):
        key = j0 - before + o_key
        m_key = (key >= start) & (key < end)
        b_k = tl.load(k + key.to(tl.int64)[:, None] * stride_km, mask=m_key[:, None] & m_d[None, :], other=0.0)  # [BN, BD]
        u = tl.dot(x, tl.trans(b_k), input_precision=PRECISION)  # [HB * BC, BN]
        m, l, acc = _add_tile(
            u, shifted, v, j0, results, stop, stride_vm, m_d, m, l, acc, scale2, HB, BC, COPIES, BN, PRECISION
        )  # fmt: skip
    for j0 in tl.range(early_stop, stop, results, num_stages=1):
        key = j0 - before + o_key
        m_key = (key >= start) & (key < end)
        b_k = tl.load(k + key.to(tl.int64)[:, None] * stride_km, mask=m_key[:, None] & m_d[None, :], other=0.0)
        u = tl.dot(x, tl.trans(b_k), input_precision=PRECISION)
        late = tl.zeros([HB * BC, BN], tl.float32)
        for a in tl.range(0, window):
            w = tl.load(p_weight + a * taps, mask=m_row & (oldest + a >= start), other=0.0).to(tl.float32)
            b_q = tl.load(p_q + a * stride_qn, mask=m_d[None, :], other=0.0)
            s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            late += tl.where((key <= oldest + a)[None, :], w[:, None] * s, 0.0)
        u = tl.where((key > oldest)[None, :], late, u)
        m, l, acc = _add_tile(
            u, shifted, v, j0, results, stop, stride_vm, m_d, m, l, acc, scale2, HB, BC, COPIES, BN, PRECISION
        )  # fmt: skip

    copy = tl.arange(0, COPIES * HB)
    head = head_block * HB + copy
    m_head = (copy < HB) & (head < group)
    part = ((batch * tl.num_programs(1) + kv_head) * group + head) * num_splits + split
    tl.store(part_max + part, m, mask=m_head)
    tl.store(part_sum + part, l, mask=m_head)
    tl.store(part_out + part[:, None] * HEAD + o_d[None, :], acc, mask=m_head[:, None] & m_d[None, :])


@triton.jit
def _add_tile(
    u, shifted, v, j0, results, stop, stride_vm, m_d, m, l, acc, scale2,
    HB: tl.constexpr, BC: tl.constexpr, COPIES: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shift the rows ``u [HB * BC, BN]`` against each other, add them up and step the softmax by keys ``j0`` and on."""
    o_key = tl.arange(0, BN)
    s = tl.sum(tl.reshape(tl.gather(u, shifted, 1), [HB, BC, BN]), 1)
    j = j0 + o_key
    live = (o_key < results) & (j < stop)
    s = tl.where(live[None, :], s, float("-inf"))
    s = tl.reshape(tl.broadcast_to(tl.reshape(s, [1, HB, BN]), [COPIES, HB, BN]), [COPIES * HB, BN])
    b_v = tl.load(v + j.to(tl.int64)[:, None] * stride_vm, mask=live[:, None] & m_d[None, :], other=0.0)  # [BN, BD]
    return softmax_step(s, tl.max(s, 1), b_v, m, l, acc, scale2, PRECISION)

"""Block-sparse attention (SeerAttention, section 3.2), forward pass.

    out_i = softmax over keys j in the True blocks of i's row block (and j <= i if causal) of (scale
    * q_i k_j), times v_j

The mask is first compacted on the device (:mod:`msattn.kernels.common.block_lists`): for each row
block, the column blocks to read, full blocks before those on the diagonal or at the end of the
keys. One program owns one row block and iterates over its list, so that the cost is proportional to
the number of selected blocks. The backward pass is in
:mod:`msattn.kernels.block_sparse_attention.backward`.

A tile has BM queries, a row block, and BN keys: a block of KEYS keys, an even part of one, or
several from the list, so that products of small blocks fill the tensor cores. Descriptors load
tiles within a block; those of several blocks are gathered by the addresses of their keys, full
blocks first, so that only the last tiles need a mask.
"""

import torch
from torch import Tensor

from msattn.kernels.block_sparse_attention import backward
from msattn.kernels.common.block_checks import check_block_mask, resolve_key_block_size
from msattn.kernels.common.block_lists import (
    compact_parts,
    find_list,
    listed_keys,
    listed_runs,
    run_keys,
)
from msattn.kernels.common.checks import (
    check_layout,
    check_per_sequence,
    check_qkv,
    query_offset,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
)
from msattn.kernels.common.primitives import (
    LOG2_E,
    load_rows,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    sequence_span,
    softmax_finalize,
    softmax_step,
    store_rows,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.common.registration import register_attention
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.reference import block_sparse_attention as reference
from msattn.kernels.types import Backend, SparseAttention


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    block_size: int = 64,
    key_block_size: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes attention over the blocks that a mask selects (SeerAttention, 3.2).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Non-contiguous views are supported.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    block_mask : Tensor bool ``[B | 1, Hq | Hkv | 1, Tr, Tc]``
        ``Tr = ceil(N / block_size)``, ``Tc = ceil(M / key_block_size)``. True selects the block.
        The causal and padding masks apply within it; blocks above the diagonal are not read. Or
        bits, int32 ``[B | 1, Hq | Hkv | 1, Tr, ceil(Tc / 32)]``: block c is bit ``c % 32``, from
        the lowest, of word ``c // 32``.
    block_size : int
        Queries in a block: 16, 32, 64 or 128.
    key_block_size : int, optional
        Keys in a block, of the same choice; ``block_size`` by default.
    causal : bool
        Query i has position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before
        masking (Gemma 2).
    kv_start : Tensor int32 ``[B]``, optional
        Length of the left padding of each sequence. Blocks are counted from its end.
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` (natural logarithm, fp32); 0 and -inf for rows
        that read no key.
        Both are differentiable in q, k, v.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value; the message names it.
    """
    check_qkv(q, k, v)
    key_block_size = resolve_key_block_size(block_size, key_block_size)
    check_block_mask(block_mask, q, k, block_size, key_block_size)
    check_per_sequence(q, kv_start=kv_start)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    arguments = (
        q,
        k,
        v,
        block_mask,
        kv_start,
        block_size,
        key_block_size,
        causal,
        scale,
        softcap,
        backend,
    )
    return SparseAttention(*_operator(*arguments))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    key_block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels."""
    check_layout(q=q, k=k, v=v)
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    tile = tuned_tile("block_sparse_attention", q)
    if key_block_size < tile.keys:
        tile = tuned_tile("block_sparse_attention_gathered", q)
    rows, keys = block_size, tile.keys
    offset = query_offset(num_queries, num_keys, causal)
    views, strides, steps = (k, v), (*k.stride()[:2], *v.stride()[:2]), (k.stride(2), v.stride(2))
    if key_block_size >= keys:  # descriptors, which have the strides
        views, strides, steps = (tile_view(k, keys), tile_view(v, keys)), (0, 0, 0, 0), (0, 0)
    out = torch.empty_like(q)
    lse = q.new_empty((batch, q_heads, num_queries), dtype=torch.float32)
    sizes = num_queries, num_keys, offset, block_size, key_block_size, causal
    for first_block, lists, lengths in compact_parts(block_mask, kv_start, *sizes):
        list_batch, list_heads, row_blocks, entries = lists.shape
        _block_sparse_attention_kernel[(batch * q_heads * row_blocks,)](
            tile_view(q, rows), *views, out, lse, lists, lengths, kv_start,
            *strides, *out.stride()[:3],
            q_heads // kv_heads, kv_heads, num_queries, num_keys,
            first_block, row_blocks, list_batch, list_heads, entries,
            offset, scale * LOG2_E, unscaled_limit(softcap, scale),
            HEAD=head, COLS=cols, BM=rows, BN=keys, KEYS=key_block_size,
            STRIDE_K=steps[0], STRIDE_V=steps[1], CAUSAL=causal, PRECISION=precision(q.dtype),
            num_warps=tile.warps * max(1, block_size // 64), num_stages=tile.stages,
        )  # fmt: skip
        del lists, lengths  # frees their memory before the next ones are allocated
    return out, lse


_operator, _backward_operator = register_attention(
    "block_sparse_attention",
    launch,
    backward.launch,
    reference.block_sparse_attention,
    reference.block_sparse_attention_backward,
    differentiable=("q", "k", "v"),
    saved=("q", "k", "v", "block_mask", "kv_start", "out", "lse"),
)


# num_queries and num_keys stay specialized: Triton compiles a version for multiples of 16, which is
# 13 % faster.
@triton.jit(
    do_not_specialize=["group", "kv_heads", "first_block", "row_blocks", "list_batch", "list_heads"]
)
def _block_sparse_attention_kernel(
    q_desc, k_view, v_view, out_ptr, lse_ptr, lists_ptr, lengths_ptr, kv_start_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh, stride_on,
    group, kv_heads, num_queries, num_keys, first_block, row_blocks, list_batch, list_heads,
    entries, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEYS: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads of a group are adjacent for L2 reuse; the longest rows come first.
    pid = tl.program_id(0)
    r = row_blocks - 1 - pid // group % row_blocks
    kv_head = pid // (group * row_blocks) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * row_blocks * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    t0 = (first_block + r) * BM
    t = t0 + tl.arange(0, BM)

    list_ptr, full, all_blocks = find_list(
        lists_ptr,
        lengths_ptr,
        b,
        h,
        r,
        kv_heads * group,
        list_batch,
        list_heads,
        row_blocks,
        entries,
    )

    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    RUN: tl.constexpr = min(KEYS, BN)  # adjacent keys of a tile
    if KEYS < BN:  # strides of keys are constants, so that an address takes one instruction
        k_ptr = (
            k_view
            + b.to(tl.int64) * stride_kb
            + kv_head.to(tl.int64) * stride_kh
            + first_key.to(tl.int64) * STRIDE_K
        )
        v_ptr = (
            v_view
            + b.to(tl.int64) * stride_vb
            + kv_head.to(tl.int64) * stride_vh
            + first_key.to(tl.int64) * STRIDE_V
        )
        runs = listed_runs(list_ptr, 0, KEYS, BN, RUN)
    for n in tl.range(0, tl.cdiv(all_blocks * KEYS, BN)):  # type: ignore[misc]
        if KEYS < BN:
            u = tl.minimum(run_keys(runs, RUN), keys - 1).to(tl.int64)  # type: ignore[unbound]
            k = load_rows(k_ptr + u * STRIDE_K, HEAD, COLS)  # type: ignore[unbound]
        else:
            u = tl.load(list_ptr + n * BN // KEYS).to(tl.int32) * KEYS + n * BN % KEYS
            k = load_tile(k_view, b, kv_head, first_key + u, BN, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if limit is not None:
            s = cap_scores(s, limit)
        if n >= full * KEYS // BN:
            s = mask_scores(
                s, t, listed_keys(list_ptr, n, all_blocks, keys, KEYS, BN, RUN), keys, delta, CAUSAL
            )
        if KEYS < BN:
            v = load_rows(v_ptr + u * STRIDE_V, HEAD, COLS)  # type: ignore[unbound]
            runs = listed_runs(list_ptr, n + 1, KEYS, BN, RUN)
        else:
            v = load_tile(v_view, b, kv_head, first_key + u, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_finalize(m, l, acc, t < queries)
    store_rows(out_ptr, lse_ptr, out, lse2, b, h, t, first_query, kv_heads * group, num_queries,
               stride_ob, stride_oh, stride_on, HEAD, COLS)  # fmt: skip

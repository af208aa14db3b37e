"""Block-sparse attention of packed queries over a paged cache, for chunked prefill.

As in :mod:`msattn.kernels.block_sparse_attention`, the mask is compacted into lists on the device,
and one program owns a row block of a head and iterates over its list; without a mask it iterates
over all blocks that it sees. Sequences of a batch differ in length, so that each program reads its
bounds, and those past the end of their sequence leave at once.

A tile has BM queries and BN keys, a part of a block or several blocks. If its keys are in one block
and one page, descriptors load the tiles of full blocks, as for contiguous keys. Other tiles are
gathered by the addresses of their keys, as slots of the last page may not be filled; the page is
looked up for each run of RUN keys, which is a part of a block and of a page.
"""

from math import gcd

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import (
    check_map_shape,
    mask_layout,
    resolve_key_block_size,
)
from msattn.kernels.common.block_lists import (
    compact_packed_rows,
    find_list,
    listed_keys,
    listed_runs,
    repeat_runs,
    run_keys,
    visible_column_blocks,
)
from msattn.kernels.common.checks import (
    check_device,
    check_tensor,
    check_tokens,
    has_aligned_rows,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
)
from msattn.kernels.common.fp8 import head_stride, load_scale, queries_of_products
from msattn.kernels.common.paged_checks import check_paged_keys
from msattn.kernels.common.paged_tiles import packed_span
from msattn.kernels.common.primitives import (
    LN_2,
    LOG2_E,
    load_rows,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    softmax_finalize,
    softmax_step,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.common.registration import USE_NO_GRAD, empty_attention, on_pages, register_op
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.reference import paged as reference
from msattn.kernels.types import Backend, PagedKeys, SparseAttention


def paged_block_sparse_attention(
    q: Tensor,
    cache: PagedKeys,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    *,
    max_queries: int,
    block_size: int = 64,
    key_block_size: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes causal attention of packed queries over the selected blocks of a paged cache.

    Sequences of different lengths share a call, as chunks of prompts do in continuous batching.
    Query i of sequence b has position ``cache.kv_len[b] - n + i``, where n is its number of queries
    in the call. Blocks of queries are counted from the first of them, blocks of keys from position
    0. A block may span several pages, and a page several blocks.

    Parameters
    ----------
    q : Tensor ``[T, Hq, D]``
        Queries of all sequences, one sequence after the other; fp32, fp16 or bf16 (fp64 on the
        torch backend).
    cache : PagedKeys
        Keys and values, the queries' own included. Query head h reads head ``h // (Hq // Hkv)``.
        Not copied.
    cu_queries : Tensor int32 ``[B + 1]``
        Sequence b has the queries ``cu_queries[b] : cu_queries[b + 1]``, possibly none, at most as
        many as keys.
    block_mask : Tensor bool ``[B, Hq | Hkv | 1, Tr, Tc]``
        ``Tr = ceil(max_queries / block_size)``, ``Tc = ceil(pages * page_size / key_block_size)``.
        True selects the block; what is past the end of a sequence or above the diagonal is not
        read. None selects all. Or bits, int32 ``[B, Hq | Hkv | 1, Tr, ceil(Tc / 32)]``, as for
        ``block_sparse_attention``.
    max_queries : int
        Upper bound of the number of queries of a sequence.
    block_size : int
        Queries in a block: 16, 32, 64 or 128.
    key_block_size : int, optional
        Keys in a block, of the same choice; ``block_size`` by default.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before
        masking (Gemma 2).
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    SparseAttention
        ``out [T, Hq, D]``, ``lse [T, Hq]`` (natural logarithm, fp32); 0 and -inf for rows that read
        no key and for rows after the last sequence.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of tensors (offsets, lengths, pages) are checked only
        by the reference.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    if q.dim() != 3 or min(q.shape) < 1:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected packed queries [tokens, heads, head size], each "
            f"at least 1"
        )
    check_tokens("q", q[None])
    check_paged_keys(cache, q.shape[1], q)
    key_block_size = resolve_key_block_size(block_size, key_block_size)
    batch, pages = cache.table.shape
    if max_queries < 1:
        raise ValueError(f"max_queries={max_queries!r}: expected a number of queries, 1 or more")
    check_tensor("cu_queries", cu_queries, torch.int32, (batch + 1,), "q", q)
    if block_mask is not None:
        dtype, cols = mask_layout(block_mask, pages * cache.k.shape[1], key_block_size)
        rows = -(-max_queries // block_size)
        accepted = [(batch,), (q.shape[1], cache.k.shape[2], 1), (rows,), (cols,)]
        check_map_shape("block_mask", block_mask, dtype, accepted)
        check_device("block_mask", block_mask, "q", q)
    scale, softcap = resolve_scale(scale, q.shape[2]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    arguments = (
        q,
        *cache,
        cu_queries,
        block_mask,
        max_queries,
        block_size,
        key_block_size,
        scale,
        softcap,
        backend,
    )
    return SparseAttention(*_operator(*arguments))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    max_queries: int,
    block_size: int,
    key_block_size: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels.

    The grid depends on shapes and ``max_queries`` alone, so that a captured CUDA graph serves any
    lengths up to them.
    """
    num_queries, q_heads, head = q.shape
    batch, page_size, kv_heads = table.shape[0], *k.shape[1:3]
    num_keys = table.shape[1] * page_size
    cols = padded_head(head)
    tile = tuned_tile("paged_block_sparse_attention", q)
    row_blocks = triton.cdiv(max_queries, block_size)
    table = table if table.stride(1) == 1 else table.contiguous()
    lists, lengths, list_heads, entries = None, None, 1, 1
    if block_mask is not None:
        lists, lengths = compact_packed_rows(
            block_mask, cu_queries, kv_len, num_queries, num_keys, block_size, key_block_size
        )
        list_heads, _, entries = lists.shape[1:]

    keys, k_desc, v_desc = tile.keys, None, None
    if (
        key_block_size >= keys
        and page_size % keys == 0
        and has_aligned_rows(k)
        and has_aligned_rows(v)
    ):
        k_desc, v_desc = (tile_view(x.transpose(1, 2), keys) for x in (k, v))
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    _paged_block_sparse_attention_kernel[(batch * q_heads * row_blocks,)](
        q, k, v, k_desc, v_desc, out, lse, table,
        cu_queries, kv_len, k_scale, v_scale, lists, lengths,
        *q.stride(), k.stride(2), v.stride(2), *out.stride(), table.stride(0),
        head_stride(k_scale), head_stride(v_scale),
        q_heads // kv_heads, kv_heads, num_queries,
        num_keys, row_blocks, batch, list_heads, entries,
        scale * LOG2_E, unscaled_limit(softcap, scale),
        HEAD=head, COLS=cols, BM=block_size, BN=keys, KEYS=key_block_size, PAGE=page_size,
        STRIDES_K=k.stride()[:2], STRIDES_V=v.stride()[:2],
        RUN=gcd(page_size, key_block_size, keys), PRECISION=precision(q.dtype), STAGES=tile.stages,
        num_warps=tile.warps * max(1, block_size // 64), num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


_operator = register_op(
    "paged_block_sparse_attention",
    launch,
    on_pages(reference.paged_block_sparse_attention),
    empty_attention,
    no_gradient=USE_NO_GRAD,
)


@triton.jit(
    do_not_specialize=[
        "stride_tb", "group", "kv_heads", "num_queries", "num_keys", "row_blocks", "batch",
        "list_heads",
    ]
)  # fmt: skip
def _paged_block_sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, table_ptr, cu_queries_ptr, kv_len_ptr,
    k_scale_ptr, v_scale_ptr, lists_ptr, lengths_ptr,
    stride_qt, stride_qh, stride_qd, stride_kh, stride_vh,
    stride_ot, stride_oh, stride_od, stride_tb, stride_k_scale, stride_v_scale,
    group, kv_heads, num_queries, num_keys, row_blocks, batch, list_heads, entries, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    STRIDES_K: tl.constexpr, STRIDES_V: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Heads of a group are adjacent for L2 reuse; the longest rows come first.
    pid = tl.program_id(0)
    r = row_blocks - 1 - pid // group % row_blocks
    kv_head = pid // (group * row_blocks) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * row_blocks * kv_heads)
    first_row, keys, queries, delta = packed_span(
        cu_queries_ptr, kv_len_ptr, b, num_queries, num_keys
    )
    t0 = r * BM
    if t0 >= queries:
        return
    t = t0 + tl.arange(0, BM)
    d = tl.arange(0, COLS)
    rows = (first_row + t).to(tl.int64)
    stored = (t < queries)[:, None] & (d < HEAD)[None, :]

    if lists_ptr is not None:
        list_ptr, full, all_blocks = find_list(
            lists_ptr,
            lengths_ptr,
            b,
            h,
            r,
            kv_heads * group,
            batch,
            list_heads,
            row_blocks,
            entries,
        )
    else:
        list_ptr = None
        _, all_blocks, _, full = visible_column_blocks(t0, keys, queries, delta, BM, KEYS, True)

    # scores are products with stored keys, and acc is a sum of stored values
    k_scale = load_scale(k_scale_ptr, kv_head, stride_k_scale)
    scale2 *= k_scale
    if limit is not None:
        limit /= k_scale
    table_ptr += b.to(tl.int64) * stride_tb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    q = tl.load(
        q_ptr + rows[:, None] * stride_qt + h.to(tl.int64) * stride_qh + d[None, :] * stride_qd,
        mask=stored,
        other=0.0,
    )
    q = queries_of_products(q, k_ptr)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    first = 0
    if k_desc is not None:
        first = full * (KEYS // BN)
        for n in tl.range(0, first, num_stages=2 * STAGES - 1):  # type: ignore[misc]  # pages are loaded as far ahead as tiles
            u0 = _first_key(list_ptr, n, KEYS, BN)
            page = tl.load(table_ptr + u0 // PAGE)
            s = tl.dot(
                q,
                tl.trans(load_tile(k_desc, page, kv_head, u0 % PAGE, BN, COLS).to(q.dtype)),
                input_precision=PRECISION,
            )
            if limit is not None:
                s = cap_scores(s, limit)
            v = load_tile(v_desc, page, kv_head, u0 % PAGE, BN, COLS).to(q.dtype)
            m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    runs, pages = _find_pages(list_ptr, table_ptr, first, keys, KEYS, BN, RUN, PAGE)
    # Few tiles are left after those of descriptors.
    stages: tl.constexpr = None if k_desc is None else 1  # type: ignore[assignment]
    for n in tl.range(first, tl.cdiv(all_blocks * KEYS, BN), num_stages=stages):  # type: ignore[misc]
        page = repeat_runs(pages, RUN).to(tl.int64)
        offset = (tl.minimum(run_keys(runs, RUN), keys - 1) % PAGE).to(tl.int64)
        k = load_rows(k_ptr + page * STRIDES_K[0] + offset * STRIDES_K[1], HEAD, COLS)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)  # [BM, BN]
        if limit is not None:
            s = cap_scores(s, limit)
        if n >= full * KEYS // BN:
            s = mask_scores(
                s, t, listed_keys(list_ptr, n, all_blocks, keys, KEYS, BN, RUN), keys, delta, True
            )
        v = load_rows(v_ptr + page * STRIDES_V[0] + offset * STRIDES_V[1], HEAD, COLS).to(q.dtype)
        runs, pages = _find_pages(list_ptr, table_ptr, n + 1, keys, KEYS, BN, RUN, PAGE)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_finalize(m, l, acc, t < queries)
    out *= load_scale(v_scale_ptr, kv_head, stride_v_scale)
    row_ptrs = (
        out_ptr + rows[:, None] * stride_ot + h.to(tl.int64) * stride_oh + d[None, :] * stride_od
    )
    tl.store(row_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(lse_ptr + rows * (kv_heads * group) + h, lse2 * LN_2, mask=t < queries)


@triton.jit
def _find_pages(
    list_ptr,
    table_ptr,
    n,
    keys,
    KEYS: tl.constexpr,
    BN: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Returns the runs of tile n up to the last key, which stands for those after it, and their
    pages.
    """
    runs = tl.minimum(listed_runs(list_ptr, n, KEYS, BN, RUN), keys - 1)
    return runs, tl.load(table_ptr + runs // PAGE)


@triton.jit
def _first_key(list_ptr, n, KEYS: tl.constexpr, BN: tl.constexpr):
    """Returns the first key of tile n of the blocks that a row block reads: those of its list,
    without one all.
    """
    block = n // (KEYS // BN)
    if list_ptr is not None:
        block = tl.load(list_ptr + block).to(tl.int32)
    return block * KEYS + n % (KEYS // BN) * BN

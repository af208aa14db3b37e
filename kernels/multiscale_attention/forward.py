"""Multi-scale attention (multi-scale KV pooling), forward pass.

    out_i = sum_g p_ig v_g / sum_g p_ig
    p_ig  = n_g exp(scale * q_i k_g), with k_g and v_g the means over the n_g keys of group g

The sum is over the groups of z tokens of each block that the row block of query i reads at zoom z.
The factor n_g, added to the score as ``log n_g``, gives a group of equal keys the weight that they
have in dense attention; ``lse`` includes it. A block with keys after some query of the row block is
read at zoom 1, so that no mean contains later keys.

Two kernels run first: one computes the means (:mod:`msattn.kernels.multiscale_attention.levels`),
one lists the blocks of each row block by zoom (:mod:`msattn.kernels.multiscale_attention.lists`).
In the main kernel a program owns one row block. It processes pooled blocks first, in tiles of BP
means. A tile may span several blocks of the list and zooms, so that only the last tile is partial;
each column locates its mean through the list. A tile with a single zoom has one bias for all
columns. Blocks of zoom 1 follow, as in block_sparse_attention. If a share f_z of the blocks is read
at zoom z, the cost is ``sum_z f_z / z`` of the FLOPs and loads of dense attention, plus writing 7/8
of K and V once more.

These alternatives cost more: tiles of one block, which have only 8 tokens at zoom 8 and leave
tensor cores idle; tiles of one zoom, where each of three zooms has a partial tile; blocks in key
order, where each tile needs a bias for each token, about as many instructions as its softmax;
pooling in the main kernel, which repeats it for every row block.

The backward pass is in :mod:`msattn.kernels.multiscale_attention.backward`. A tile has BM = block
queries and BN keys, a whole block or an even part of one, or BP means.
"""

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import check_zoom
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
from msattn.kernels.multiscale_attention import backward
from msattn.kernels.multiscale_attention.levels import (
    add_log_sizes,
    head_means,
    level_ends,
    load_means,
    locate_means,
    pool_means,
)
from msattn.kernels.multiscale_attention.lists import find_row_list, row_lists
from msattn.kernels.reference import multiscale_attention as reference
from msattn.kernels.types import Backend, SparseAttention


def zoom_of_mask(mask: Tensor) -> Tensor:
    """Converts a mask of the paper's 0, 1, 0.5, 0.25 and 0.125 to zooms, uint8: 0, 1, 2, 4 and 8.

    Raises ValueError: another value. Checking reads the values back from the device.
    """
    shares = torch.tensor([0.0, 0.125, 0.25, 0.5, 1.0], device=mask.device)
    values = mask.unique().to(shares.dtype)
    if not torch.isin(values, shares).all():
        raise ValueError(f"mask has the values {values.tolist()[:8]}: expected {shares.tolist()}")
    return torch.where(mask > 0, 1 / mask, 0.0).to(torch.uint8)


def multiscale_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes attention over blocks read at several zooms.

    Source: multi-scale KV pooling, Algorithms 1 to 3.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Non-contiguous views are supported.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    zoom : Tensor uint8 ``[B | 1, Hq | Hkv | 1, ceil(N / block), ceil(M / block)]``
        Number of tokens that are averaged: 1, 2, 4 or 8; 0 skips the block. The last group of a
        sequence may be smaller. With ``causal``, a block that has keys after the first query of the
        row block is read at zoom 1, unless its zoom is 0.
    block_size : int
        Tokens in a block: 16, 32, 64 or 128.
    causal : bool
        Query i has position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before the
        log of the number of tokens is added (Gemma 2).
    kv_start : Tensor int32 ``[B]``, optional
        Length of the left padding of each sequence. Blocks and groups are counted from its end.
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` (natural logarithm of the sum of weights, fp32); 0
        and -inf for rows that read no key. Both are differentiable in q, k, v.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value; the message names it. Only the torch
        backend checks the values of ``zoom``, since the check would synchronize with the GPU;
        kernels skip blocks of another zoom or read them at zoom 1.
    """
    check_qkv(q, k, v)
    check_zoom(zoom, q, k, block_size)
    check_per_sequence(q, kv_start=kv_start)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    return SparseAttention(
        *_operator(q, k, v, zoom, kv_start, block_size, causal, scale, softcap, backend)
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels."""
    check_layout(q=q, k=k, v=v)
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    tile = tuned_tile("multiscale_attention", q)
    rows, keys = block_size, min(block_size, tile.keys)
    lists, counts = row_lists(zoom, kv_start, num_queries, num_keys, block_size, causal)
    row_blocks, col_blocks = lists.shape[2:]

    out = torch.empty_like(q)
    lse = q.new_empty((batch, q_heads, num_queries), dtype=torch.float32)
    _multiscale_attention_kernel[(batch * q_heads * row_blocks,)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys),
        pool_means(k, v, kv_start, block_size), out,
        lse, lists, counts, kv_start, *out.stride()[:3],
        q_heads // kv_heads, kv_heads, num_queries,
        num_keys, row_blocks, col_blocks, *lists.shape[:2],
        query_offset(num_queries, num_keys, causal), scale * LOG2_E, unscaled_limit(softcap, scale),
        HEAD=head, COLS=cols, BM=rows, BN=keys, BP=tile.keys,
        CAUSAL=causal, PRECISION=precision(q.dtype),
        num_warps=tile.warps * max(1, block_size // 64), num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


_operator, _backward_operator = register_attention(
    "multiscale_attention",
    launch,
    backward.launch,
    reference.multiscale_attention,
    reference.multiscale_attention_backward,
    differentiable=("q", "k", "v"),
    saved=("q", "k", "v", "zoom", "kv_start", "out", "lse"),
)


@triton.jit(
    do_not_specialize=["group", "kv_heads", "row_blocks", "col_blocks", "list_batch", "list_heads"]
)
def _multiscale_attention_kernel(
    q_desc, k_desc, v_desc, means_ptr, out_ptr, lse_ptr, lists_ptr,
    counts_ptr, kv_start_ptr, stride_b, stride_h, stride_n,
    group, kv_heads, num_queries, num_keys, row_blocks,
    col_blocks, list_batch, list_heads, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
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
    t0 = r * BM
    t = t0 + tl.arange(0, BM)
    list_ptr, keys8, keys4, keys2, keys1 = find_row_list(
        lists_ptr,
        counts_ptr,
        b,
        h,
        r,
        kv_heads * group,
        list_batch,
        list_heads,
        row_blocks,
        col_blocks,
    )
    means_ptr = head_means(means_ptr, b, kv_head, kv_heads, col_blocks, HEAD, BM)

    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    _, _, pooled = level_ends(keys8, keys4, keys2)
    level, row = locate_means(0, list_ptr, keys8, keys4, keys2, col_blocks, BM, BP)
    for n in tl.range(0, tl.cdiv(pooled, BP)):  # type: ignore[misc]
        k = load_means(means_ptr, row, 0, HEAD, COLS)  # [BP, COLS]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if limit is not None:
            s = cap_scores(s, limit)
        if level == 0:
            s = add_log_sizes(s, n, keys8, keys4, keys2, scale2, BP)
        v = load_means(means_ptr, row, 1, HEAD, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m - level, l, acc, scale2, PRECISION)
        m += level  # log2 of the group size, which the scores of full groups do not include
        # Early, so that loads are prefetched.
        level, row = locate_means(n + 1, list_ptr, keys8, keys4, keys2, col_blocks, BM, BP)

    list_ptr += tl.cdiv(keys8, BM) + tl.cdiv(keys4, BM) + tl.cdiv(keys2, BM)
    full_end = tl.minimum(keys, t0 + delta + 1) if CAUSAL else keys  # tiles up to here are full
    PARTS: tl.constexpr = BM // BN  # key tiles of a block
    for n in tl.range(0, tl.cdiv(keys1, BM) * PARTS):  # type: ignore[misc]
        u0 = tl.load(list_ptr + n // PARTS).to(tl.int32) * BM + n % PARTS * BN
        k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if limit is not None:
            s = cap_scores(s, limit)
        if u0 + BN > full_end:
            s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
        v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_finalize(m, l, acc, t < queries)
    store_rows(out_ptr, lse_ptr, out, lse2, b, h, t, first_query, kv_heads * group, num_queries,
               stride_b, stride_h, stride_n, HEAD, COLS)  # fmt: skip

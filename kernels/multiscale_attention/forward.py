"""Attention that sees each key block as it is, or through means of 2, 4 or 8 of its tokens (multi-scale KV pooling).

    out_i = sum_g p_ig v_g / sum_g p_ig    p_ig = n_g exp(scale * q_i k_g)    k_g, v_g = means over the n_g keys of group g

over the groups of z tokens of each block that i's row block reads at zoom z. The factor n_g, ``+ log n_g`` on the score, is
what a group of n_g equal keys weighs in dense attention, and ``lse`` holds it. A block with keys after a query of the row block
is read at zoom 1, so that no mean tells of the future.

Means are made once (:mod:`msattn.kernels.multiscale_attention.levels`), and so are lists of each row block's blocks by zoom
(:mod:`msattn.kernels.multiscale_attention.lists`). A program owns one row block. It walks its pooled blocks first, zoom by zoom, in tiles
of BP means that run on through the blocks of the list and from one zoom to the next, so that all but the last are full; each
token finds its mean through the list, and a tile that lies within a zoom has one bias. Then it walks the blocks of zoom 1 as
block_sparse_attention does. Against dense attention, reading the share f_z of the blocks at zoom z costs the share ``sum_z f_z
/ z`` of the operations and loads; 7/8 of K and V are written once more. The other ways in: tiles of one block leave tensor
cores 8 tokens at zoom 8; tiles of one zoom leave three half empty; blocks in the order of the keys, whatever their zoom, need a
bias for each token in every tile, about as many instructions as its softmax; pooling inside a program pools again for every row
block.

The gradient is in :mod:`msattn.kernels.multiscale_attention.backward`. A tile has BM = block queries and BN keys, a whole block
or an even part of one, or BP means. Prefix: p_ pointer.
"""

import torch
from torch import Tensor

from msattn.kernels import reference, tuned
from msattn.kernels.common.checks import (
    check_layout,
    check_per_sequence,
    check_qkv,
    check_zoom,
    query_offset,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.primitives import (
    LOG2_E,
    capability,
    load_tile,
    mask_scores,
    padded_head,
    precision,
    sequence_span,
    softmax_end,
    softmax_step,
    store_rows,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.common.registration import Passes, register_sparse_op
from msattn.kernels.multiscale_attention import backward
from msattn.kernels.multiscale_attention.levels import find_means, find_tile, load_means, pool, pooled_ends, weigh_means
from msattn.kernels.multiscale_attention.lists import find_row_list, row_lists
from msattn.kernels.types import Backend, SparseAttention


def multiscale_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Attention over blocks read at zooms of their own (multi-scale KV pooling, Algorithms 1 to 3).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Views are welcome.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    zoom : Tensor uint8 ``[B | 1, Hq | Hkv | 1, ceil(N / block), ceil(M / block)]``
        How many tokens of a block make one: 1, 2, 4 or 8; 0 skips the block. A group is cut off at the end of the sequence.
        With ``causal``, a block with keys after the row block's first query is read at 1 whatever its zoom, unless 0.
    block_size : int
        Tokens of a block: 16, 32, 64 or 128.
    causal : bool
        Query i stands at position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence. Blocks and groups are counted from there.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` (natural logarithm of the sum of weights, fp32); 0 and -inf for rows that
        read nothing. Differentiable in q, k, v, through both.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name. Other zooms than 0, 1, 2, 4, 8 are refused by the torch backend alone, where
        looking is free; the kernels read nothing, or at zoom 1, for them.
    """
    check_qkv(q, k, v)
    check_zoom(zoom, q, k, block_size)
    check_per_sequence("kv_start", kv_start, q)
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    return SparseAttention(*_operator(q, k, v, zoom, kv_start, block_size, causal, scale, backend))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    kv_start: Tensor | None,
    block_size: int,
    causal: bool,
    scale: float,
    tile: tuned.Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels; ``tile`` overrides the shipped choice, for tuning."""
    check_layout(q=q, k=k, v=v)
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    tile = tile or tuned.pick("multiscale_attention", cols, q.dtype, capability(q.device))
    rows, keys = block_size, min(block_size, tile.keys)
    lists, counts = row_lists(zoom, kv_start, num_queries, num_keys, block_size, causal)
    row_blocks, col_blocks = lists.shape[2:]

    out = torch.empty_like(q)
    lse = q.new_empty((batch, q_heads, num_queries), dtype=torch.float32)
    _multiscale_attention_kernel[(batch * q_heads * row_blocks,)](
        tile_view(q, rows), tile_view(k, keys), tile_view(v, keys),
        pool(k, v, kv_start, block_size), out, lse, lists, counts, kv_start,
        *out.stride()[:3],
        q_heads // kv_heads, kv_heads, num_queries, num_keys, row_blocks, col_blocks, *lists.shape[:2],
        query_offset(num_queries, num_keys, causal), scale * LOG2_E,
        HEAD=head, COLS=cols, BM=rows, BN=keys, BP=tile.keys,
        CAUSAL=causal, PRECISION=precision(q.dtype),
        num_warps=tile.warps * max(1, block_size // 64), num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["group", "kv_heads", "row_blocks", "col_blocks", "list_batch", "list_heads"])
def _multiscale_attention_kernel(
    q_desc, k_desc, v_desc, p_means, p_out, p_lse, p_lists, p_counts, p_kv_start,
    stride_b, stride_h, stride_n,
    group, kv_heads, num_queries, num_keys, row_blocks, col_blocks, list_batch, list_heads, offset, scale2,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A group's heads come together, to meet in the L2 cache; long rows come first.
    pid = tl.program_id(0)
    r = row_blocks - 1 - pid // group % row_blocks
    kv_head = pid // (group * row_blocks) % kv_heads
    h = kv_head * group + pid % group
    b = pid // (group * row_blocks * kv_heads)
    first_key, first_query, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    t0 = r * BM
    t = t0 + tl.arange(0, BM)
    p_list, keys8, keys4, keys2, keys1 = find_row_list(
        p_lists, p_counts, b, h, r, kv_heads * group, list_batch, list_heads, row_blocks, col_blocks
    )
    p_means = find_means(p_means, b, kv_head, kv_heads, col_blocks, HEAD, BM)

    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    _, _, pooled = pooled_ends(keys8, keys4, keys2)
    level, row = find_tile(0, p_list, keys8, keys4, keys2, col_blocks, BM, BP)
    for n in tl.range(0, tl.cdiv(pooled, BP)):  # type: ignore[misc]
        k = load_means(p_means, row, 0, HEAD, COLS)  # [BP, COLS]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if level == 0:
            s = weigh_means(s, n, keys8, keys4, keys2, scale2, BP)
        v = load_means(p_means, row, 1, HEAD, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m - level, l, acc, scale2, PRECISION)
        m += level  # log2 of a group's size, which its scores lack
        level, row = find_tile(n + 1, p_list, keys8, keys4, keys2, col_blocks, BM, BP)  # ahead of its loads

    p_list += tl.cdiv(keys8, BM) + tl.cdiv(keys4, BM) + tl.cdiv(keys2, BM)
    plain_end = tl.minimum(keys, t0 + delta + 1) if CAUSAL else keys  # tiles up to here need no mask
    PARTS: tl.constexpr = BM // BN  # of a block
    for n in tl.range(0, tl.cdiv(keys1, BM) * PARTS):  # type: ignore[misc]
        u0 = tl.load(p_list + n // PARTS).to(tl.int32) * BM + n % PARTS * BN
        k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if u0 + BN > plain_end:
            s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
        v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_end(m, l, acc, t < queries)
    store_rows(p_out, p_lse, out, lse2, b, h, t, first_query, kv_heads * group, num_queries,
               stride_b, stride_h, stride_n, HEAD, COLS)  # fmt: skip


_operator, _ = register_sparse_op(
    "multiscale_attention",
    Passes(launch, backward.launch),
    Passes(reference.multiscale_attention, reference.multiscale_attention_backward),
)

"""Dense attention with a pooled block map (SeerAttention, Algorithm 1).

    P = softmax(scale * Q K^T)
    pooled[r, c] = max over queries i of row block r, keys j of column block c of P[i, j]

With s_ic the largest score of query i in column block c, and lse_i the LSE of the whole row,
pooled[r, c] = max_i exp(s_ic - lse_i). The LSE is known only after the last key, so the maxima are
buffered in an fp32 scratch buffer until then. Programs are persistent and reuse one buffer
``[strips, BM]`` for all their row tiles, so its size does not depend on the number of queries.

Attention masses, sums over j, take the place of the maxima. The online softmax sums the weights of
a tile of keys anyway; here it sums them by column block. They are relative to the running maximum
of that moment, which is buffered with them for each tile of keys, so that nothing is rescaled when
the maximum grows. In exchange, the row maximum of a tile is reduced in one step.

Layouts: a tile has BM queries (one or more row blocks) and BN keys, in one to four strips of W =
min(BN, key block) keys each. Comments give the shapes of tiles.
"""

from typing import get_args

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import BLOCK_SIZES, resolve_key_block_size
from msattn.kernels.common.checks import (
    check_layout,
    check_per_sequence,
    check_qkv,
    check_sinks,
    query_offset,
    resolve_backend,
    resolve_scale,
    resolve_softcap,
    statistics_dtype,
)
from msattn.kernels.common.primitives import (
    LN_2,
    LOG2_E,
    load_tile,
    mask_scores,
    num_sms,
    padded_head,
    precision,
    sequence_span,
    softmax_finalize,
    softmax_step,
    softmax_weights,
    store_rows,
    tile_view,
    tl,
    triton,
    tuned_tile,
)
from msattn.kernels.common.registration import USE_NO_GRAD, empty_attention, register_op
from msattn.kernels.common.softcap import cap_scores, unscaled_limit
from msattn.kernels.reference import maxpool_attention as reference
from msattn.kernels.types import Backend, MaxPoolAttention, Pool


def maxpool_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    key_block_size: int | None = None,
    pool: Pool = "max",
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> MaxPoolAttention:
    """Computes dense attention and its block map: the probabilities of each block, pooled.

    The block map is the training target of gates (SeerAttention, Algorithm 1).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Non-contiguous views are supported.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    block_size : int
        Queries of a block: 16, 32, 64 or 128.
    key_block_size : int, optional
        Keys of a block: 16, 32, 64 or 128; by default ``block_size``.
    pool : {"max", "mass", "mean_mass"}
        The entry of a block: its largest probability; the sum over its keys, of the query with the
        largest sum; or the mean of these sums over the queries of the row block.
    causal : bool
        Query i has position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before
        masking (Gemma 2).
    sinks : Tensor ``[Hq]``, optional
        Attention sinks: finite logits, one for each query head, that take part in the softmax of
        each row without a value (gpt-oss). They are neither scaled nor capped.
    kv_start : Tensor int32 ``[B]``, optional
        Length of the left padding of each sequence. Blocks are counted from its end.
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    MaxPoolAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]``,
        ``pooled [B, Hq, ceil(N / block), ceil(M / key block)]``, the latter two fp32 (fp64 for fp64
        inputs). ``pooled`` is 0 for blocks above the diagonal; rows without visible keys have
        ``out = 0``, ``lse = -inf``, ``pooled = 0``. With ``sinks`` these are results of the softmax
        that includes them, and the ``lse`` of rows without visible keys is the sink.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value; the message names it.
    NotImplementedError
        In the backward pass, as the operation makes training targets.
    """
    check_qkv(q, k, v)
    key_block_size = resolve_key_block_size(block_size, key_block_size)
    if pool not in get_args(Pool):
        raise ValueError(f"pool={pool!r}: expected one of {', '.join(get_args(Pool))}")
    check_per_sequence(q, kv_start=kv_start)
    check_sinks(sinks, q.shape[1], q)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    options = (block_size, key_block_size, causal, scale, softcap, pool, backend)
    return MaxPoolAttention(*_operator(q, k, v, sinks, kv_start, *options))


def _empty(q, k, v, sinks, kv_start, block_size, key_block_size, *others):
    blocks = [(x.shape[2] + size - 1) // size for x, size in ((q, block_size), (k, key_block_size))]
    return *empty_attention(q), q.new_empty((*q.shape[:2], *blocks), dtype=statistics_dtype(q))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    kv_start: Tensor | None,
    block_size: int,
    key_block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    pool: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernel."""
    check_layout(q=q, k=k, v=v)
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    cols = padded_head(head)
    tile = tuned_tile("maxpool_attention", q)
    row_blocks = triton.cdiv(num_queries, block_size)
    col_blocks = triton.cdiv(num_keys, key_block_size)
    row_tiles = triton.cdiv(num_queries, tile.rows)
    tiles = batch * q_heads * row_tiles
    programs = min(tiles, num_sms(q.device) * tile.programs)
    keys = min(tile.keys, max(2 * key_block_size, 4 * BLOCK_SIZES[0]))
    strip = min(keys, key_block_size)
    strips = triton.cdiv(num_keys, keys) * (keys // strip)

    out = torch.empty_like(q)
    lse = q.new_empty((batch, q_heads, num_queries), dtype=torch.float32)
    pooled = q.new_empty((batch, q_heads, row_blocks, col_blocks), dtype=torch.float32)
    scratch_rows = strips if pool == "max" else strips + triton.cdiv(num_keys, keys)
    scratch = q.new_empty((programs, scratch_rows, tile.rows), dtype=torch.float32)
    next_tile = torch.zeros(1, dtype=torch.int32, device=q.device)
    _maxpool_attention_kernel[(programs,)](
        tile_view(q, tile.rows), tile_view(k, keys), tile_view(v, keys),
        out, lse, pooled, scratch, next_tile, kv_start,
        None if sinks is None else sinks.float(), *out.stride()[:3],
        tiles, row_tiles, q_heads // kv_heads, kv_heads,
        num_queries, num_keys, row_blocks, col_blocks, strips,
        query_offset(num_queries, num_keys, causal), scale * LOG2_E, unscaled_limit(softcap, scale),
        HEAD=head, COLS=cols, BM=tile.rows, BN=keys, BLOCK=block_size, KEY_BLOCK=key_block_size,
        W=strip, POOL=pool,
        CAUSAL=causal, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse, pooled


_operator = register_op(
    "maxpool_attention", launch, reference.maxpool_attention, _empty, no_gradient=USE_NO_GRAD
)


@triton.jit(
    do_not_specialize=[
        "tiles", "row_tiles", "group", "kv_heads", "num_queries", "num_keys", "row_blocks",
        "col_blocks", "strips", "offset"
    ]
)  # fmt: skip
def _maxpool_attention_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, pooled_ptr,
    scratch_ptr, next_tile_ptr, kv_start_ptr, sinks_ptr,
    stride_b, stride_h, stride_n,
    tiles, row_tiles, group, kv_heads, num_queries, num_keys,
    row_blocks, col_blocks, strips, offset, scale2, limit,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    scratch_rows = strips
    if POOL != "max":
        scratch_rows += strips // (BN // W)
    scratch_ptr += tl.program_id(0).to(tl.int64) * scratch_rows * BM
    strip_ptrs = scratch_ptr + tl.arange(0, BM)[:, None] + tl.arange(0, BN // W)[None, :] * BM
    # Dynamic tile scheduling. Heads of a group are adjacent for L2 reuse; the longest rows come
    # first.
    tile = tl.atomic_add(next_tile_ptr, 1)
    while tile < tiles:
        row_tile = row_tiles - 1 - tile // group % row_tiles
        kv_head = tile // (group * row_tiles) % kv_heads
        h = kv_head * group + tile % group
        b = tile // (group * row_tiles * kv_heads)
        first_key, first_query, keys, queries, delta = sequence_span(
            kv_start_ptr, b, num_queries, num_keys, offset
        )
        t0 = row_tile * BM
        t = t0 + tl.arange(0, BM)

        last, full = keys, keys // BN * BN  # end of the keys to read, and of those in full tiles
        if CAUSAL:
            last = tl.minimum(keys, t0 + BM + delta)
            full = tl.minimum(keys, t0 + delta + 1) // BN * BN
        last = tl.where(t0 < queries, last, 0)
        full = tl.minimum(full, last)

        q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, COLS], tl.float32)
        if sinks_ptr is not None:  # the softmax begins with the sink, a key without a value
            sink2 = tl.load(sinks_ptr + h) * (1.0 / LN_2)
            m, l = tl.zeros([BM], tl.float32) + sink2, l + 1
        for u0 in tl.range(0, last, BN):  # type: ignore[misc]
            k = load_tile(k_desc, b, kv_head, first_key + u0, BN, COLS)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
            if limit is not None:
                s = cap_scores(s, limit)
            if u0 >= full:
                s = mask_scores(s, t, u0 + tl.arange(0, BN), keys, delta, CAUSAL)
            if POOL == "max":
                maxima = tl.max(tl.reshape(s, [BM, BN // W, W]), 2)  # [BM, BN / W]
                tl.store(strip_ptrs + u0 // W * BM, maxima)
                v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
                m, l, acc = softmax_step(
                    s, _row_max(maxima, BN // W), v, m, l, acc, scale2, PRECISION
                )
            else:
                v = load_tile(v_desc, b, kv_head, first_key + u0, BN, COLS)
                m, p, alpha = softmax_weights(s, tl.max(s, 1), m, scale2)
                sums = tl.sum(tl.reshape(p, [BM, BN // W, W]), 2)  # [BM, BN / W]
                tl.store(strip_ptrs + u0 // W * BM, sums)
                tl.store(scratch_ptr + (strips + u0 // BN) * BM + tl.arange(0, BM), m)
                l = l * alpha + _row_sum(sums, BN // W)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        out, lse2 = softmax_finalize(m, l, acc, t < queries)
        stored_lse2 = lse2
        if sinks_ptr is not None:
            stored_lse2 = tl.where(lse2 == float("-inf"), sink2, lse2)  # pyrefly: ignore[unbound-name]
        store_rows(
            out_ptr, lse_ptr, out, stored_lse2, b, h, t, first_query, kv_heads * group, num_queries,
            stride_b, stride_h, stride_n, HEAD, COLS,
        )  # fmt: skip

        tl.debug_barrier()  # all strips are stored before they are read
        map_ptr = pooled_ptr + (b * kv_heads * group + h).to(tl.int64) * row_blocks * col_blocks
        _store_block_map(
            map_ptr, scratch_ptr, lse2, last, queries, delta, t0 // BLOCK, row_blocks, col_blocks,
            strips, scale2, BM, BN, BLOCK, KEY_BLOCK, W, POOL, CAUSAL,
        )  # fmt: skip
        tl.debug_barrier()  # all strips are read before the next tile overwrites them
        tile = tl.atomic_add(next_tile_ptr, 1)


@triton.jit
def _row_max(maxima, STRIPS: tl.constexpr):
    """Returns the row maxima ``[BM]`` over one, two or four strips.

    Strips are split, because a reduction spills registers.
    """
    if STRIPS == 4:
        first, second = tl.split(tl.reshape(maxima, [maxima.shape[0], 2, 2]))
        maxima = tl.maximum(first, second)
    if STRIPS > 1:
        first, second = tl.split(maxima)
        return tl.maximum(first, second)
    return tl.max(maxima, 1)


@triton.jit
def _row_sum(sums, STRIPS: tl.constexpr):
    """Returns the row sums ``[BM]`` over one, two or four strips, see :func:`_row_max`."""
    if STRIPS == 4:
        first, second = tl.split(tl.reshape(sums, [sums.shape[0], 2, 2]))
        sums = first + second
    if STRIPS > 1:
        first, second = tl.split(sums)
        return first + second
    return tl.sum(sums, 1)


@triton.jit
def _store_block_map(
    map_ptr, scratch_ptr, lse2, last, queries, delta,
    first_row_block, row_blocks, col_blocks, strips, scale2,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Stores the block map of a row tile, ``[BM / BLOCK, Tc]``; NaN for blocks that a NaN row
    sees.
    """
    BLOCKS: tl.constexpr = 2048 // BM  # column blocks of a step
    STRIPS: tl.constexpr = KEY_BLOCK // W  # strips of a block
    end = tl.zeros([BM], tl.int32) + last  # of the keys that a row sees
    if CAUSAL:
        end = tl.minimum(end, first_row_block * BLOCK + tl.arange(0, BM) + delta + 1)
    # of those that NaN rows see
    nan_end = tl.max(tl.reshape(tl.where(lse2 == lse2, 0, end), [BM // BLOCK, BLOCK]), 1)
    # probabilities of NaN rows and of those without keys are 0
    lse2 = tl.where(lse2 > float("-inf"), lse2, float("inf"))
    r = first_row_block + tl.arange(0, BM // BLOCK)
    for c0 in tl.range(0, col_blocks, BLOCKS):  # type: ignore[misc]
        strip = c0 * STRIPS + tl.arange(0, BLOCKS * STRIPS)
        strip_ptrs = scratch_ptr + strip[:, None] * BM + tl.arange(0, BM)[None, :]
        read = (strip * W < last)[:, None]
        if POOL == "max":
            maxima = tl.load(strip_ptrs, mask=read, other=float("-inf"), cache_modifier=".cg")
            logs = tl.reshape(maxima * scale2 - lse2[None, :], [BLOCKS, STRIPS, BM // BLOCK, BLOCK])
            pooled = tl.exp2(tl.max(tl.max(logs, 3), 1))  # [BLOCKS, BM / BLOCK]
        else:
            sums = tl.load(strip_ptrs, mask=read, other=0.0, cache_modifier=".cg")
            max_ptrs = (
                scratch_ptr
                + (strips + strip // (BN // W))[:, None] * BM
                + tl.arange(0, BM)[None, :]
            )
            m = tl.load(max_ptrs, mask=read, other=float("-inf"), cache_modifier=".cg")
            mass = tl.where(lse2[None, :] < float("inf"), sums * tl.exp2(m - lse2[None, :]), 0.0)
            mass = tl.reshape(mass, [BLOCKS, STRIPS, BM // BLOCK, BLOCK])
            mass = tl.sum(mass, 1)  # [BLOCKS, BM / BLOCK, BLOCK]
            if POOL == "mass":
                pooled = tl.max(mass, 2)
            else:
                pooled = (
                    tl.sum(mass, 2) / tl.minimum(tl.maximum(queries - r * BLOCK, 1), BLOCK)[None, :]
                )
        c = c0 + tl.arange(0, BLOCKS)
        pooled = tl.where((c * KEY_BLOCK)[:, None] < nan_end[None, :], float("nan"), pooled)
        inside = (c < col_blocks)[:, None] & (r < row_blocks)[None, :]
        tl.store(map_ptr + r[None, :].to(tl.int64) * col_blocks + c[:, None], pooled, mask=inside)

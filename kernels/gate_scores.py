"""Block probabilities of SeerAttention's gate, for inference.

    gq_r, gk_c   = rope(W pool(block r or c), position of its first token)
    mq_r, mk_c   = mean(block r or c) after the model's RoPE
    logit[r, c]  = gq_r . gk_c / sqrt(hidden) + mean_weight mq_r . mk_c
    scores[r, c] = exp(logit[r, c]) / sum over the visible c' of exp(logit[r, c'])

Gates pool queries and keys before RoPE (section 3.1 of the paper); the second term, with
``mean_weight``, is not in the paper, nor is ``last_queries``. Keys come pooled, as caches keep
them. Three kernels pool the queries (:mod:`msattn.kernels.common.block_pooling`), project and
rotate both (RoPE), and write the map. In the last one a program owns some rows of one head's map.
It stores their visible logits in the map and computes maxima and sums on the way. Then it replaces
the logits by probabilities, because reading them again costs less than a second product. Products
are three TF32 products each, nearly as accurate as fp32.
"""

import math
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common import block_pooling as pooling
from msattn.kernels.common.block_checks import check_poolings, check_rotated, resolve_key_block_size
from msattn.kernels.common.checks import (
    check_per_sequence,
    check_tokens,
    first_query,
    resolve_backend,
    statistics_dtype,
)
from msattn.kernels.common.primitives import LOG2_E, padded_head, sequence_span, tl, triton
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import gate_scores as reference
from msattn.kernels.types import Backend

ROWS = 64  # per tile: the rows of a Hopper tensor core instruction
CHUNK = 32  # pooled channels per step of the projection
DEPTH = 32  # channels per step of a product
# channels of both terms up to which the loop of a product is unrolled; more exceed the shared
# memory of an A100
UNROLLED = 128


def gate_scores(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
    q_pool: list[str],
    num_keys: int,
    block_size: int = 64,
    key_block_size: int | None = None,
    kv_start: Tensor | None = None,
    q_rope: Tensor | None = None,
    mean_weight: float = 0.0,
    last_queries: bool = False,
    columns: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Computes the gate's causal block probabilities of each row block and gate head.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries before RoPE, at the last N of M positions.
    pooled_k : Tensor fp32 (fp64 for fp64 queries) ``[B, Hkv, ceil(M / key block), pools * D]``
        Pooled blocks of keys before RoPE, of :func:`~msattn.kernels.pool_blocks.pool_blocks`; with
        ``q_rope`` also the means after it, D more channels.
    query_weight : Tensor ``[Hg, hidden, Hq // Hg * len(q_pool) * D]``
        fp32 (fp64 for fp64 inputs), contiguous. A gate head reads the concatenated poolings of its
        query heads; Hg divides Hq and is a multiple of Hkv.
    key_weight : Tensor ``[Hg, hidden, pools * D]``
        Likewise; gate head h reads the poolings of key/value head ``h // (Hg // Hkv)``.
    inv_freq : Tensor fp32 ``[hidden / 2]``, or None
        Inverse frequencies of RoPE, in radians per position; channels j and ``j + hidden / 2`` are
        a pair. None: no rotation.
    q_pool : list of {"avg", "max", "min"}
        Poolings of the query blocks.
    num_keys : int
        Number of positions, M.
    block_size : int
        Queries per block: 16, 32, 64 or 128.
    key_block_size : int, optional
        Keys per block, the ``block_size`` with which ``pooled_k`` was pooled: 16, 32, 64 or 128; by
        default ``block_size``.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence. Blocks and positions are counted from its end.
    q_rope : Tensor, like ``q``, optional
        Queries after the model's RoPE.
    mean_weight : float
        Weight of the products of their block means with those of the keys in the logits, without
        them 0; the queries' mean is also over the heads of a gate head.
    last_queries : bool
        Also scores each of the last ``block_size`` queries by itself, over the blocks that it sees,
        as a block of this query alone at the position of the last row block. That row block gets
        the largest of their probabilities and its own.
    columns : Tensor fp32 (fp64 for fp64 queries) ``[B, Hg, ceil(M / key block)]``, optional
        Least score of each block, 0 or more, in the rows that see it; rows are divided by their sum
        after that. Not with ``last_queries``.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        Probabilities, fp32 (fp64 for fp64 inputs)
        ``[B, Hg, ceil(N / block), ceil(M / key block)]``. Rows sum to 1, with ``last_queries`` the
        last one to 1 or more; blocks that are not visible, and rows without visible blocks, are 0.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass: a gate is trained through its logits.
    """
    backend = resolve_backend(backend, q)
    check_tokens("q", q)
    key_block_size = resolve_key_block_size(block_size, key_block_size)
    check_per_sequence(q, kv_start=kv_start)
    check_poolings("q_pool", q_pool)
    check_rotated("q_rope", q_rope, "q", q)
    head_size, dtype, blocks = (
        q.shape[3],
        statistics_dtype(q),
        (num_keys + key_block_size - 1) // key_block_size,
    )
    rotated = 0 if q_rope is None else 1
    pools = pooled_k.shape[3] // head_size - rotated if pooled_k.dim() == 4 else 0
    kv_heads = pooled_k.shape[1] if pools > 0 else 0
    if not kv_heads or pooled_k.shape != (len(q), kv_heads, blocks, (pools + rotated) * head_size):
        raise ValueError(
            f"pooled_k.shape={tuple(pooled_k.shape)}: expected [{len(q)}, key/value heads, "
            f"{blocks}, poolings * {head_size}],"
            " the last pooling that of q_rope, if it is given"
        )
    heads, hidden = query_weight.shape[:2] if query_weight.dim() == 3 else (0, 0)
    if heads < 1 or q.shape[1] % heads or heads % kv_heads or hidden < 2 or hidden % 2:
        raise ValueError(
            f"query_weight.shape={tuple(query_weight.shape)}: expected [gate heads, hidden, "
            f"pooled]: gate heads a divisor of"
            f" {q.shape[1]} query heads and a multiple of {kv_heads} key/value heads, hidden even"
        )
    if pooled_k.dtype != dtype or pooled_k.device != q.device:
        raise ValueError(
            f"pooled_k is {pooled_k.dtype} on {pooled_k.device}: expected {dtype} on {q.device}"
        )
    _check_weight(
        "query_weight",
        query_weight,
        dtype,
        (heads, hidden, q.shape[1] // heads * len(q_pool) * head_size),
        q,
    )
    _check_weight("key_weight", key_weight, dtype, (heads, hidden, pools * head_size), q)
    if inv_freq is not None:
        _check_weight("inv_freq", inv_freq, torch.float32, (hidden // 2,), q)
    if not -math.inf < mean_weight < math.inf or (mean_weight and q_rope is None):
        raise ValueError(
            f"mean_weight={mean_weight}: expected a finite number, and q_rope unless it is 0"
        )
    if columns is not None:
        _check_weight("columns", columns, dtype, (len(q), heads, blocks), q)
        if last_queries:
            raise ValueError("columns: expected None with last_queries=True")
    options = (
        ",".join(q_pool),
        num_keys,
        block_size,
        key_block_size,
        kv_start,
        q_rope,
        mean_weight,
        last_queries,
        columns,
    )
    return _operator(q, pooled_k, query_weight, key_weight, inv_freq, *options, backend)


def _check_weight(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor
) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != q.device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}: expected "
            f"{dtype} {shape} on {q.device},"
            " contiguous"
        )


def launch(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    q_pool: str,
    num_keys: int,
    block_size: int,
    key_block_size: int,
    kv_start: Tensor | None,
    q_rope: Tensor | None,
    mean_weight: float,
    last_queries: bool,
    columns: Tensor | None,
) -> Tensor:
    """Launches the kernels."""
    (batch, q_heads, num_queries, head), kv_heads = q.shape, pooled_k.shape[1]
    first = first_query(num_queries, num_keys, kv_start, q.device)
    single = min(block_size, num_queries) if last_queries else 0
    pooled_q = pooling.launch(q, q_pool, block_size, first, q_rope, single)
    scores = _empty(
        q,
        pooled_k,
        query_weight,
        key_weight,
        inv_freq,
        q_pool,
        num_keys,
        block_size,
        key_block_size,
    )
    (_, heads, rows, cols), hidden, k_width = (
        scores.shape,
        query_weight.shape[1],
        key_weight.shape[2],
    )
    pooled_k = pooled_k.contiguous()
    gate_q = pooled_q.new_empty((batch, heads, rows + single, hidden))
    gate_k = pooled_q.new_empty((batch, heads, cols, hidden))
    means, mean_q, mean_k = 0, None, None
    if q_rope is not None:
        means, mean_q, mean_k = (
            head,
            gate_q.new_empty((batch, heads, rows + single, head)),
            pooled_k[..., k_width:],
        )
    lengths = num_queries, num_keys, num_keys - num_queries
    tiles = triton.cdiv(rows + single, ROWS) + triton.cdiv(cols, ROWS)
    _project_kernel[(heads, tiles, batch)](
        pooled_q, pooled_k, query_weight, key_weight, inv_freq, kv_start, gate_q, gate_k, mean_q,
        q_heads, kv_heads, *lengths, rows, rows + single, cols, hidden**-0.5 * LOG2_E,
        mean_weight * LOG2_E,
        HEAD=head, MEANS=means, Q_WIDTH=len(q_pool.split(",")) * head, K_WIDTH=k_width,
        PARTS=q_heads // heads,
        HIDDEN=hidden, PAIRS=padded_head(hidden // 2), COLS=padded_head(head), BLOCK=block_size,
        KEY_BLOCK=key_block_size, ROWS=ROWS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    unroll = hidden + means <= UNROLLED
    _map_kernel[(heads, triton.cdiv(rows, ROWS), batch)](
        gate_q, gate_k, mean_q, mean_k, scores, columns, kv_start, *lengths, rows, rows + single,
        cols, kv_heads,
        HIDDEN=hidden, HEAD=head, K_STRIDE=pooled_k.shape[3], BLOCK=block_size,
        KEY_BLOCK=key_block_size,
        SINGLE=single > 0, ROWS=ROWS, COLS=64,
        DEPTH=min(DEPTH, padded_head(hidden)), UNROLL=unroll, num_warps=4,
        num_stages=2 if unroll else 3,
    )  # fmt: skip
    return scores


def _empty(
    q,
    pooled_k,
    query_weight,
    key_weight,
    inv_freq,
    q_pool,
    num_keys,
    block_size,
    key_block_size,
    *others,
) -> Tensor:
    rows, cols = (
        (n + size - 1) // size for n, size in ((q.shape[2], block_size), (num_keys, key_block_size))
    )
    return q.new_empty((q.shape[0], len(query_weight), rows, cols), dtype=statistics_dtype(q))


def _reference(q_pool: str, **others: Any) -> Tensor:
    return reference.gate_scores(q_pool=q_pool.split(","), **others)


_operator = register_op(
    "gate_scores", launch, _reference, _empty, no_gradient="a gate is trained through its logits"
)


@triton.jit(
    do_not_specialize=[
        "q_heads",
        "kv_heads",
        "num_queries",
        "num_keys",
        "offset",
        "rows",
        "q_rows",
        "cols",
    ]
)
def _project_kernel(
    pooled_q_ptr, pooled_k_ptr, query_weight_ptr, key_weight_ptr, inv_freq_ptr, kv_start_ptr,
    gate_q_ptr, gate_k_ptr, mean_q_ptr,
    q_heads, kv_heads, num_queries, num_keys, offset, rows, q_rows, cols, scale, mean_scale,
    HEAD: tl.constexpr, MEANS: tl.constexpr, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr, PAIRS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Projects and rotates some rows of a gate head: query blocks, then single queries, or key
    blocks.

    MEANS channels after the pooled ones, HEAD or 0, are means after the model's RoPE.
    """
    h, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, q_tiles = tl.num_programs(0), tl.cdiv(q_rows, ROWS)
    if tile < q_tiles:
        t = tile * ROWS + tl.arange(0, ROWS)
        _, _, _, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
        position = tl.where(t < rows, t, tl.maximum(queries - 1, 0) // BLOCK) * BLOCK + delta
        pooled_q_ptr += (b * q_heads + h * q_heads // heads) * q_rows * (Q_WIDTH + MEANS)
        gate_q_ptr += (b * heads + h) * q_rows * HIDDEN
        _project(pooled_q_ptr, query_weight_ptr, inv_freq_ptr, gate_q_ptr, h, t, position, q_rows,
            scale,
                 Q_WIDTH, Q_WIDTH + MEANS, PARTS, HIDDEN, PAIRS, CHUNK)  # fmt: skip
        if mean_q_ptr is not None:
            d = tl.arange(0, COLS)
            inside = (t < q_rows)[:, None] & (d < HEAD)[None, :]
            mean_ptrs = pooled_q_ptr + t[:, None] * (Q_WIDTH + MEANS) + Q_WIDTH + d[None, :]
            total = tl.zeros([ROWS, COLS], tl.float32)
            for _part in tl.range(0, PARTS):  # type: ignore[misc]
                total += tl.load(mean_ptrs, mask=inside, other=0.0)
                mean_ptrs += q_rows * (Q_WIDTH + MEANS)
            mean_q_ptr += (b * heads + h) * q_rows * HEAD
            tl.store(
                mean_q_ptr + t[:, None] * HEAD + d[None, :], total / PARTS * mean_scale, mask=inside
            )
    else:
        t = (tile - q_tiles) * ROWS + tl.arange(0, ROWS)
        pooled_k_ptr += (b * kv_heads + h * kv_heads // heads) * cols * (K_WIDTH + MEANS)
        gate_k_ptr += (b * heads + h) * cols * HIDDEN
        _project(pooled_k_ptr, key_weight_ptr, inv_freq_ptr, gate_k_ptr, h, t, t * KEY_BLOCK, cols,
            1.0,
                 K_WIDTH, K_WIDTH + MEANS, 1, HIDDEN, PAIRS, CHUNK)  # fmt: skip


@triton.jit
def _project(
    pooled_ptr, weight_ptr, inv_freq_ptr, out_ptr, h, t, position, rows, scale,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr, HIDDEN: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes rows ``t`` of gate head h, of which ``pooled`` has PARTS heads of ``rows`` rows.

    The two halves of a vector are separate tiles, so that rotating a pair needs no exchange between
    threads.
    """
    pair = tl.arange(0, PAIRS)
    half: tl.constexpr = HIDDEN // 2
    row_ptrs = pooled_ptr + t[:, None].to(tl.int64) * STRIDE
    first_ptr = weight_ptr + (h.to(tl.int64) * HIDDEN + pair[:, None]) * (PARTS * WIDTH)
    first = tl.zeros([t.shape[0], PAIRS], tl.float32)
    second = tl.zeros([t.shape[0], PAIRS], tl.float32)
    for _part in tl.range(0, PARTS):  # type: ignore[misc]
        for start in tl.range(0, WIDTH, CHUNK):  # type: ignore[misc]
            w = start + tl.arange(0, CHUNK)[None, :]
            inside_weight = (pair < half)[:, None] & (w < WIDTH)
            x = tl.load(row_ptrs + w, mask=(t < rows)[:, None] & (w < WIDTH), other=0.0)
            weight = tl.load(first_ptr + w, mask=inside_weight, other=0.0)
            first = tl.dot(x, tl.trans(weight), first, input_precision="tf32x3")
            weight = tl.load(first_ptr + half * PARTS * WIDTH + w, mask=inside_weight, other=0.0)
            second = tl.dot(x, tl.trans(weight), second, input_precision="tf32x3")
        row_ptrs += rows.to(tl.int64) * STRIDE  # the next head
        first_ptr += WIDTH
    if inv_freq_ptr is not None:
        angle = (
            position.to(tl.float32)[:, None]
            * tl.load(inv_freq_ptr + pair, mask=pair < half, other=0.0)[None, :]
        )
        cos, sin = tl.cos(angle), tl.sin(angle)
        first, second = first * cos - second * sin, second * cos + first * sin
    out_ptr += t[:, None].to(tl.int64) * HIDDEN + pair[None, :]
    inside = (t < rows)[:, None] & (pair < half)[None, :]
    tl.store(out_ptr, first * scale, mask=inside)
    tl.store(out_ptr + half, second * scale, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "offset", "rows", "q_rows", "kv_heads"])
def _map_kernel(
    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, scores_ptr, columns_ptr, kv_start_ptr,
    num_queries, num_keys, offset, rows, q_rows, cols, kv_heads,
    HIDDEN: tl.constexpr, HEAD: tl.constexpr, K_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SINGLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Writes the probabilities of some rows of a gate head, the longest rows first."""
    h, tile, b = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    _, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    head = b.to(tl.int64) * tl.num_programs(0) + h
    r = tile * ROWS + tl.arange(0, ROWS)
    # keys before the end of a row block
    seen = tl.minimum(keys, tl.minimum((r + 1) * BLOCK, queries) + delta)
    end = tl.where(r * BLOCK < queries, tl.cdiv(seen, KEY_BLOCK), 0)
    last = tl.max(end, 0)

    q_ptr += head * q_rows * HIDDEN
    k_ptr += head * cols * HIDDEN
    if mean_q_ptr is not None:
        mean_q_ptr += head * q_rows * HEAD
        mean_k_ptr += (
            (b.to(tl.int64) * kv_heads + h * kv_heads // tl.num_programs(0)) * cols * K_STRIDE
        )
    scores_ptr += (head * rows + r[:, None]) * cols
    base, inverse_sum = _row_statistics(
        q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, scores_ptr, r, end, rows, q_rows, cols,
        HIDDEN, HEAD, K_STRIDE, DEPTH, COLS, UNROLL,
    )  # fmt: skip
    last_row = tl.maximum(queries - 1, 0) // BLOCK
    holds_last = last_row // ROWS == tile
    r_single = rows + tl.arange(0, BLOCK)
    # below delta: a query of padding
    position = num_queries - q_rows + r_single - first_query + delta
    is_query = (r_single < q_rows) & (position >= delta) & holds_last
    end_single = tl.where(is_query, tl.cdiv(tl.minimum(position + 1, keys), KEY_BLOCK), 0)
    base_single, inverse_single = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if SINGLE:
        base_single, inverse_single = _row_statistics(
            q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, None, r_single, end_single, rows, q_rows, cols,
            HIDDEN, HEAD, K_STRIDE, DEPTH, COLS, UNROLL,
        )  # fmt: skip

    tl.debug_barrier()  # all logits are stored before they are read
    if columns_ptr is not None:
        columns_ptr += head * cols
        total = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, last, COLS):  # type: ignore[misc]
            _c, p = _probabilities(
                scores_ptr, columns_ptr, r, start, end, base, inverse_sum, rows, cols, COLS
            )
            total += tl.sum(p, 1)
        inverse_total = 1.0 / tl.where(total != 0, total, 1.0)
    for start in tl.range(0, last, COLS):  # type: ignore[misc]
        c, p = _probabilities(
            scores_ptr, columns_ptr, r, start, end, base, inverse_sum, rows, cols, COLS
        )
        if columns_ptr is not None:
            p *= inverse_total[:, None]  # pyrefly: ignore[unbound-name]
        if SINGLE:  # noqa: SIM102  # at compile time
            if holds_last:
                s_single = _logits(
                    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, r_single, start, end_single, q_rows, cols,
                    HIDDEN, HEAD, K_STRIDE, DEPTH, COLS, UNROLL,
                )  # fmt: skip
                p_single = tl.exp2(s_single - base_single[:, None]) * inverse_single[:, None]
                p_single = tl.where(c < end_single[:, None], p_single, 0.0)
                total_single = tl.sum(p_single, 0)  # NaN where one is, which a maximum would ignore
                largest = tl.where(total_single == total_single, tl.max(p_single, 0), total_single)
                p = tl.where(
                    (r == last_row)[:, None],
                    tl.maximum(p, largest[None, :], tl.PropagateNan.ALL),
                    p,
                )
        p = tl.where(c < end[:, None], p, 0.0)  # also in rows that are NaN
        tl.store(scores_ptr + c, p, mask=(r < rows)[:, None] & (c < cols))
    for start in tl.range(tl.cdiv(last, COLS) * COLS, cols, COLS):  # type: ignore[misc]
        c = start + tl.arange(0, COLS)[None, :]
        tl.store(
            scores_ptr + c,
            tl.zeros([ROWS, COLS], tl.float32),
            mask=(r < rows)[:, None] & (c < cols),
        )


@triton.jit
def _probabilities(
    scores_ptr, columns_ptr, r, start, end, base, inverse_sum, rows, cols, COLS: tl.constexpr
):
    """Returns COLS columns and the probabilities of rows ``r`` there, of the stored logits, at
    least those of ``columns``.
    """
    c = start + tl.arange(0, COLS)[None, :]
    s = tl.load(
        scores_ptr + c,
        mask=(r < rows)[:, None] & (c < cols),
        other=float("-inf"),
        cache_modifier=".cg",
    )
    p = tl.exp2(s - base[:, None]) * inverse_sum[:, None]
    if columns_ptr is not None:
        least = tl.load(columns_ptr + c, mask=c < cols, other=0.0)
        p = tl.where(c < end[:, None], tl.maximum(p, least, tl.PropagateNan.ALL), 0.0)
    return c, p


@triton.jit
def _row_statistics(
    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, scores_ptr, r, end, rows, q_rows, cols,
    HIDDEN: tl.constexpr, HEAD: tl.constexpr, K_STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Returns the largest logit and the inverse of the sum of exponentials of rows ``r``; 0 and 1
    for rows that see nothing.

    Writes the logits to ``scores``, unless it is None.
    """
    m = tl.full([r.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([r.shape[0]], tl.float32)
    for start in tl.range(0, tl.max(end, 0), COLS):  # type: ignore[misc]
        s = _logits(
            q_ptr,
            k_ptr,
            mean_q_ptr,
            mean_k_ptr,
            r,
            start,
            end,
            q_rows,
            cols,
            HIDDEN,
            HEAD,
            K_STRIDE,
            DEPTH,
            COLS,
            UNROLL,
        )
        if scores_ptr is not None:
            c = start + tl.arange(0, COLS)[None, :]
            tl.store(scores_ptr + c, s, mask=(r < rows)[:, None] & (c < cols))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        m = m_new
    return tl.where(m == float("-inf"), 0.0, m), 1.0 / tl.where(l != 0, l, 1.0)


@triton.jit
def _logits(
    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, r, start, end, rows, cols,
    HIDDEN: tl.constexpr, HEAD: tl.constexpr, K_STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Returns logits of rows ``r`` and COLS columns, -inf from each row's ``end`` on."""
    c = start + tl.arange(0, COLS)
    s = tl.zeros([r.shape[0], COLS], tl.float32)
    s = _add_products(s, q_ptr, k_ptr, r, c, rows, cols, HIDDEN, HIDDEN, DEPTH, UNROLL)
    if mean_q_ptr is not None:
        s = _add_products(
            s, mean_q_ptr, mean_k_ptr, r, c, rows, cols, HEAD, K_STRIDE, DEPTH, UNROLL
        )
    return tl.where(c[None, :] < end[:, None], s, float("-inf"))


@triton.jit
def _add_products(
    s,
    q_ptr,
    k_ptr,
    r,
    c,
    rows,
    cols,
    WIDTH: tl.constexpr,
    K_STRIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Adds the products of vectors of rows ``r`` and columns ``c``, WIDTH channels each."""
    if UNROLL:
        for first in tl.static_range(0, WIDTH, DEPTH):
            s = _add_part(s, q_ptr, k_ptr, r, c, rows, cols, first, WIDTH, K_STRIDE, DEPTH)
    else:
        for first in tl.range(0, WIDTH, DEPTH):  # type: ignore[misc]
            s = _add_part(s, q_ptr, k_ptr, r, c, rows, cols, first, WIDTH, K_STRIDE, DEPTH)
    return s


@triton.jit
def _add_part(
    s,
    q_ptr,
    k_ptr,
    r,
    c,
    rows,
    cols,
    first,
    WIDTH: tl.constexpr,
    K_STRIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    d = first + tl.arange(0, DEPTH)[None, :]
    q = tl.load(q_ptr + r[:, None] * WIDTH + d, mask=(r < rows)[:, None] & (d < WIDTH), other=0.0)
    k = tl.load(
        k_ptr + c[:, None] * K_STRIDE + d, mask=(c < cols)[:, None] & (d < WIDTH), other=0.0
    )
    return tl.dot(q, tl.trans(k), s, input_precision="tf32x3")

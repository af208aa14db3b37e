"""Block probabilities of SeerAttention's gate, for inference.

    gq_r, gk_c   = rope(W pool(block r or c), position of its first token)
    mq_r, mk_c   = mean(block r or c) after the model's RoPE
    logit[r, c]  = gq_r . gk_c / sqrt(hidden) + mean_weight mq_r . mk_c
    scores[r, c] = exp(logit[r, c]) / sum over the visible c' of exp(logit[r, c'])

Gates pool queries and keys before RoPE (section 3.1 of the paper); the second term, with ``mean_weight``, is not in the paper.
Queries and keys are pooled (:mod:`msattn.kernels.common.block_pooling`), then projected and rotated (RoPE). In the last kernel
a program owns some rows of one head's map and computes their visible logits twice, first for maxima and sums, then to write
probabilities, so that logits are not stored. Products are three TF32 products each, nearly as accurate as fp32.
"""

from typing import Any

from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common import block_pooling as pooling
from msattn.kernels.common.block_checks import check_gate_scores
from msattn.kernels.common.checks import first_query, resolve_backend, statistics_dtype
from msattn.kernels.common.primitives import LOG2_E, padded_head, sequence_span, tl, triton
from msattn.kernels.common.registration import register_op
from msattn.kernels.types import Backend

ROWS = 64  # per tile: the rows of a Hopper tensor core instruction
CHUNK = 32  # pooled channels per step of the projection
DEPTH = 32  # channels per step of a product
UNROLLED = 128  # channels of both terms up to which the loop of a product is unrolled; more exceed the shared memory of an A100


def gate_scores(
    q: Tensor,
    k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
    q_pool: list[str],
    k_pool: list[str],
    block_size: int = 64,
    kv_start: Tensor | None = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    mean_weight: float = 0.0,
    backend: Backend | None = None,
) -> Tensor:
    """Computes the gate's causal block probabilities of each row block and gate head.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries before RoPE, at the last N of M positions.
    k : Tensor ``[B, Hkv, M, D]``
        Keys before RoPE.
    query_weight : Tensor ``[Hg, hidden, Hq // Hg * len(q_pool) * D]``
        fp32 (fp64 for fp64 inputs), contiguous. A gate head reads the concatenated poolings of its query heads; Hg divides Hq
        and is a multiple of Hkv.
    key_weight : Tensor ``[Hg, hidden, len(k_pool) * D]``
        Likewise; gate head h reads the poolings of key/value head ``h // (Hg // Hkv)``.
    inv_freq : Tensor fp32 ``[hidden / 2]``, or None
        Inverse frequencies of RoPE, in radians per position; channels j and ``j + hidden / 2`` are a pair. None: no rotation.
    q_pool, k_pool : list of {"avg", "max", "min"}
        Poolings of the blocks.
    block_size : int
        Tokens per block: 16, 32, 64 or 128.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence. Blocks and positions are counted from its end.
    q_rope, k_rope : Tensor, like ``q`` and ``k``, optional
        Queries and keys after the model's RoPE, both or neither.
    mean_weight : float
        Weight of the products of their block means in the logits, without them 0; the queries' mean is also over the heads of a
        gate head.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        Probabilities, fp32 (fp64 for fp64 inputs) ``[B, Hg, ceil(N / block), ceil(M / block)]``. Rows sum to 1; blocks that are
        not visible, and rows without visible blocks, are 0.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass: a gate is trained through its logits.
    """
    backend = resolve_backend(backend, q)
    check_gate_scores(
        q, k, query_weight, key_weight, inv_freq, q_pool, k_pool, block_size, kv_start, q_rope, k_rope, mean_weight
    )
    pools, means = (",".join(q_pool), ",".join(k_pool)), (q_rope, k_rope, mean_weight)
    return _operator(q, k, query_weight, key_weight, inv_freq, *pools, block_size, kv_start, *means, backend)


def launch(
    q: Tensor,
    k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    q_pool: str,
    k_pool: str,
    block_size: int,
    kv_start: Tensor | None,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    mean_weight: float,
) -> Tensor:
    """Launches the kernels."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    first = first_query(num_queries, num_keys, kv_start, q.device)
    pooled_q = pooling.launch(q, q_pool, block_size, first)
    pooled_k = pooling.launch(k, k_pool, block_size, kv_start)
    scale = query_weight.shape[1] ** -0.5 * LOG2_E
    gate_q = launch_projection(pooled_q, query_weight, inv_freq, kv_start, num_keys - num_queries, block_size, scale)
    gate_k = launch_projection(pooled_k, key_weight, inv_freq, None, 0, block_size, 1.0)
    scores = _empty(q, k, query_weight, key_weight, inv_freq, q_pool, k_pool, block_size)
    batch, heads, rows, cols = scores.shape
    hidden = gate_q.shape[3]
    head, mean_q, mean_k = 0, None, None
    if q_rope is not None and k_rope is not None:
        mean_k = pooling.launch(k_rope, "avg", block_size, kv_start)
        mean_q = pooling.launch(q_rope, "avg", block_size, first)
        mean_q = mean_q if len(query_weight) == q.shape[1] else mean_q.unflatten(1, (heads, -1)).mean(2)
        mean_q *= mean_weight * LOG2_E
        head = q.shape[3]
    unroll = hidden + head <= UNROLLED
    _map_kernel[(heads, triton.cdiv(rows, ROWS), batch)](
        gate_q, gate_k, mean_q, mean_k, scores, kv_start,
        num_queries, num_keys, num_keys - num_queries, rows, cols, k.shape[1],
        HIDDEN=hidden, HEAD=head, BLOCK=block_size, ROWS=ROWS, COLS=64, DEPTH=min(DEPTH, padded_head(hidden)),
        UNROLL=unroll, num_warps=4, num_stages=2 if unroll else 3,
    )  # fmt: skip
    return scores


def _empty(q, k, query_weight, key_weight, inv_freq, q_pool, k_pool, block_size, *others) -> Tensor:
    rows, cols = ((x.shape[2] + block_size - 1) // block_size for x in (q, k))
    return q.new_empty((q.shape[0], len(query_weight), rows, cols), dtype=statistics_dtype(q))


def _reference(q_pool: str, k_pool: str, **others: Any) -> Tensor:
    return reference.gate_scores(q_pool=q_pool.split(","), k_pool=k_pool.split(","), **others)


_operator = register_op("gate_scores", launch, _reference, _empty, no_gradient="a gate is trained through its logits")


def launch_projection(
    pooled: Tensor, weight: Tensor, inv_freq: Tensor | None, kv_start: Tensor | None, offset: int, block_size: int, scale: float
) -> Tensor:
    """Launches the projection and rotation of pooled blocks ``[B, H, T, P]``.

    Returns gate vectors fp32 ``[B, Hg, T, hidden]``, times ``scale``. The first block is at position ``offset``.
    """
    batch, heads_in, blocks, width = pooled.shape
    heads, hidden, terms = weight.shape
    out = pooled.new_empty((batch, heads, blocks, hidden))
    _project_kernel[(heads, triton.cdiv(blocks, ROWS), batch)](
        pooled, weight, inv_freq, kv_start, out, heads_in, blocks, offset, scale,
        WIDTH=width, PARTS=terms // width, HIDDEN=hidden, PAIRS=padded_head(hidden // 2), BLOCK=block_size,
        ROWS=ROWS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads_in", "blocks", "offset"])
def _project_kernel(
    pooled_ptr, weight_ptr, inv_freq_ptr, kv_start_ptr, out_ptr, heads_in, blocks, offset, scale,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HIDDEN: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Projects and rotates some blocks of a gate head.

    The two halves of a vector are separate tiles, so that rotating a pair needs no exchange between threads.
    """
    h, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    t = tile * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    half: tl.constexpr = HIDDEN // 2
    row_ptrs = pooled_ptr + ((b.to(tl.int64) * heads_in + h * heads_in // heads) * blocks + t[:, None]) * WIDTH
    first_ptr = weight_ptr + (h.to(tl.int64) * HIDDEN + pair[:, None]) * (PARTS * WIDTH)
    first = tl.zeros([ROWS, PAIRS], tl.float32)
    second = tl.zeros([ROWS, PAIRS], tl.float32)
    for _part in tl.range(0, PARTS):  # type: ignore[misc]
        for start in tl.range(0, WIDTH, CHUNK):  # type: ignore[misc]
            w = start + tl.arange(0, CHUNK)[None, :]
            inside_weight = (pair < half)[:, None] & (w < WIDTH)
            x = tl.load(row_ptrs + w, mask=(t < blocks)[:, None] & (w < WIDTH), other=0.0)
            first = tl.dot(x, tl.trans(tl.load(first_ptr + w, mask=inside_weight, other=0.0)), first, input_precision="tf32x3")
            weight = tl.load(first_ptr + half * PARTS * WIDTH + w, mask=inside_weight, other=0.0)
            second = tl.dot(x, tl.trans(weight), second, input_precision="tf32x3")
        row_ptrs += blocks.to(tl.int64) * WIDTH  # the next head
        first_ptr += WIDTH
    if inv_freq_ptr is not None:
        _, _, _, _, delta = sequence_span(kv_start_ptr, b, 0, 0, offset)
        angle = (t * BLOCK + delta).to(tl.float32)[:, None] * tl.load(inv_freq_ptr + pair, mask=pair < half, other=0.0)[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        first, second = first * cos - second * sin, second * cos + first * sin
    out_ptr += ((b.to(tl.int64) * heads + h) * blocks + t[:, None]) * HIDDEN + pair[None, :]
    inside = (t < blocks)[:, None] & (pair < half)[None, :]
    tl.store(out_ptr, first * scale, mask=inside)
    tl.store(out_ptr + half, second * scale, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "offset", "rows", "kv_heads"])
def _map_kernel(
    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, scores_ptr, kv_start_ptr, num_queries, num_keys, offset, rows, cols, kv_heads,
    HIDDEN: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Writes the probabilities of some rows of a gate head, the longest rows first."""
    h, tile, b = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    head = b.to(tl.int64) * tl.num_programs(0) + h
    r = tile * ROWS + tl.arange(0, ROWS)
    seen = tl.minimum(keys, tl.minimum((r + 1) * BLOCK, queries) + delta)  # keys before the end of a row block
    end = tl.where(r * BLOCK < queries, tl.cdiv(seen, BLOCK), 0)
    last = tl.max(end, 0)

    q_ptr += head * rows * HIDDEN
    k_ptr += head * cols * HIDDEN
    if HEAD:
        mean_q_ptr += head * rows * HEAD
        mean_k_ptr += (b.to(tl.int64) * kv_heads + h * kv_heads // tl.num_programs(0)) * cols * HEAD
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, last, COLS):  # type: ignore[misc]
        s = _logits(q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, r, start, end, rows, cols, HIDDEN, HEAD, DEPTH, COLS, UNROLL)
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        m = m_new
    base = tl.where(m == float("-inf"), 0.0, m)
    inverse_sum = 1.0 / tl.where(l > 0, l, 1.0)

    scores_ptr += (head * rows + r[:, None]) * cols
    for start in tl.range(0, last, COLS):  # type: ignore[misc]
        s = _logits(q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, r, start, end, rows, cols, HIDDEN, HEAD, DEPTH, COLS, UNROLL)
        c = start + tl.arange(0, COLS)[None, :]
        tl.store(scores_ptr + c, tl.exp2(s - base[:, None]) * inverse_sum[:, None], mask=(r < rows)[:, None] & (c < cols))
    for start in tl.range(tl.cdiv(last, COLS) * COLS, cols, COLS):  # type: ignore[misc]
        c = start + tl.arange(0, COLS)[None, :]
        tl.store(scores_ptr + c, tl.zeros([ROWS, COLS], tl.float32), mask=(r < rows)[:, None] & (c < cols))


@triton.jit
def _logits(
    q_ptr, k_ptr, mean_q_ptr, mean_k_ptr, r, start, end, rows, cols,
    HIDDEN: tl.constexpr, HEAD: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Returns logits of rows ``r`` and COLS columns, -inf from each row's ``end`` on."""
    c = start + tl.arange(0, COLS)
    s = _add_products(tl.zeros([r.shape[0], COLS], tl.float32), q_ptr, k_ptr, r, c, rows, cols, HIDDEN, DEPTH, UNROLL)
    if HEAD:
        s = _add_products(s, mean_q_ptr, mean_k_ptr, r, c, rows, cols, HEAD, DEPTH, UNROLL)
    return tl.where(c[None, :] < end[:, None], s, float("-inf"))


@triton.jit
def _add_products(s, q_ptr, k_ptr, r, c, rows, cols, WIDTH: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr):
    """Adds the products of vectors of rows ``r`` and columns ``c``, WIDTH channels each."""
    if UNROLL:
        for first in tl.static_range(0, WIDTH, DEPTH):
            s = _add_part(s, q_ptr, k_ptr, r, c, rows, cols, first, WIDTH, DEPTH)
    else:
        for first in tl.range(0, WIDTH, DEPTH):  # type: ignore[misc]
            s = _add_part(s, q_ptr, k_ptr, r, c, rows, cols, first, WIDTH, DEPTH)
    return s


@triton.jit
def _add_part(s, q_ptr, k_ptr, r, c, rows, cols, first, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    d = first + tl.arange(0, DEPTH)[None, :]
    q = tl.load(q_ptr + r[:, None] * WIDTH + d, mask=(r < rows)[:, None] & (d < WIDTH), other=0.0)
    k = tl.load(k_ptr + c[:, None] * WIDTH + d, mask=(c < cols)[:, None] & (d < WIDTH), other=0.0)
    return tl.dot(q, tl.trans(k), s, input_precision="tf32x3")

"""Rows of a gate's block map, for ``gate_scores``, which returns their probabilities, and for
``gate_blocks``, which returns the blocks to read.

Four kernels: one pools the queries (:mod:`.block_pooling`); one projects and rotates pooled queries
and keys (RoPE); then, for a slab of rows at a time, one writes their logits and one, a program for
each row, reads them back, computes the softmax and stores or selects. The map itself is never held,
only a slab of at most ``SLAB_BYTES``. Writing and reading logits costs less than computing the
product twice, which the softmax would otherwise need.

Vectors (the projected and the mean terms of a logit in one) are scaled by a power of two near their
largest element, and split into two fp16 numbers. Three fp16 products of such pairs, added in fp32,
keep 22 of 24 bits, as three TF32 products do, at twice the rate and without a split in the loop.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common import block_pooling as pooling
from msattn.kernels.common.best_of_row import best_of_row, row_options
from msattn.kernels.common.block_bits import WORD, num_words
from msattn.kernels.common.checks import first_query
from msattn.kernels.common.primitives import (
    LOG2_E,
    capability,
    padded_head,
    sequence_span,
    tl,
    triton,
)

SLAB_BYTES = 2**29
ROWS: int = 64  # of a tile of the projection
CHUNK = 32  # pooled channels per step of the projection
# log2 of the largest element of a vector after its division, so that the second of two fp16 numbers
# is rarely denormal and the first never overflows
HEADROOM = tl.constexpr(12)


class LogitsTile(NamedTuple):
    """Tile of the logits: rows, columns, channels per step, warps, stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# by compute capability
LOGITS_TILES = {90: LogitsTile(128, 128, 64, 8, 3), 80: LogitsTile(128, 64, 64, 4, 3)}


class GateArguments(NamedTuple):
    """Arguments of the operator ``gate_scores``."""

    q: Tensor
    pooled_k: Tensor
    query_weight: Tensor
    key_weight: Tensor
    inv_freq: Tensor | None
    q_pool: str
    num_keys: int
    block_size: int
    key_block_size: int
    kv_start: Tensor | None
    q_rope: Tensor | None
    mean_weight: float
    last_queries: bool
    columns: Tensor | None
    last_rows: Tensor | None
    whole: Tensor | None

    @property
    def map_shape(self) -> tuple[int, int, int, int]:
        """Sequences, gate heads, row blocks and column blocks."""
        rows = -(-self.q.shape[2] // self.block_size)
        return (
            len(self.q),
            len(self.query_weight),
            rows,
            -(-self.num_keys // self.key_block_size),
        )

    @property
    def single(self) -> int:
        """The last queries that are also scored by themselves."""
        return min(self.block_size, self.q.shape[2]) if self.last_queries else 0

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Numbers of queries and of keys, and their difference."""
        return self.q.shape[2], self.num_keys, self.num_keys - self.q.shape[2]


class Choice(NamedTuple):
    """The blocks to select of each row, see ``gate_blocks``."""

    counts: Tensor
    local: Tensor
    sink_blocks: int
    threshold: float
    exponent: float
    edge_exponent: float
    above: float


class Vectors(NamedTuple):
    """Vectors whose products are logits in base 2: fp16 pairs ``[B, Hg, T, 2, channels]`` and their
    factors, fp32 ``[B, Hg, T]``.
    """

    pairs: Tensor
    factors: Tensor


def launch(gate: GateArguments, choice: Choice | None = None) -> Tensor:
    """Returns the probabilities of blocks, fp32 ``[B, Hg, Tr, Tc]``, or with a ``choice`` the bits
    of those to read, int32 ``[B, Hg, Tr, ceil(Tc / 32)]``.
    """
    batch, heads, rows, cols = gate.map_shape
    queries, keys = _project(gate)
    if gate.single:
        alone = queries.factors.new_zeros((batch, heads, gate.single, cols))
        _fill(alone, gate, queries, keys, None, single=True)
        gate = gate._replace(last_rows=alone.amax(2, keepdim=True))  # NaN where one is
    # what a slab does not reach is not visible
    if choice is None:
        out = queries.factors.new_zeros((batch, heads, rows, cols))
    else:
        out = torch.zeros(
            (batch, heads, rows, num_words(cols)), dtype=torch.int32, device=gate.q.device
        )
    _fill(out, gate, queries, keys, choice)
    return out


def _project(gate: GateArguments) -> tuple[Vectors, Vectors]:
    """Returns the vectors of row blocks, followed by those of single queries, and of column
    blocks.
    """
    (batch, heads, rows, cols), (_, q_heads, _, head) = gate.map_shape, gate.q.shape
    hidden, k_width = gate.query_weight.shape[1], gate.key_weight.shape[2]
    num_queries, num_keys, offset = gate.lengths
    first = first_query(num_queries, num_keys, gate.kv_start, gate.q.device)
    pooled_q = pooling.launch(gate.q, gate.q_pool, gate.block_size, first, gate.q_rope, gate.single)
    pooled_k, means = gate.pooled_k.contiguous(), 0 if gate.q_rope is None else head
    q_rows = rows + gate.single
    queries, keys = (
        Vectors(
            torch.empty(
                (batch, heads, n, 2, hidden + means), dtype=torch.float16, device=gate.q.device
            ),
            pooled_q.new_empty((batch, heads, n)),
        )
        for n in (q_rows, cols)
    )
    tiles = triton.cdiv(q_rows, ROWS) + triton.cdiv(cols, ROWS)
    _project_kernel[(heads, tiles, batch)](
        pooled_q, pooled_k,
        gate.query_weight, gate.key_weight, gate.inv_freq, gate.kv_start, *queries, *keys,
        q_heads, pooled_k.shape[1], num_queries, num_keys, offset, rows,
        q_rows, cols, hidden**-0.5 * LOG2_E, gate.mean_weight * LOG2_E,
        MEANS=means, Q_WIDTH=len(gate.q_pool.split(",")) * head, K_WIDTH=k_width,
        PARTS=q_heads // heads, HIDDEN=hidden, PAIRS=padded_head(hidden // 2),
        COLS=padded_head(head), BLOCK=gate.block_size, KEY_BLOCK=gate.key_block_size,
        ROWS=ROWS, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return queries, keys


def _fill(
    out: Tensor,
    gate: GateArguments,
    queries: Vectors,
    keys: Vectors,
    choice: Choice | None,
    single: bool = False,
) -> None:
    """Writes the rows of ``out``, slab by slab: those of row blocks, or of ``single`` queries."""
    batch, heads, rows, _ = out.shape
    cols, hidden = keys.factors.shape[2], queries.pairs.shape[4]
    lengths, q_rows = gate.lengths, queries.factors.shape[2]
    tile = LOGITS_TILES[90 if capability(out.device) >= 90 else 80]
    block, first_vector = (1, q_rows - rows) if single else (gate.block_size, 0)
    slabs = [*_slabs(rows, cols, gate, block, single, batch * heads, tile)]
    logits = queries.factors.new_empty(
        max(batch * heads * (stop - first) * width for first, stop, width in slabs)
    )
    last_rows = 0 if gate.last_rows is None else gate.last_rows.shape[2]
    whole, stride_whole = _shared(gate.whole)
    if choice is None:
        choice_args = (None, None, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    else:
        (counts, stride_counts), (local, stride_local) = map(_shared, choice[:2])
        choice_args = (counts, local, stride_counts, stride_local, *choice[2:])
    for first, stop, width in slabs:
        count = stop - first
        place = (first, count, width, rows if single else 0, *lengths)
        sizes = {"BLOCK": block, "KEY_BLOCK": gate.key_block_size, "SINGLE": single}
        grid = triton.cdiv(count, tile.rows) * (width // tile.cols)
        _logits_kernel[(grid, heads, batch)](
            *queries, *keys, logits, gate.kv_start, *place, first_vector, q_rows, cols,
            WIDTH=hidden, ROWS=tile.rows, COLS=tile.cols,
            DEPTH=min(tile.depth, padded_head(hidden)), **sizes,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        padded = max(WORD, triton.next_power_of_2(min(width, cols)))
        _rows_kernel[(count, heads, batch)](
            logits, out, gate.columns, gate.last_rows, whole, gate.kv_start, *choice_args,
            *place, rows, cols, out.shape[3], last_rows, stride_whole,
            COLS=padded, **sizes, **row_options(padded),
        )  # fmt: skip


def _shared(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns numbers or flags of rows, contiguous, and the stride of sequences, 0 if they share
    them.
    """
    if x is None:
        return None, 0
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x, x.stride(0) if len(x) > 1 else 0


def _slabs(
    rows: int,
    cols: int,
    gate: GateArguments,
    block: int,
    single: bool,
    lists: int,
    tile: LogitsTile,
) -> Iterator[tuple[int, int, int]]:
    """Yields the first row of slabs, the row after their last one and their width, the longest rows
    first.

    The width is the number of column blocks that the last row may see, in whole tiles.
    """
    stop = rows
    while stop > 0:
        seen = gate.num_keys if single else stop * block + max(0, gate.lengths[2])
        width = (
            triton.cdiv(min(cols, triton.cdiv(seen, gate.key_block_size)), tile.cols) * tile.cols
        )
        count = max(1, SLAB_BYTES // (4 * lists * width))
        if count > tile.rows:
            count -= count % tile.rows
        yield max(0, stop - count), stop, width
        stop -= count


@triton.jit(
    do_not_specialize=[
        "q_heads", "kv_heads", "num_queries", "num_keys", "offset", "rows", "q_rows", "cols",
    ]
)  # fmt: skip
def _project_kernel(
    pooled_q_ptr, pooled_k_ptr, query_weight_ptr, key_weight_ptr, inv_freq_ptr, kv_start_ptr,
    q_pairs_ptr, q_factors_ptr, k_pairs_ptr, k_factors_ptr,
    q_heads, kv_heads, num_queries, num_keys, offset, rows, q_rows, cols, scale, mean_scale,
    MEANS: tl.constexpr, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, PARTS: tl.constexpr,
    HIDDEN: tl.constexpr, PAIRS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Computes the vectors of some rows of a gate head: query blocks, then single queries, or key
    blocks.

    MEANS channels after the pooled ones, the head size or 0, are means after the model's RoPE.
    """
    h, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, q_tiles = tl.num_programs(0), tl.cdiv(q_rows, ROWS)
    if tile < q_tiles:
        t = tile * ROWS + tl.arange(0, ROWS)
        _, _, _, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
        position = tl.where(t < rows, t, tl.maximum(queries - 1, 0) // BLOCK) * BLOCK + delta
        _project_rows(
            pooled_q_ptr + (b * q_heads + h * q_heads // heads) * q_rows * (Q_WIDTH + MEANS),
            query_weight_ptr, inv_freq_ptr, q_pairs_ptr, q_factors_ptr, b * heads + h, h, t,
            position, q_rows, scale, mean_scale,
            Q_WIDTH, MEANS, PARTS, HIDDEN, PAIRS, COLS, CHUNK,
        )  # fmt: skip
    else:
        t = (tile - q_tiles) * ROWS + tl.arange(0, ROWS)
        _project_rows(
            pooled_k_ptr + (b * kv_heads + h * kv_heads // heads) * cols * (K_WIDTH + MEANS),
            key_weight_ptr, inv_freq_ptr, k_pairs_ptr, k_factors_ptr, b * heads + h, h, t,
            t * KEY_BLOCK, cols, 1.0, 1.0,
            K_WIDTH, MEANS, 1, HIDDEN, PAIRS, COLS, CHUNK,
        )  # fmt: skip


@triton.jit
def _project_rows(
    pooled_ptr, weight_ptr, inv_freq_ptr, pairs_ptr,
    factors_ptr, head, h, t, position, rows, scale, mean_scale,
    WIDTH: tl.constexpr, MEANS: tl.constexpr, PARTS: tl.constexpr, HIDDEN: tl.constexpr,
    PAIRS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the vectors of rows ``t`` of gate head h, of which ``pooled`` has PARTS heads of
    ``rows`` rows.

    The two halves of a vector are separate tiles, so that rotating a pair needs no exchange between
    threads.
    """
    pair, d = tl.arange(0, PAIRS), tl.arange(0, COLS)
    half: tl.constexpr = HIDDEN // 2
    row_ptrs = pooled_ptr + t[:, None].to(tl.int64) * (WIDTH + MEANS)
    first_ptr = weight_ptr + (h.to(tl.int64) * HIDDEN + pair[:, None]) * (PARTS * WIDTH)
    first = tl.zeros([t.shape[0], PAIRS], tl.float32)
    second = tl.zeros([t.shape[0], PAIRS], tl.float32)
    mean = tl.zeros([t.shape[0], COLS], tl.float32)
    inside_mean = (t < rows)[:, None] & (d < MEANS)[None, :]
    for _part in tl.range(0, PARTS):  # type: ignore[misc]
        for start in tl.range(0, WIDTH, CHUNK):  # type: ignore[misc]
            w = start + tl.arange(0, CHUNK)[None, :]
            inside_weight = (pair < half)[:, None] & (w < WIDTH)
            x = tl.load(row_ptrs + w, mask=(t < rows)[:, None] & (w < WIDTH), other=0.0)
            weight = tl.load(first_ptr + w, mask=inside_weight, other=0.0)
            first = tl.dot(x, tl.trans(weight), first, input_precision="tf32x3")
            weight = tl.load(first_ptr + half * PARTS * WIDTH + w, mask=inside_weight, other=0.0)
            second = tl.dot(x, tl.trans(weight), second, input_precision="tf32x3")
        if MEANS > 0:
            mean += tl.load(row_ptrs + WIDTH + d[None, :], mask=inside_mean, other=0.0)
        row_ptrs += rows.to(tl.int64) * (WIDTH + MEANS)  # the next head
        first_ptr += WIDTH
    if inv_freq_ptr is not None:
        angle = (
            position.to(tl.float32)[:, None]
            * tl.load(inv_freq_ptr + pair, mask=pair < half, other=0.0)[None, :]
        )
        cos, sin = tl.cos(angle), tl.sin(angle)
        first, second = first * cos - second * sin, second * cos + first * sin
    first, second, mean = first * scale, second * scale, mean / PARTS * mean_scale
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    largest = tl.maximum(largest, tl.max(tl.abs(mean), 1))
    # biased exponents of powers of two; an infinite vector becomes NaN
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - HEADROOM, 1)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    row = head.to(tl.int64) * rows + t
    tl.store(factors_ptr + row, factor, mask=t < rows)
    pairs_ptr += row[:, None] * (2 * (HIDDEN + MEANS))
    inside = (t < rows)[:, None] & (pair < half)[None, :]
    _store_pair(pairs_ptr + pair[None, :], first * shrink, inside, HIDDEN + MEANS)
    _store_pair(pairs_ptr + half + pair[None, :], second * shrink, inside, HIDDEN + MEANS)
    if MEANS > 0:
        _store_pair(pairs_ptr + HIDDEN + d[None, :], mean * shrink, inside_mean, HIDDEN + MEANS)


@triton.jit
def _store_pair(ptrs, x, inside, WIDTH: tl.constexpr):
    """Stores fp32 numbers as the sum of two fp16 numbers, the second one WIDTH elements later."""
    large = x.to(tl.float16)
    tl.store(ptrs, large, mask=inside)
    tl.store(ptrs + WIDTH, (x - large.to(tl.float32)).to(tl.float16), mask=inside)


@triton.jit
def _row_end(r, first, keys, queries, delta, BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr):
    """Returns the number of column blocks that rows ``r`` see, of BLOCK queries each from token
    ``first`` of their sequence on; 0 in padding.
    """
    t = first + r * BLOCK
    seen = tl.minimum(keys, tl.minimum(t + BLOCK, queries) + delta)
    return tl.where((t >= 0) & (t < queries), tl.cdiv(seen, KEY_BLOCK), 0)


@triton.jit(
    do_not_specialize=[
        "first_row", "single", "num_queries", "num_keys", "offset", "first_vector", "q_rows",
        "cols", "count",
    ]
)  # fmt: skip
def _logits_kernel(
    q_pairs_ptr, q_factors_ptr, k_pairs_ptr, k_factors_ptr, logits_ptr, kv_start_ptr,
    first_row, count, width, single, num_queries, num_keys, offset, first_vector, q_rows, cols,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the logits of a slab, unless none of its rows sees one of its columns."""
    # tiles of the same columns are adjacent for L2 reuse
    tiles = tl.cdiv(count, ROWS)
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tile // tiles * COLS
    own = tile % tiles * ROWS + tl.arange(0, ROWS)
    r = first_row + own
    _, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    first = num_queries - single - first_query if SINGLE else 0
    end = _row_end(r, first, keys, queries, delta, BLOCK, KEY_BLOCK)
    if tl.max(tl.where(own < count, end, 0), 0) <= start:
        return
    head = b.to(tl.int64) * tl.num_programs(1) + h
    c, d = start + tl.arange(0, COLS), tl.arange(0, DEPTH)
    exists_q, exists_k = (own < count)[:, None], (c < cols)[:, None]
    q_row, k_row = head * q_rows + first_vector + r, head * cols + c
    q_ptrs = q_pairs_ptr + q_row[:, None] * (2 * WIDTH) + d[None, :]
    k_ptrs = k_pairs_ptr + k_row[:, None] * (2 * WIDTH) + d[None, :]
    s = tl.zeros([ROWS, COLS], tl.float32)
    for depth in tl.range(0, WIDTH, DEPTH):  # type: ignore[misc]
        in_q, in_k = exists_q, exists_k
        if WIDTH % DEPTH != 0:
            in_q, in_k = in_q & (depth + d < WIDTH)[None, :], in_k & (depth + d < WIDTH)[None, :]
        q_large = tl.load(q_ptrs + depth, mask=in_q, other=0.0)
        k_large = tl.load(k_ptrs + depth, mask=in_k, other=0.0)
        q_small = tl.load(q_ptrs + depth + WIDTH, mask=in_q, other=0.0)
        k_small = tl.load(k_ptrs + depth + WIDTH, mask=in_k, other=0.0)
        s = tl.dot(q_small, tl.trans(k_large), s)
        s = tl.dot(q_large, tl.trans(k_small), s)
        s = tl.dot(q_large, tl.trans(k_large), s)
    s *= tl.load(q_factors_ptr + q_row, mask=own < count, other=0.0)[:, None]
    s *= tl.load(k_factors_ptr + k_row, mask=c < cols, other=0.0)[None, :]
    tl.store(logits_ptr + (head * count + own)[:, None] * width + c[None, :], s, mask=exists_q)


@triton.jit(
    do_not_specialize=[
        "stride_counts", "stride_local", "sink", "threshold", "exponent", "edge_exponent", "above",
        "first_row", "count", "single", "num_queries", "num_keys", "offset", "rows", "out_width",
        "last_rows", "stride_whole",
    ]
)  # fmt: skip
def _rows_kernel(
    logits_ptr, out_ptr, columns_ptr, last_rows_ptr, whole_ptr, kv_start_ptr,
    counts_ptr, local_ptr, stride_counts, stride_local,
    sink, threshold, exponent, edge_exponent, above,
    first_row, count, width, single, num_queries, num_keys,
    offset, rows, cols, out_width, last_rows, stride_whole,
    COLS: tl.constexpr, BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Computes the probabilities of a row from its logits, and stores them or the bits of the
    blocks to read.
    """
    own, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = first_row + own
    _, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    first = num_queries - single - first_query if SINGLE else 0
    end = _row_end(r, first, keys, queries, delta, BLOCK, KEY_BLOCK)
    head = b.to(tl.int64) * tl.num_programs(1) + h
    c = tl.arange(0, COLS)
    seen = c < end
    # up to a multiple of 16 for wide loads; a slab's rows are wider
    s = tl.load(
        logits_ptr + (head * count + own) * width + c, mask=c < tl.cdiv(end, 16) * 16, other=0.0
    )
    s = tl.where(seen, s, float("-inf"))
    m = tl.max(s, 0)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m))  # -inf - -inf is NaN
    total = tl.sum(p, 0)
    p *= 1.0 / tl.where(total != 0, total, 1.0)
    if columns_ptr is not None:
        least = tl.load(columns_ptr + head * cols + c, mask=seen, other=0.0)
        p = tl.where(seen, tl.maximum(p, least, tl.PropagateNan.ALL), 0.0)
        total = tl.sum(p, 0)
        p *= 1.0 / tl.where(total != 0, total, 1.0)
    if last_rows_ptr is not None:
        base = tl.maximum(tl.maximum(queries - 1, 0) // BLOCK - last_rows + 1, 0)
        place = r - base
        if (place >= 0) & (place < last_rows):
            given = tl.load(
                last_rows_ptr + (head * last_rows + place) * cols + c, mask=seen, other=0.0
            )
            larger = tl.maximum(p, given, tl.PropagateNan.ALL)
            if whole_ptr is not None:
                whole = tl.load(whole_ptr + b * stride_whole + place) != 0
                larger = tl.where(whole, given, larger)
            p = larger
    out_ptr += (head * rows + r) * out_width
    if counts_ptr is None:
        tl.store(out_ptr + c, tl.where(seen, p, 0.0), mask=c < cols)
    else:
        always = seen & ((c < sink) | (c >= tl.load(local_ptr + b * stride_local + r)))
        wanted = tl.load(counts_ptr + b * stride_counts + r)
        taken = best_of_row(p, seen, always, wanted, threshold, exponent, edge_exponent, above)
        bits = tl.reshape(taken.to(tl.int32), [COLS // 32, 32]) << tl.arange(0, 32)[None, :]
        word = tl.arange(0, COLS // 32)
        tl.store(out_ptr + word, tl.sum(bits, 1), mask=word < out_width)

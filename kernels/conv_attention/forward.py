"""Attention whose scores are a sum of products, ``A_h = sum over t < T of X_t Y_t^T``; the gradient is next door.

This is what a convolution of the scores (:mod:`msattn.kernels.conv_attention.operation`) becomes, once its weights have moved into the
keys:

    X_t = queries of head h, T - 1 - t further up       ``x [B, H, N, D]``
    Y_t = keys prepared for head h and term t           ``y [B, H * T, M, D]``

The forward pass is FlashAttention with an inner loop over terms: ``(T + 1) / 2`` times the work of dense attention, all of it
on tensor cores. Scores less than w keys before the query (or at it) may be given instead, ``band [B, H, N, w]``. Without a
causal order every query enters scores, those of the padding too: X must be 0 there.

A tile of scores takes T tiles of queries and T of keys, and what they read from the L2 cache is what takes the time. Where the
queries of all terms fit in shared memory beside the keys, a program reads them once and keeps them; the loop over terms is then
unrolled, and keys of the next tile are on their way while this one is multiplied.

Prefixes: p_ pointer. Programs: (row tile, head, sequence).
"""

from typing import NamedTuple

from torch import Tensor

from msattn.kernels import tuned
from msattn.kernels.common import score_products
from msattn.kernels.common.checks import query_offset
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

RESIDENT_BYTES = 384  # of a query in all terms, up to which they fit beside the keys (and, backward, what is written)
L2_BYTES = 2**25  # of keys that are read again and again


class Scores(NamedTuple):
    """What scores are made of (layouts: top of the file); ``band`` is fp32, ``[B, H, N, w]``."""

    x: Tensor
    y: Tensor
    terms: int
    band: Tensor | None = None

    @property
    def width(self) -> int:
        """Keys before a query, itself included, whose scores come from the band."""
        return 0 if self.band is None else self.band.shape[3]

    @property
    def resident(self) -> int:
        """Terms whose queries stay in shared memory: all or none."""
        size = self.terms * tuned.head_bytes(padded_head(self.x.shape[3]), self.x.dtype)
        return self.terms if size <= RESIDENT_BYTES else 0

    def tile(self, kernel: str) -> tuned.Tile:
        """The tile for one of the two kernels, by what it keeps."""
        kind = f"{kernel}_resident" if self.resident else kernel
        return tuned.pick(kind, padded_head(self.x.shape[3]), self.x.dtype, capability(self.x.device))


def kv_slices(kv_heads: int, elements: int) -> list[slice]:
    """Key/value heads that go together, when each of them needs a scratch of so many elements."""
    size = min(kv_heads, max(1, score_products.SCRATCH // elements))
    return [slice(first, min(first + size, kv_heads)) for first in range(0, kv_heads, size)]


def attend(
    scores: Scores,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
    tile: tuned.Tile | None = None,
) -> None:
    """Write ``out [B, H, N, D]`` and ``lse [B, H, N]``, heads of contiguous tensors; ``v [B, Hkv, M, D]``."""
    batch, heads, num_queries, head = out.shape
    kv_heads, num_keys = v.shape[1:3]
    cols = padded_head(head)
    tile = tile or scores.tile("conv_attention")
    row_blocks = triton.cdiv(num_queries, tile.rows)
    together = max(1, L2_BYTES // ((scores.terms + 1) * num_keys * head * v.itemsize))
    _attend_kernel[(batch * heads * row_blocks,)](
        tile_view(scores.x, tile.rows), tile_view(scores.y, tile.keys), tile_view(v, tile.keys),
        out, lse, scores.band, kv_start, *out.stride()[:3], heads_apart(lse),
        heads // kv_heads, heads, batch * heads, together, scores.terms, num_queries, num_keys, row_blocks,
        query_offset(num_queries, num_keys, causal), scores.width, scale * LOG2_E,
        HEAD=head, COLS=cols, BM=tile.rows, BN=tile.keys, RESIDENT=scores.resident, CAUSAL=causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def heads_apart(x: Tensor) -> int:
    """Heads of the contiguous tensor ``[B, H, ...]`` of which x may be a part."""
    return x.stride(0) // x.stride(1)


@triton.jit
def resident_queries(x_desc, b, h, row, RESIDENT: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr):
    """Tiles of the queries of all terms, from the given row of the last term on."""
    xs = ()
    for term in tl.static_range(RESIDENT):  # type: ignore[misc]
        xs = xs + (load_tile(x_desc, b, h, row + term - (RESIDENT - 1), BM, COLS),)  # noqa: RUF005
    return xs


@triton.jit(do_not_specialize=["terms"])
def sum_products(
    xs, x_desc, y_desc, b, h, row, key, terms,
    RESIDENT: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores ``[BM, BN]`` of the rows and keys from the given ones on; ``xs``: :func:`resident_queries`, if any are."""
    s = tl.zeros([BM, BN], tl.float32)
    if RESIDENT > 0:
        for term in tl.static_range(RESIDENT):  # type: ignore[misc]
            y = load_tile(y_desc, b, h * RESIDENT + term, key, BN, COLS)
            s = tl.dot(xs[term], tl.trans(y), s, input_precision=PRECISION)
    else:
        for term in tl.range(0, terms):  # type: ignore[misc]
            x = load_tile(x_desc, b, h, row + term - (terms - 1), BM, COLS)
            y = load_tile(y_desc, b, h * terms + term, key, BN, COLS)
            s = tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    return s


@triton.jit
def mask_and_band(s, p_band, row, exists, t, u, num_keys, delta, width, CAUSAL: tl.constexpr):
    """Scores with those of the band in their places, and -inf where the key does not exist or comes after the query.

    ``row`` of a head's band ``p_band [N, w]`` is that of query ``t [BM]``, if the query ``exists``.
    """
    if p_band is not None:
        distance = t[:, None] + delta - u[None, :]
        near = (distance >= 0) & (distance < width)
        banded = tl.load(p_band + (row[:, None] * width + distance), mask=near & exists[:, None], other=0.0)
        s = tl.where(near, banded, s)
    return mask_scores(s, t, u, num_keys, delta, CAUSAL)


@triton.jit(
    do_not_specialize=[
        "lse_heads", "group", "heads", "all_heads", "together", "terms", "row_blocks", "width"
    ]
)  # fmt: skip
def _attend_kernel(
    x_desc, y_desc, v_desc, p_out, p_lse, p_band, p_kv_start,
    stride_b, stride_h, stride_n, lse_heads,
    group, heads, all_heads, together, terms, num_queries, num_keys, row_blocks, offset, width, scale2,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RESIDENT: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # As many heads go together as the L2 cache holds keys of; their long rows come first, so that programs end together.
    pid = tl.program_id(0)
    first_head = pid // (together * row_blocks) * together
    pid -= first_head * row_blocks
    together = tl.minimum(together, all_heads - first_head)
    r = row_blocks - 1 - pid // together
    h, b = (first_head + pid % together) % heads, (first_head + pid % together) // heads
    first_key, first_query, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    t0 = r * BM
    t = t0 + tl.arange(0, BM)
    last, full = keys, keys // BN  # keys that some query of the tile sees; tiles that all of them see, beyond the band
    if CAUSAL:
        last = tl.minimum(keys, tl.minimum(t0 + BM, queries) + delta)
        full = tl.minimum(keys, tl.maximum(t0 + delta + 1 - width, 0)) // BN
    tiles = tl.where(t0 < queries, tl.cdiv(last, BN), 0)
    if p_band is not None:
        p_band += (b * heads + h).to(tl.int64) * num_queries * width

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    row = first_query + t0
    xs = resident_queries(x_desc, b, h, row, RESIDENT, COLS, BM)
    for n in tl.range(0, tiles):  # type: ignore[misc]
        u0 = n * BN
        s = sum_products(xs, x_desc, y_desc, b, h, row, first_key + u0, terms, RESIDENT, COLS, BM, BN, PRECISION)
        if n >= full:
            s = mask_and_band(s, p_band, first_query + t, t < queries, t, u0 + tl.arange(0, BN), keys, delta, width, CAUSAL)
        v = load_tile(v_desc, b, h // group, first_key + u0, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_end(m, l, acc, t < queries)
    store_rows(p_out, p_lse, out, lse2, b, h, t, first_query, lse_heads, num_queries,
               stride_b, stride_h, stride_n, HEAD, COLS)  # fmt: skip

"""Forward pass of conv_attention: scores ``A_h = sum over t < T of X_t Y_t^T``.

Convolved scores have this form if the weights are applied to the keys
(:mod:`msattn.kernels.multi_token.conv_attention.operation`):

    X_t = queries of head h, shifted by T - 1 - t rows       ``x [B, H, N, D]``
    Y_t = keys prepared for head h and term t                ``y [B, H * T, M, D]``

The kernel is FlashAttention with an inner loop over terms: ``(T + 1) / 2`` times the work of dense
attention, all of it on tensor cores. Scores of the last w keys up to the query are read from
``band [B, H, N, w]`` instead, if given. Without a causal mask all queries contribute to scores,
including the padding, where X must be 0.

A tile of scores needs T tiles of queries and T of keys, and L2 bandwidth is the bottleneck. If the
queries of all terms fit in shared memory together with the keys, a program loads them once and
keeps them there (*resident* queries); the loop over terms is then unrolled, and the keys of the
next tile are prefetched.

Grid: one dimension, ordered by group of heads, row tile and head.
"""

from typing import NamedTuple

from torch import Tensor

from msattn.kernels import tuned
from msattn.kernels.common.checks import query_offset
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
from msattn.kernels.multi_token import score_products

# Largest size of a query row times terms with which queries and keys fit in shared memory, also in
# the backward pass.
RESIDENT_BYTES = 384
L2_BYTES = 2**25  # L2 cache for the keys and values that concurrent programs share


class ScoreFactors(NamedTuple):
    """Operands of the scores (layouts in the module docstring).

    ``band`` is fp32 ``[B, H, N, w]``.
    """

    x: Tensor
    y: Tensor
    terms: int
    band: Tensor | None = None

    @property
    def width(self) -> int:
        """Width w of the band: the last w keys up to a query."""
        return 0 if self.band is None else self.band.shape[3]

    @property
    def resident(self) -> int:
        """Number of terms whose queries stay in shared memory: all, or 0."""
        size = self.terms * tuned.head_bytes(padded_head(self.x.shape[3]), self.x.dtype)
        return self.terms if size <= RESIDENT_BYTES else 0

    def tile(self, kernel: str) -> tuned.Tile:
        """Returns the tuned tile of a kernel, for resident queries or others."""
        kind = f"{kernel}_resident" if self.resident else kernel
        return tuned_tile(kind, self.x)


def kv_slices(kv_heads: int, elements: int) -> list[slice]:
    """Splits the key/value heads, each with ``elements`` of scratch, to fit the limit."""
    size = min(kv_heads, max(1, score_products.SCRATCH_ELEMENTS // elements))
    return [slice(first, min(first + size, kv_heads)) for first in range(0, kv_heads, size)]


def conv_attention_forward(
    factors: ScoreFactors,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """Writes attention from score factors and ``v [B, Hkv, M, D]``.

    ``out [B, H, N, D]`` and ``lse [B, H, N]`` are slices, by heads, of contiguous tensors.
    """
    batch, heads, num_queries, head = out.shape
    kv_heads, num_keys = v.shape[1:3]
    cols = padded_head(head)
    tile = factors.tile("conv_attention")
    row_blocks = triton.cdiv(num_queries, tile.rows)
    l2_heads = max(1, L2_BYTES // ((factors.terms + 1) * num_keys * head * v.itemsize))
    _conv_attention_kernel[(batch * heads * row_blocks,)](
        tile_view(factors.x, tile.rows), tile_view(factors.y, tile.keys), tile_view(v, tile.keys),
        out, lse, factors.band, kv_start, *out.stride()[:3], parent_heads(lse),
        heads // kv_heads, heads, batch * heads, l2_heads,
        factors.terms, num_queries, num_keys, row_blocks,
        query_offset(num_queries, num_keys, causal), factors.width, scale * LOG2_E,
        HEAD=head, COLS=cols, BM=tile.rows, BN=tile.keys, RESIDENT=factors.resident,
        CAUSAL=causal, PRECISION=precision(v.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def parent_heads(x: Tensor) -> int:
    """Returns the number of heads of the contiguous tensor of which x is a slice."""
    return x.stride(0) // x.stride(1)


@triton.jit
def load_resident_queries(
    x_desc, b, h, row, RESIDENT: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr
):
    """Loads the query tiles of all terms; the last term starts at ``row``."""
    xs = ()
    for term in tl.static_range(RESIDENT):  # type: ignore[misc]
        xs = xs + (load_tile(x_desc, b, h, row + term - (RESIDENT - 1), BM, COLS),)  # noqa: RUF005
    return xs


@triton.jit(do_not_specialize=["terms"])
def sum_products(
    xs, x_desc, y_desc, b, h, row, key, terms,
    RESIDENT: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes scores ``[BM, BN]``, summed over terms, from ``row`` and ``key`` on.

    ``xs`` are the query tiles of :func:`load_resident_queries`, if resident.
    """
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
def apply_band_and_mask(
    s, band_ptr, row, exists, t, u, num_keys, delta, width, CAUSAL: tl.constexpr
):
    """Inserts the scores of the band, then masks keys that do not exist or are later.

    ``row`` is the row of query ``t [BM]`` in the band of a head, ``band_ptr`` ``[N, w]``, if the
    query ``exists``.
    """
    if band_ptr is not None:
        distance = t[:, None] + delta - u[None, :]
        near = (distance >= 0) & (distance < width)
        banded = tl.load(
            band_ptr + (row[:, None] * width + distance), mask=near & exists[:, None], other=0.0
        )
        s = tl.where(near, banded, s)
    return mask_scores(s, t, u, num_keys, delta, CAUSAL)


@triton.jit(
    do_not_specialize=[
        "lse_heads", "group", "heads", "all_heads", "l2_heads", "terms", "row_blocks", "width"
    ]
)  # fmt: skip
def _conv_attention_kernel(
    x_desc, y_desc, v_desc, out_ptr, lse_ptr, band_ptr, kv_start_ptr,
    stride_b, stride_h, stride_n, lse_heads,
    group, heads, all_heads, l2_heads, terms, num_queries,
    num_keys, row_blocks, offset, width, scale2,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, RESIDENT: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs of l2_heads heads, whose keys fit in L2, are adjacent; the longest rows come first to
    # balance the load.
    pid = tl.program_id(0)
    first_head = pid // (l2_heads * row_blocks) * l2_heads
    pid -= first_head * row_blocks
    l2_heads = tl.minimum(l2_heads, all_heads - first_head)
    r = row_blocks - 1 - pid // l2_heads
    h, b = (first_head + pid % l2_heads) % heads, (first_head + pid % l2_heads) // heads
    first_key, first_query, keys, queries, delta = sequence_span(
        kv_start_ptr, b, num_queries, num_keys, offset
    )
    t0 = r * BM
    t = t0 + tl.arange(0, BM)
    last, full = keys, keys // BN  # end of the visible keys; number of full tiles outside the band
    if CAUSAL:
        last = tl.minimum(keys, tl.minimum(t0 + BM, queries) + delta)
        full = tl.minimum(keys, tl.maximum(t0 + delta + 1 - width, 0)) // BN
    tiles = tl.where(t0 < queries, tl.cdiv(last, BN), 0)
    if band_ptr is not None:
        band_ptr += (b * heads + h).to(tl.int64) * num_queries * width

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, COLS], tl.float32)
    row = first_query + t0
    xs = load_resident_queries(x_desc, b, h, row, RESIDENT, COLS, BM)
    for n in tl.range(0, tiles):  # type: ignore[misc]
        u0 = n * BN
        s = sum_products(
            xs, x_desc, y_desc, b, h, row, first_key + u0, terms, RESIDENT, COLS, BM, BN, PRECISION
        )
        if n >= full:
            s = apply_band_and_mask(
                s,
                band_ptr,
                first_query + t,
                t < queries,
                t,
                u0 + tl.arange(0, BN),
                keys,
                delta,
                width,
                CAUSAL,
            )
        v = load_tile(v_desc, b, h // group, first_key + u0, BN, COLS)
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    out, lse2 = softmax_finalize(m, l, acc, t < queries)
    store_rows(out_ptr, lse_ptr, out, lse2, b, h, t, first_query, lse_heads, num_queries,
               stride_b, stride_h, stride_n, HEAD, COLS)  # fmt: skip

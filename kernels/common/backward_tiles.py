"""What the two passes of the gradient of a sparse attention share.

    P = exp(S - lse)    dP = dO V^T    dS = P * (dP - rowsum(dO * O) + dlse)

The first owns query rows, gives dQ and leaves the terms of its rows, fp32 ``[B, Hq, 2, N]``: LSEs in base 2 and ``rowsum(dO *
O) - dlse``, queries counted from where the sequence starts. The second owns keys and reads the terms, by a descriptor that is
fast to load from, for dK and dV.
"""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import load_lse2, load_tile, tile_view, tl, triton

TERMS = tl.constexpr(32)  # in a descriptor's tile, at least: 128 bytes, or the tiles of a pipeline would not be aligned


def empty_terms(lse: Tensor) -> Tensor:
    """Room for the terms of rows; strides are multiples of 16 bytes, as descriptors want."""
    batch, heads, num_queries = lse.shape
    return torch.empty((batch, heads, 2, (num_queries + 3) // 4 * 4), dtype=torch.float32, device=lse.device)


def terms_view(terms: Tensor, num_queries: int, rows: int):
    """Descriptor of the terms, for tiles of so many query rows."""
    return tile_view(terms[..., :num_queries], 1, max(rows, TERMS.value))


@triton.jit
def load_rows(
    q_desc, out_desc, dout_desc, p_lse, p_dlse, p_terms, b, h, q_heads, t0, first_query, queries, num_queries, stride_terms,
    BM: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows of q and dO from query t0 on and their terms ``[BM]``, which are stored, too."""
    t = t0 + tl.arange(0, BM)
    head = (b * q_heads + h).to(tl.int64)
    lse2 = load_lse2(p_lse + head * num_queries + first_query, t, queries)
    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
    out = load_tile(out_desc, b, h, first_query + t0, BM, COLS)
    row_term = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    row_term -= tl.load(p_dlse + head * num_queries + first_query + t, mask=t < queries, other=0.0)
    row_term = tl.where(lse2 == float("inf"), 0.0, row_term)  # whatever the loss does with an LSE of -inf
    p_terms += head * 2 * stride_terms + t
    tl.store(p_terms, lse2, mask=t < num_queries)
    tl.store(p_terms + stride_terms, row_term, mask=t < num_queries)
    if COLS * q.dtype.primitive_bitwidth <= 2048:
        # What is computed, not loaded, and used in two loops stays in registers as a first factor: less traffic in shared
        # memory, and room there to load further ahead.
        exists = (t < queries)[:, None]
        q, dout = tl.where(exists, q, 0.0), tl.where(exists, dout, 0.0)
    return q, dout, lse2, row_term


@triton.jit
def dq_step(dq, s, dout, k, v, lse2, row_term, scale2, PRECISION: tl.constexpr):
    """Add what keys give, from their scores ``s [BM, BN]`` on."""
    p = tl.exp2(s * scale2 - lse2[:, None])
    ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - row_term[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dkv_step(
    dk, dv, k, v, bias, q_desc, dout_desc, terms_desc, b, h, first_query, t0, u, delta, scale2,
    BM: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries of head h from t0 on give; ``bias [BN]``, or None, goes onto the scores.

    Scores stand transposed, [BN, BM], so that P^T and dS^T go into their products straight from registers.
    """
    q = load_tile(q_desc, b, h, first_query + t0, BM, COLS)
    dout = load_tile(dout_desc, b, h, first_query + t0, BM, COLS)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if bias is not None:
        s += bias[:, None]
    if MASK:
        s = tl.where(u[:, None] <= (t0 + tl.arange(0, BM))[None, :] + delta, s, float("-inf"))
    p = tl.exp2(s * scale2 - _load_terms(terms_desc, b, h, 0, t0, BM))
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    ds = p * (dp - _load_terms(terms_desc, b, h, 1, t0, BM))
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def _load_terms(desc, b, h, term, t0, BM: tl.constexpr):
    """One of the two terms of BM rows, ``[1, BM]``."""
    SETS: tl.constexpr = max(1, TERMS // BM)  # type: ignore[assignment]  # the rows that are wanted, and others after them
    terms = tl.reshape(desc.load([b, h, term, t0]), [SETS, BM])
    if SETS == 1:
        return terms
    return tl.sum(tl.where(tl.arange(0, SETS)[:, None] == 0, terms, 0.0), 0)[None, :]

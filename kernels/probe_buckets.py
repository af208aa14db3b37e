"""Routing of a decoding step (SAAP, arXiv 2502.08246, section 4): a small network scores the buckets, the best are visited.

For the query group of a key/value head, with the classifier of each of its queries q::

    score[c] = sum over the queries of softmax_c(relu(q W_in + b_in) W_out + b_out)        probes = the L largest

One token's rows are few and the weights many, so reading the weights is what takes time: they are read once. A program takes a
slab of the hidden layer, whose columns of W_in and rows of W_out belong together, and leaves its share of the logits; a second
kernel adds the shares of a query group and finds the L-th largest score bit by bit: positive floats are ordered as integers.

Tiles: BM queries of a classifier, BF hidden units, BC buckets, BD head size, BP all buckets. Prefix: p_ pointer. Programs:
(slab, classifier, row tile), then (key/value head, sequence).
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.checks import check_probe_buckets, resolve_backend
from msattn.kernels.primitives import LOG2_E, padded_head, precision, tl, triton
from msattn.kernels.types import Backend

SLAB = 64  # hidden units of a program: 16 of them for 1024, so that 8 classifiers occupy a GPU
LOG2_E_ = tl.constexpr(LOG2_E)


def probe_buckets(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    kv_heads: int,
    probes: int,
    backend: Backend | None = None,
) -> Tensor:
    """The buckets that one token's query groups visit, by classifiers ``D -> hidden -> C`` with ReLU.

    Parameters
    ----------
    q : Tensor ``[B, Hq, 1, D]``
        Queries as the classifiers were trained on; fp32, fp16 or bf16 (fp64 on the torch backend). Views are read as they are.
    weight_in, bias_in : Tensor ``[H, D, F]``, ``[H, 1, F]``
        First layer of each classifier, in q's dtype; query head h goes through classifier ``h // (Hq // H)``.
    weight_out, bias_out : Tensor ``[H, F, C]``, ``[H, 1, C]``
        Second layer.
    kv_heads : int
        Query groups, each of which sums the probabilities of its queries.
    probes : int
        Buckets to choose, L, 0 to C.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor int32 ``[B, kv_heads, L]``
        In no particular order; the kernel takes lower numbers first among buckets that tie for the last place.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name.
    """
    check_probe_buckets(q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes)
    return _operator(q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes, resolve_backend(backend, q))


@torch.library.custom_op("msattn::probe_buckets", mutates_args=())
def _operator(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    kv_heads: int,
    probes: int,
    backend: str,
) -> Tensor:
    if backend == "triton":
        with torch.cuda.device_of(q):
            return launch(q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes)
    return reference.probe_buckets(q, weight_in, bias_in, weight_out, bias_out, kv_heads=kv_heads, probes=probes)


@_operator.register_fake
def _(q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes, backend):
    return q.new_empty((len(q), kv_heads, probes), dtype=torch.int32)


def launch(
    q: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, kv_heads: int, probes: int
) -> Tensor:
    """Run both kernels; the grid follows shapes alone."""
    batch, q_heads, _, head = q.shape
    classifiers, hidden, num_buckets = weight_out.shape
    weights = [x.contiguous() for x in (weight_in, bias_in, weight_out, bias_out)]
    rows, slabs = batch * q_heads // classifiers, triton.cdiv(hidden, SLAB)
    full = q.dtype == torch.float32
    shares = q.new_empty((slabs, batch, q_heads, num_buckets), dtype=torch.float32)
    _share_kernel[(slabs, classifiers, triton.cdiv(rows, 16))](
        q, *weights, shares, q.stride(0), q.stride(1), q.stride(3),
        q_heads // classifiers, rows, hidden, num_buckets,
        HEAD=head, BM=16, BF=SLAB, BC=64 if full else 128, BD=padded_head(head), PRECISION=precision(q.dtype),
        num_warps=4, num_stages=2 if full else 5,
    )  # fmt: skip
    chosen = q.new_empty((batch, kv_heads, probes), dtype=torch.int32)
    padded = triton.next_power_of_2(num_buckets)
    if probes:
        _choose_kernel[(kv_heads, batch)](
            shares, chosen, slabs, q_heads // kv_heads, num_buckets, probes,
            BP=padded, num_warps=max(4, min(16, padded // 128)),
        )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["rows", "heads_each"])
def _share_kernel(
    q, weight_in, bias_in, weight_out, bias_out, shares, stride_qb, stride_qh, stride_qd,
    heads_each, rows, hidden, num_buckets,
    HEAD: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``shares [slabs, B, Hq, C]`` of the logits; the first slab's include the bias."""
    slab, classifier = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    m_row = row < rows
    batch, head = row // heads_each, classifier * heads_each + row % heads_each
    unit, o_d = slab * BF + tl.arange(0, BF), tl.arange(0, BD)
    m_unit, m_d = unit < hidden, o_d < HEAD
    p_q = q + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)[:, None] + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0)
    p_in = weight_in + (classifier.to(tl.int64) * HEAD + o_d[:, None]) * hidden + unit[None, :]
    b_in = tl.load(p_in, mask=m_d[:, None] & m_unit[None, :], other=0.0)  # [BD, BF]
    bias = tl.load(bias_in + classifier * hidden + unit, mask=m_unit, other=0.0).to(tl.float32)
    h = tl.maximum(tl.dot(b_q, b_in, input_precision=PRECISION) + bias[None, :], 0.0).to(q.dtype.element_ty)  # [BM, BF]

    weight_out += (classifier.to(tl.int64) * hidden + unit[:, None]) * num_buckets
    p_share = shares + ((slab * tl.cdiv(rows, heads_each) + batch) * tl.num_programs(1) * heads_each + head) * num_buckets
    for c in tl.range(0, num_buckets, BC):
        bucket = c + tl.arange(0, BC)
        m_bucket = bucket < num_buckets
        b_out = tl.load(weight_out + bucket[None, :], mask=m_unit[:, None] & m_bucket[None, :], other=0.0)  # [BF, BC]
        share = tl.dot(h, b_out, input_precision=PRECISION)
        offset = tl.load(bias_out + classifier * num_buckets + bucket, mask=m_bucket & (slab == 0), other=0.0)
        share += offset.to(tl.float32)[None, :]
        tl.store(p_share[:, None] + bucket[None, :], share, mask=m_row[:, None] & m_bucket[None, :])


@triton.jit(do_not_specialize=["slabs", "group", "probes"])
def _choose_kernel(shares, chosen, slabs, group, num_buckets, probes, BP: tl.constexpr):
    """The ``probes`` best buckets of one query group."""
    kv_head, batch = tl.program_id(0), tl.program_id(1)
    q_heads = tl.num_programs(0) * group
    bucket = tl.arange(0, BP)
    m_bucket = bucket < num_buckets
    score = tl.zeros([BP], tl.float32)
    for g in tl.range(0, group):
        p_share = shares + (batch * q_heads + kv_head * group + g) * num_buckets + bucket
        logit = tl.zeros([BP], tl.float32)
        for slab in tl.range(0, slabs, loop_unroll_factor=8):
            logit += tl.load(p_share + slab * tl.num_programs(1) * q_heads * num_buckets, mask=m_bucket, other=0.0)
        logit = tl.where(m_bucket, logit * LOG2_E_, float("-inf"))
        p = tl.exp2(logit - tl.max(logit, 0))
        score += p / tl.sum(p, 0)

    bits = tl.where(m_bucket, score.to(tl.int32, bitcast=True), -1)
    least = tl.zeros((), tl.int32)  # the L-th largest: the largest number that L buckets reach
    for n in tl.range(0, 31):
        tried = least | (1 << (30 - n))
        least = tl.where(tl.sum((bits >= tried).to(tl.int32), 0) >= probes, tried, least)
    above, equal = bits > least, (bits == least).to(tl.int32)
    needed = probes - tl.sum(above.to(tl.int32), 0)
    take = above | ((equal > 0) & (tl.cumsum(equal, 0) <= needed))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + (batch * tl.num_programs(0) + kv_head) * probes + place, bucket, mask=take)

"""Routing of a decoding step (SAAP, arXiv 2502.08246, section 4): a small network scores the buckets, the best are visited.

For the query group of a key/value head, with the classifier of each of its queries q::

    score[c] = sum over the queries of softmax_c(relu(q W_in + b_in) W_out + b_out)        probes = the L largest

One token's rows are few and the weights many, so reading the weights is what takes time: those of the second layer once, all
that a program reads on its way before it needs any. A program takes a slab of the hidden layer, whose columns of W_in and rows
of W_out belong together, and a block of buckets, and leaves its share of the logits. A second kernel adds the shares of a query
group and finds the scores to take by halving an interval of their bits: positive floats are ordered as integers.

Tiles: BM queries of a classifier; STEPS times BF hidden units, a slab; BC buckets; BD head size; BG queries of a group, BP all
buckets. Prefixes: b_ tile, p_ pointer, m_ mask. Programs: (slab and block, classifier, row tile), then (key/value head,
sequence).
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.bucket_checks import check_probe_buckets
from msattn.kernels.common.checks import resolve_backend
from msattn.kernels.common.primitives import (
    LOG2_E,
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    precision,
    tl,
    triton,
)
from msattn.kernels.types import Backend

LOG2_E_ = tl.constexpr(LOG2_E)
SLAB_BYTES = 96 * 1024  # of shared memory, for slabs of logits that are on their way together


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
    units, columns = (32, 64) if q.dtype == torch.float32 else (128, 256)
    heads_each, rows = q_heads // classifiers, batch * q_heads // classifiers
    slabs, blocks = triton.cdiv(hidden, units), triton.cdiv(num_buckets, columns)
    shares = q.new_empty((slabs, batch, q_heads, num_buckets), dtype=torch.float32)
    _share_kernel[(slabs * blocks, classifiers, triton.cdiv(rows, 16))](
        q, *weights[:3], shares, q.stride(0), q.stride(1), q.stride(3),
        heads_each, rows, hidden, num_buckets, blocks,
        HEAD=head, STEPS=2, BM=16, BF=units // 2, BC=columns, BD=padded_head(head), PRECISION=precision(q.dtype),
        num_warps=8, num_stages=3, **pdl_args(q.device),
    )  # fmt: skip
    chosen = q.new_empty((batch, kv_heads, probes), dtype=torch.int32)
    group = q_heads // kv_heads
    groups, padded = triton.next_power_of_2(group), triton.next_power_of_2(num_buckets)
    if probes:
        _choose_kernel[(kv_heads, batch)](
            shares, weights[3], chosen, slabs, group, heads_each, num_buckets, probes,
            BG=groups, BP=padded, STAGES=1 + min(7, SLAB_BYTES // (4 * padded * groups)),
            num_warps=4, **pdl_args(q.device),
        )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["heads_each", "rows", "blocks"])
def _share_kernel(
    q, weight_in, bias_in, weight_out, shares, stride_qb, stride_qh, stride_qd,
    heads_each, rows, hidden, num_buckets, blocks,
    HEAD: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``shares [slabs, B, Hq, C]`` of the logits, without the bias."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    slab, block, classifier = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    m_row = row < rows
    batch, head = row // heads_each, classifier * heads_each + row % heads_each
    bucket, o_d = block * BC + tl.arange(0, BC), tl.arange(0, BD)
    m_bucket, m_d = bucket < num_buckets, o_d < HEAD
    p_q = q + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)[:, None] + o_d[None, :] * stride_qd
    o_step, every = tl.arange(0, STEPS), slab * STEPS * BF + tl.arange(0, STEPS * BF)
    biases = tl.load(bias_in + classifier * hidden + every, mask=every < hidden, other=0.0).to(tl.float32)
    biases = tl.reshape(biases, [STEPS, BF])
    share = tl.zeros([BM, BC], tl.float32)
    # As many buffers as steps: everything is on its way before the first product. The queries would be too early, and waited
    # for, if their mask did not name the step.
    for step in tl.range(0, STEPS):
        unit = (slab * STEPS + step) * BF + tl.arange(0, BF)
        m_unit = unit < hidden
        b_q = tl.load(p_q, mask=(m_row & (step < STEPS))[:, None] & m_d[None, :], other=0.0)  # [BM, BD]
        p_in = weight_in + (classifier * HEAD + o_d[:, None]) * hidden + unit[None, :]
        b_in = tl.load(p_in, mask=m_d[:, None] & m_unit[None, :], other=0.0)  # [BD, BF]
        p_out = weight_out + (classifier * hidden + unit[:, None]) * num_buckets + bucket[None, :]
        b_out = tl.load(p_out, mask=m_unit[:, None] & m_bucket[None, :], other=0.0)  # [BF, BC]
        bias = tl.sum(tl.where((o_step == step)[:, None], biases, 0.0), 0)
        h = tl.maximum(tl.dot(b_q, b_in, input_precision=PRECISION) + bias[None, :], 0.0)  # [BM, BF]
        share = tl.dot(h.to(q.dtype.element_ty), b_out, share, input_precision=PRECISION)
    row = (slab * tl.cdiv(rows, heads_each) + batch).to(tl.int64) * tl.num_programs(1) * heads_each + head
    tl.store(shares + row[:, None] * num_buckets + bucket[None, :], share, mask=m_row[:, None] & m_bucket[None, :])


@triton.jit(do_not_specialize=["slabs", "group", "heads_each", "probes"])
def _choose_kernel(
    shares, bias_out, chosen, slabs, group, heads_each, num_buckets, probes, BG: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The ``probes`` best buckets of one query group."""
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_heads = tl.num_programs(0) * group
    o_head, bucket = tl.arange(0, BG), tl.arange(0, BP)
    m_bucket = bucket < num_buckets
    m_logit = (o_head < group)[:, None] & m_bucket[None, :]
    p_share = shares + (batch * q_heads + kv_head * group + o_head)[:, None] * num_buckets + bucket[None, :]
    p_bias = bias_out + (kv_head * group + o_head) // heads_each * num_buckets
    logit = tl.load(p_bias[:, None] + bucket[None, :], mask=m_logit, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    # As asynchronous copies: loads that add to registers come one after the other, however far they are unrolled.
    for slab in tl.range(0, slabs, num_stages=STAGES):  # type: ignore[misc]
        logit += tl.load(p_share + slab * tl.num_programs(1) * q_heads * num_buckets, mask=m_logit, other=0.0)
    logit = tl.where(m_bucket[None, :], logit * LOG2_E_, float("-inf"))
    p = tl.exp2(logit - tl.max(logit, 1)[:, None])
    score = tl.sum(tl.where(m_logit, p / tl.sum(p, 1)[:, None], 0.0), 0)

    # `reached` scores, as many as wanted or more, are `low` or larger; fewer are `high` or larger.
    bits = tl.where(m_bucket, score.to(tl.int32, bitcast=True), -1)
    low, high = tl.min(tl.where(m_bucket, bits, 0x7FFFFFFF), 0), tl.max(bits, 0) + 1
    reached = num_buckets
    while (reached != probes) & (low + 1 < high):
        middle = low + ((high - low) >> 1)
        count = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(count >= probes, middle, low)
        high = tl.where(count >= probes, high, middle)
        reached = tl.where(count >= probes, count, reached)
    take = bits >= low
    if reached != probes:  # the last of them are equal: take the first
        last = (bits == low).to(tl.int32)
        take = take & ((last == 0) | (tl.cumsum(last, 0) <= probes - reached + tl.sum(last, 0)))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + (batch * tl.num_programs(0) + kv_head) * probes + place, bucket, mask=take & (place < probes))

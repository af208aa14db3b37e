"""Selects the buckets of a decoding step by query classifiers.

This is the routing of SAAP (arXiv 2502.08246, section 4). For the query group of a key/value head,
with the classifier of each of its queries q::

    score[c] = sum over the queries of softmax_c(relu(q W_in + b_in) W_out + b_out)
    probes   = the L largest

With the sizes of the buckets, the L densest are selected that reach a threshold: the density of a
bucket is the predicted attention of one of its keys, as a multiple of that of the mean key.

Routing is bound by the memory traffic of the weights: a step has one query per head, and
classifiers are large. The weights of the second layer are read once, and a program starts all its
loads before it needs the first one. The first kernel is split-K: a program takes a slice of the
hidden layer (columns of W_in and the corresponding rows of W_out) and a block of buckets, and
writes partial logits. The second kernel adds the partial logits of a query group and finds the L
largest scores.

Tiles: BM queries of a classifier; a slice of STEPS times BF hidden units; BC buckets; BD head size;
BG queries of a group; BP all buckets. Prefixes: b_ tile, o_ offset, m_ mask. Grid: (slice and
block, classifier, row tile), then (key/value head, sequence).
"""

import math

import torch
from torch import Tensor

from msattn.kernels.common.best_of_row import largest_of_row
from msattn.kernels.common.checks import check_qkv, check_tensor, resolve_backend
from msattn.kernels.common.densities import SMALLEST_SUM
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
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import probe_buckets as reference
from msattn.kernels.types import Backend

LOG2_E_, SMALLEST_SUM_ = tl.constexpr(LOG2_E), tl.constexpr(SMALLEST_SUM)
MAX_ROWS = 64  # queries of a classifier that share one read of its weights
BYTES_IN_FLIGHT = 96 * 1024  # shared memory for partial logits that are loaded at the same time


def probe_buckets(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    kv_heads: int,
    probes: int,
    sizes: Tensor | None = None,
    threshold: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Selects buckets for one token's query groups, by query classifiers.

    A classifier is ``D -> hidden -> C``: two linear layers with a ReLU between them.

    Parameters
    ----------
    q : Tensor ``[B, Hq, 1, D]``
        Queries in the form that the classifiers were trained on; fp32, fp16 or bf16 (fp64 on the
        torch backend). Strided views are not copied.
    weight_in, bias_in : Tensor ``[H, D, F]``, ``[H, 1, F]``
        First layer of each classifier, in q's dtype; query head h uses classifier
        ``h // (Hq // H)``.
    weight_out, bias_out : Tensor ``[H, F, C]``, ``[H, 1, C]``
        Second layer.
    kv_heads : int
        Number of query groups. A group adds the probabilities of its queries.
    probes : int
        Number of buckets to select, L, 0 to C.
    sizes : Tensor int32 ``[B, kv_heads, C]``, optional
        Numbers of keys in the buckets. With them, buckets are compared by their density, ``(score /
        size) / (sum of the scores / sum of the sizes)``; that of an empty bucket is 0.
    threshold : float, optional
        With ``sizes``: least density of a selected bucket, 0 or more. Places that are left hold -1.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor int32 ``[B, kv_heads, L]``
        The selected buckets in no particular order. Of buckets that tie for the last place, the
        kernel selects the first.

    Raises
    ------
    ValueError
        If an argument is invalid.
    """
    check_qkv(q, q, q)
    heads = q.shape[1]
    if q.shape[2] != 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected [batch, heads, 1, head size], heads a multiple "
            f"of kv_heads={kv_heads}"
        )
    if weight_in.dim() != 3 or weight_out.dim() != 3 or heads % max(1, len(weight_in)):
        raise ValueError(
            f"weight_in.shape={tuple(weight_in.shape)}, weight_out.shape="
            f"{tuple(weight_out.shape)}: expected [H, D, F] and [H, F, C], H a divisor of q's "
            f"{heads} heads"
        )
    classifiers, hidden, num_buckets = len(weight_in), weight_in.shape[2], weight_out.shape[2]
    for name, x, shape in (
        ("weight_in", weight_in, (classifiers, q.shape[3], hidden)),
        ("bias_in", bias_in, (classifiers, 1, hidden)),
        ("weight_out", weight_out, (classifiers, hidden, num_buckets)),
        ("bias_out", bias_out, (classifiers, 1, num_buckets)),
    ):
        check_tensor(name, x, q.dtype, shape, "q", q)
    if not 0 <= probes <= num_buckets:
        raise ValueError(f"probes={probes!r}: expected 0 to {num_buckets}, the number of buckets")
    if (sizes is None) != (threshold is None):
        raise ValueError(f"threshold={threshold!r}: expected a number with sizes, and None without")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ValueError(f"threshold={threshold!r}: expected a finite number, 0 or more")
    if sizes is not None:
        check_tensor("sizes", sizes, torch.int32, (len(q), kv_heads, num_buckets), "q", q)
    chosen = resolve_backend(backend, q)
    return _operator(
        q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes, sizes, threshold, chosen
    )


def launch(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    kv_heads: int,
    probes: int,
    sizes: Tensor | None,
    threshold: float | None,
) -> Tensor:
    """Launches both kernels; the grid depends only on shapes."""
    batch, q_heads, _, head = q.shape
    classifiers, hidden, num_buckets = weight_out.shape
    weights = [x.contiguous() for x in (weight_in, bias_in, weight_out, bias_out)]
    units, columns = (32, 64) if q.dtype == torch.float32 else (128, 256)
    heads_each, rows = q_heads // classifiers, batch * q_heads // classifiers
    slices, blocks = triton.cdiv(hidden, units), triton.cdiv(num_buckets, columns)
    part_logits = q.new_empty((slices, batch, q_heads, num_buckets), dtype=torch.float32)
    tile_rows = max(16, min(MAX_ROWS, triton.next_power_of_2(rows)))
    _partial_logits_kernel[(slices * blocks, classifiers, triton.cdiv(rows, tile_rows))](
        q, *weights[:3], part_logits, q.stride(0), q.stride(1), q.stride(3),
        heads_each, rows, hidden, num_buckets, blocks,
        HEAD=head, STEPS=2, BM=tile_rows, BF=units // 2, BC=columns, BD=padded_head(head),
        PRECISION=precision(q.dtype),
        num_warps=8, num_stages=3, **pdl_args(q.device),
    )  # fmt: skip
    selected = q.new_empty((batch, kv_heads, probes), dtype=torch.int32)
    group = q_heads // kv_heads
    groups, padded = triton.next_power_of_2(group), triton.next_power_of_2(num_buckets)
    if probes:
        _select_kernel[(kv_heads, batch)](
            part_logits, weights[3], None if sizes is None else sizes.contiguous(), selected,
            slices, group, heads_each, num_buckets, probes, threshold or 0.0,
            BG=groups, BP=padded, STAGES=1 + min(7, BYTES_IN_FLIGHT // (4 * padded * groups)),
            num_warps=4, **pdl_args(q.device),
        )  # fmt: skip
    return selected


def _empty(q, weight_in, bias_in, weight_out, bias_out, kv_heads, probes, *others):
    return q.new_empty((len(q), kv_heads, probes), dtype=torch.int32)


_operator = register_op("probe_buckets", launch, reference.probe_buckets, _empty)


@triton.jit(do_not_specialize=["heads_each", "rows", "blocks"])
def _partial_logits_kernel(
    q_ptr, weight_in_ptr, bias_in_ptr, weight_out_ptr,
    part_logits_ptr, stride_qb, stride_qh, stride_qd,
    heads_each, rows, hidden, num_buckets, blocks,
    HEAD: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes ``part_logits [slices, B, Hq, C]``, without the bias of the second layer."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    hidden_slice, block, classifier = (
        tl.program_id(0) // blocks,
        tl.program_id(0) % blocks,
        tl.program_id(1).to(tl.int64),
    )
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    m_row = row < rows
    batch, head = row // heads_each, classifier * heads_each + row % heads_each
    bucket, o_d = block * BC + tl.arange(0, BC), tl.arange(0, BD)
    m_bucket, m_d = bucket < num_buckets, o_d < HEAD
    q_ptrs = (
        q_ptr
        + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)[:, None]
        + o_d[None, :] * stride_qd
    )
    o_step, all_units = tl.arange(0, STEPS), hidden_slice * STEPS * BF + tl.arange(0, STEPS * BF)
    biases = tl.load(
        bias_in_ptr + classifier * hidden + all_units, mask=all_units < hidden, other=0.0
    ).to(tl.float32)
    biases = tl.reshape(biases, [STEPS, BF])
    part_logit = tl.zeros([BM, BC], tl.float32)
    # There are as many buffers as steps, so that all loads start before the first product. The mask
    # of the queries depends on the step; otherwise the compiler would hoist their load out of the
    # loop and wait for it.
    for step in tl.range(0, STEPS):
        unit = (hidden_slice * STEPS + step) * BF + tl.arange(0, BF)
        m_unit = unit < hidden
        # [BM, BD]
        b_q = tl.load(q_ptrs, mask=(m_row & (step < STEPS))[:, None] & m_d[None, :], other=0.0)
        in_ptrs = weight_in_ptr + (classifier * HEAD + o_d[:, None]) * hidden + unit[None, :]
        b_in = tl.load(in_ptrs, mask=m_d[:, None] & m_unit[None, :], other=0.0)  # [BD, BF]
        out_ptrs = (
            weight_out_ptr + (classifier * hidden + unit[:, None]) * num_buckets + bucket[None, :]
        )
        b_out = tl.load(out_ptrs, mask=m_unit[:, None] & m_bucket[None, :], other=0.0)  # [BF, BC]
        bias = tl.sum(tl.where((o_step == step)[:, None], biases, 0.0), 0)
        # [BM, BF]
        h = tl.maximum(tl.dot(b_q, b_in, input_precision=PRECISION) + bias[None, :], 0.0)
        part_logit = tl.dot(
            h.to(q_ptr.dtype.element_ty), b_out, part_logit, input_precision=PRECISION
        )
    row = (hidden_slice * tl.cdiv(rows, heads_each) + batch).to(tl.int64) * tl.num_programs(
        1
    ) * heads_each + head
    tl.store(
        part_logits_ptr + row[:, None] * num_buckets + bucket[None, :],
        part_logit,
        mask=m_row[:, None] & m_bucket[None, :],
    )


@triton.jit(do_not_specialize=["slices", "group", "heads_each", "probes", "threshold"])
def _select_kernel(
    part_logits_ptr, bias_out_ptr, sizes_ptr, selected_ptr,
    slices, group, heads_each, num_buckets, probes, threshold,
    BG: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Selects the ``probes`` best buckets of one query group, with ``sizes`` those of them that
    reach ``threshold``.
    """
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_heads = tl.num_programs(0) * group
    o_head, bucket = tl.arange(0, BG), tl.arange(0, BP)
    m_bucket = bucket < num_buckets
    m_logit = (o_head < group)[:, None] & m_bucket[None, :]
    part_logit_ptrs = (
        part_logits_ptr
        + (batch * q_heads + kv_head * group + o_head)[:, None] * num_buckets
        + bucket[None, :]
    )
    bias_ptrs = bias_out_ptr + (kv_head * group + o_head) // heads_each * num_buckets
    logit = tl.load(bias_ptrs[:, None] + bucket[None, :], mask=m_logit, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    # Pipelined, because the loads then are asynchronous copies; plain loads that add to registers
    # are serialized.
    for hidden_slice in tl.range(0, slices, num_stages=STAGES):  # type: ignore[misc]
        logit += tl.load(
            part_logit_ptrs + hidden_slice * tl.num_programs(1) * q_heads * num_buckets,
            mask=m_logit,
            other=0.0,
        )
    logit = tl.where(m_bucket[None, :], logit * LOG2_E_, float("-inf"))
    p = tl.exp2(logit - tl.max(logit, 1)[:, None])
    score = tl.sum(tl.where(m_logit, p / tl.sum(p, 1)[:, None], 0.0), 0)
    found = bucket
    if sizes_ptr is not None:
        group_sizes_ptr = sizes_ptr + (batch * tl.num_programs(0) + kv_head) * num_buckets
        size = tl.load(group_sizes_ptr + bucket, mask=m_bucket, other=0).to(tl.float32)
        mean = tl.maximum(tl.sum(score, 0), SMALLEST_SUM_) / tl.maximum(tl.sum(size, 0), 1.0)
        score = tl.where(size > 0, score / tl.maximum(size, 1.0) / mean, 0.0)
        found = tl.where(score >= threshold, bucket, -1)

    is_selected = largest_of_row(score, m_bucket, probes)
    # Buckets come first, then the places that are left: a reader takes 64 places at a time, and
    # most rows fill the first ones.
    live, left = is_selected & (found >= 0), is_selected & (found < 0)
    place = (
        tl.where(
            live,
            tl.cumsum(live.to(tl.int32), 0),
            tl.sum(live.to(tl.int32), 0) + tl.cumsum(left.to(tl.int32), 0),
        )
        - 1
    )
    tl.store(
        selected_ptr + (batch * tl.num_programs(0) + kv_head) * probes + place,
        found,
        mask=is_selected & (place < probes),
    )

"""Attention with scores convolved along queries and keys (Multi-Token Attention).

This is the key-query convolution of the paper, with one kernel ``W [c_q, c_k]`` for each head. With
``p = (c_k - 1) // 2`` and scores that count as 0 where the key comes after the query of the score
(``mask="query"``) or of the output (``mask="key"``)::

    S = scale * Q K^T
    A[i, j] = sum_{a < c_q, c < c_k} W[a, c] S[i - (c_q - 1) + a, j - p + c]
    out_i = softmax over keys j (j <= i if causal) of A[i, j], times v_j

A convolution on CUDA cores takes 66 multiply-adds for each score with the 6 x 11 kernels of the
paper. For D = 128 that takes three times as long as dense attention even at their peak rate, and
adjacent tiles would have to exchange scores. If the weights are applied to the operands instead,
all work is in matrix products. Applied to the queries, with a sum over the c_k columns, it is 6
times that of dense attention; applied to the keys, with a sum over the c_q rows,
``(c_q + 1) / 2 = 3.5`` times. The latter is used here (see
:mod:`msattn.kernels.multi_token.conv_attention.forward`)::

    A[i, j] = sum_a q[i - (c_q - 1) + a] . y_a[j]           y_a[j] = sum_c W[a, c] k[j - p + c]

The prepared keys y are c_q copies of the keys for each query head; they are computed for as many
heads at a time as fit into 1 GiB in 16 bits. The backward pass takes ``3 c_q + 2 = 20`` products, 4
times the 5 of dense attention.

Scores that count as 0 occur only within w keys of the diagonal. There A is computed separately,
from the scores that count, as a band of w numbers for each query
(:mod:`msattn.kernels.multi_token.conv_attention.band`). Later keys therefore have no influence on a
query, not even through rounding.
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import (
    aligned_gradient,
    check_layout,
    check_per_sequence,
    check_qkv,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.registration import register_attention
from msattn.kernels.multi_token.checks import check_convolution
from msattn.kernels.multi_token.conv_attention.backward import conv_attention_backward
from msattn.kernels.multi_token.conv_attention.band import (
    Convolution,
    key_gradient,
    make_band,
    prepare_keys,
    query_gradient,
    weight_gradient,
)
from msattn.kernels.multi_token.conv_attention.forward import (
    ScoreFactors,
    conv_attention_forward,
    kv_slices,
)
from msattn.kernels.multi_token.reference import conv_attention as reference
from msattn.kernels.multi_token.score_products import zero_padding
from msattn.kernels.types import Backend, ConvMask


def conv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    mask: ConvMask = "query",
    scale: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Computes attention with convolved scores (Multi-Token Attention, arXiv 2504.00927).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Non-contiguous views are supported.
        With fewer queries than keys, the missing earlier queries count as 0.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    weight : Tensor ``[Hq, c_q, c_k]``
        Kernel of each head, up to 32 x 32, in the dtype of q or fp32. Row ``c_q - 1`` is the
        current query, column ``(c_k - 1) // 2`` the current key: 1 there and 0 elsewhere gives
        plain attention.
    causal : bool
        Query i has position ``M - N + i`` and sees no key after it.
    mask : {"query", "key"}
        Scores that count as 0 in the convolution, if causal. ``query``: those whose key comes after
        their *own* query, as in the paper's implementation. ``key``: those whose key comes after
        the query of the *output*, as in the formula printed in the paper, so that scores of earlier
        queries with later keys enter, too. With several rows in the kernel these are different
        functions; with one row they are the same. A kernel trained with one should not be used with
        the other.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Length of the left padding of each sequence, whose queries and keys count as 0.
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    Tensor ``[B, Hq, N, D]``
        0 for rows without visible keys. Differentiable in q, k, v and weight.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value; the message names it.
    """
    check_qkv(q, k, v)
    check_convolution(weight, mask, q)
    check_per_sequence(q, kv_start=kv_start)
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    return _operator(q, k, v, weight, kv_start, causal, scale, mask, backend)[0]


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
    mask: str,
) -> tuple[Tensor, Tensor]:
    """Launches the forward kernels.

    It processes as many key/value heads at a time as :data:`score_products.SCRATCH_ELEMENTS`
    allows.
    """
    q, k, v = zero_padding(kv_start, causal, (q,), (k, v))
    check_layout(q=q, k=k, v=v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    group = q.shape[1] // k.shape[1]
    for kv in kv_slices(k.shape[1], group * weight.shape[1] * k[:, 0].numel()):
        heads = slice(kv.start * group, kv.stop * group)
        _, factors = _prepare(q[:, heads], k[:, kv], weight[heads], kv_start, causal, mask)
        conv_attention_forward(
            factors, v[:, kv], out[:, heads], lse[:, heads], kv_start, causal, scale
        )
    return out, lse


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the backward kernels, for a slice of the heads at a time.

    Returns dq, dk, dv, dweight.
    """
    batch, q_heads, num_queries, _ = q.shape
    group = q_heads // k.shape[1]
    q, dout, k, v = zero_padding(kv_start, causal, (q, dout), (k, v))
    dout = aligned_gradient(dout.contiguous())
    row_delta = (dout.float() * out).sum(-1)
    dq, dk, dv, dweight = (torch.empty_like(x) for x in (q, k, v, weight))
    elements = max(weight.shape[1] * k[:, 0].numel(), batch * num_queries * k.shape[2])
    for kv in kv_slices(k.shape[1], group * elements):
        heads = slice(kv.start * group, kv.stop * group)
        conv, factors = _prepare(q[:, heads], k[:, kv], weight[heads], kv_start, causal, mask)
        statistics = lse[:, heads], row_delta[:, heads]
        dx, dy, dv[:, kv], dband = conv_attention_backward(
            factors, v[:, kv], dout[:, heads], *statistics, kv_start, causal, scale
        )
        dweight_part = weight_gradient(conv, dy).sum((0, 2))
        if dband is None:
            dq[:, heads] = dx
        else:
            dweight_part += query_gradient(conv, dx, dband, dq[:, heads]).sum((0, 2))
        key_gradient(conv, dy, dband, dk[:, kv])
        dweight[heads] = dweight_part
    return dq, dk, dv, dweight


def _prepare(
    q: Tensor, k: Tensor, weight: Tensor, kv_start: Tensor | None, causal: bool, mask: str
) -> tuple[Convolution, ScoreFactors]:
    """Prepares the factors of the convolved scores of a slice of the heads."""
    conv = Convolution(q, k, weight.contiguous(), kv_start, causal, mask)
    return conv, ScoreFactors(conv.q, prepare_keys(conv), conv.window, make_band(conv))


_operator, _backward_operator = register_attention(
    "conv_attention",
    launch,
    launch_backward,
    reference.conv_attention_forward,
    reference.conv_attention_backward,
    differentiable=("q", "k", "v", "weight"),
    saved=("q", "k", "v", "weight", "kv_start", "out", "lse"),
)

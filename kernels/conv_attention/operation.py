"""Attention whose scores are convolved along queries and keys (Multi-Token Attention, key-query convolution).

Head by head, with ``p = (c_k - 1) // 2`` and scores that are 0 where the key stands after its own query::

    S = scale * Q K^T           A[i, j] = sum_{a < c_q, c < c_k} W[a, c] S[i - (c_q - 1) + a, j - p + c]
    out_i = softmax over keys j (j <= i if causal) of A[i, j], times v_j

Ways in, by count, for D = 128 and the paper's 6 x 11 kernels. A convolution on CUDA cores is 66 multiply-adds a score, three
times dense attention even at their peak rate, and neighbouring tiles have to exchange scores. Moved into the operands, it is
all products of tiles: weights into the queries, a sum over the c_k columns, 6 times dense attention; or into the keys, a sum
over the c_q rows, ``(c_q + 1) / 2 = 3.5`` times, chosen here (see :mod:`msattn.kernels.conv_attention.forward`)::

    A[i, j] = sum_a q[i - (c_q - 1) + a] . y_a[j]           y_a[j] = sum_c W[a, c] k[j - p + c]

Prepared keys y are c_q copies of the keys for each query head, made for as many heads at a time as fit 1 GiB. The gradient is
``3 c_q + 2 = 20`` products where dense attention has 5: 4 times.

Only within w of the diagonal are there scores that count as 0; there A is made apart, exactly, as a band of w numbers a query
(:mod:`msattn.kernels.conv_attention.band`). So nothing of a later key reaches a query, not even as a rounding error.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import (
    check_conv_weight,
    check_layout,
    check_per_sequence,
    check_qkv,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.registration import Passes, register_weighted_op
from msattn.kernels.conv_attention.backward import attend_backward
from msattn.kernels.conv_attention.band import (
    Convolution,
    key_gradient,
    make_band,
    prepare_keys,
    query_gradient,
    weight_gradient,
)
from msattn.kernels.conv_attention.forward import Scores, attend, kv_slices
from msattn.kernels.types import Backend


def conv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention with scores convolved along queries and keys (Multi-Token Attention).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Views are welcome. With fewer queries than keys, those before
        the first given one count as 0.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    weight : Tensor ``[Hq, c_q, c_k]``
        A kernel for each head, up to 32 x 32, of q's dtype or fp32. Row ``c_q - 1`` is the current query, column ``(c_k - 1) //
        2`` the current key: 1 there and 0 elsewhere is plain attention.
    causal : bool
        Query i stands at position ``M - N + i`` and sees no key after it; a score whose key stands after its own query is 0.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence, whose queries and keys count as 0.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor ``[B, Hq, N, D]``
        0 for rows that see nothing. Differentiable in q, k, v and weight.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name.
    """
    check_qkv(q, k, v)
    check_conv_weight(weight, q)
    check_per_sequence("kv_start", kv_start, q)
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    return _operator(q, k, v, weight, kv_start, causal, scale, backend)[0]


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the kernels, for as many key/value heads at a time as :data:`score_products.SCRATCH` allows."""
    check_layout(q=q, k=k, v=v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    group = q.shape[1] // k.shape[1]
    for kv in kv_slices(k.shape[1], group * weight.shape[1] * k[:, 0].numel()):
        heads = slice(kv.start * group, kv.stop * group)
        _, scores = _prepare(q[:, heads], k[:, kv], weight[heads], kv_start, causal)
        attend(scores, v[:, kv], out[:, heads], lse[:, heads], kv_start, causal, scale)
    return out, lse


def launch_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_start: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and weight, for a few key/value heads at a time."""
    batch, q_heads, num_queries, _ = q.shape
    group = q_heads // k.shape[1]
    dout = dout.contiguous()
    row_term = (dout.float() * out).sum(-1) - dlse
    dq, dk, dv, dweight = (torch.empty_like(x) for x in (q, k, v, weight))
    elements = max(weight.shape[1] * k[:, 0].numel(), batch * num_queries * k.shape[2])
    for kv in kv_slices(k.shape[1], group * elements):
        heads = slice(kv.start * group, kv.stop * group)
        conv, scores = _prepare(q[:, heads], k[:, kv], weight[heads], kv_start, causal)
        statistics = lse[:, heads], row_term[:, heads]
        grads = attend_backward(scores, v[:, kv], dout[:, heads], *statistics, kv_start, causal, scale)
        dweight_part = weight_gradient(conv, grads.y).sum((0, 2))
        if grads.band is None:
            dq[:, heads] = grads.x
        else:
            dweight_part += query_gradient(conv, grads.x, grads.band, dq[:, heads]).sum((0, 2))
        key_gradient(conv, grads.y, grads.band, dk[:, kv])
        dv[:, kv] = grads.v
        dweight[heads] = dweight_part
    return dq, dk, dv, dweight


def _prepare(q: Tensor, k: Tensor, weight: Tensor, kv_start: Tensor | None, causal: bool) -> tuple[Convolution, Scores]:
    """Convolved scores of some heads, as a sum of products."""
    conv = Convolution(q, k, weight.contiguous(), kv_start, causal)
    return conv, Scores(conv.q, prepare_keys(conv), conv.window, make_band(conv))


_operator, _backward_operator = register_weighted_op(
    "conv_attention",
    Passes(launch, launch_backward),
    Passes(reference.conv_attention_forward, reference.conv_attention_backward),
)

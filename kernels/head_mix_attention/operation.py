"""Attention whose scores are mixed over heads before the softmax (Multi-Token Attention, head convolution).

    S_g = scale * Q_g K_(g // group)^T          A_h = sum over heads g of W[h, g] S_g
    out_h = softmax over keys j (j <= i if causal) of A_h, times V_(h // group)

Every head takes part in every score, and no multiprocessor holds the scores and the outputs of all heads for a tile. So the
scores of as many rows as fit a scratch are written to memory, mixed there and read back (16 bits each for 16-bit inputs): 2
products and an eighth to a quarter of one for the mixing, where adding up queries or keys before their products takes one for
each key/value head. The gradient is 5 products, as in dense attention, and 3 mixings, with two scratches. Memory is what takes
the time: a score is moved 4 times forward, 10 times backward.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import (
    check_head_weight,
    check_layout,
    check_per_sequence,
    check_qkv,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.registration import Passes, register_weighted_op
from msattn.kernels.common.score_products import add_left, add_right, row_chunks
from msattn.kernels.head_mix_attention.materialized import attend_stored, attend_stored_backward
from msattn.kernels.head_mix_attention.scores import MOST_HEADS, mix, stored_dtype, unmix, write_scores
from msattn.kernels.types import Backend

LEAST_ROWS = 256  # at a time: enough programs to fill a GPU


def head_mix_attention(
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
    """Attention with scores mixed over heads (Multi-Token Attention).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Views are welcome.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    weight : Tensor ``[Hq, Hq]``
        What head h (row) takes of the scores of head g (column), of q's dtype or fp32; the identity is plain attention.
    causal : bool
        Query i stands at position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
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
    check_head_weight(weight, q)
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
    """Run the kernels, for as many rows at a time as :data:`score_products.SCRATCH` allows."""
    _check_kernels_serve(q, k, v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    weight = weight.contiguous()
    for rows, (scores,) in row_chunks(q, k, stored_dtype(q.dtype), 1, LEAST_ROWS, causal, kv_start):
        write_scores(q, k, scores, rows, scale)
        mix(scores, weight, scores, rows)
        attend_stored(scores, v, out, lse, rows)
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
    """Gradients of q, k, v and weight, for a few rows at a time."""
    dout, contiguous_weight = dout.contiguous(), weight.contiguous()
    row_term = (dout.float() * out).sum(-1) - dlse
    dq, dk, dv, dweight = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v, weight))
    for rows, (scores, mixed) in row_chunks(q, k, stored_dtype(q.dtype), 2, LEAST_ROWS, causal, kv_start):
        write_scores(q, k, scores, rows, scale)
        mix(scores, contiguous_weight, mixed, rows)
        dmixed = attend_stored_backward(mixed, v, dout, lse, row_term, dv, rows)
        dweight += unmix(scores, dmixed, contiguous_weight, rows, scale)
        add_right(dmixed, q, dk, rows)
        add_left(dmixed, k, dq, rows)
    dq, dk, dv, dweight = (torch.empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv), (weight, dweight)))
    return dq, dk, dv, dweight


def _check_kernels_serve(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_layout(q=q, k=k, v=v)
    if q.shape[1] > MOST_HEADS:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected up to {MOST_HEADS} heads, or backend='torch'")


_operator, _backward_operator = register_weighted_op(
    "head_mix_attention",
    Passes(launch, launch_backward),
    Passes(reference.head_mix_attention_forward, reference.head_mix_attention_backward),
)

"""Attention with scores mixed over heads (Multi-Token Attention).

    S_g = scale * Q_g K_(g // group)^T          A_h = sum over heads g of W[h, g] S_g
    out_h = softmax over keys j (j <= i if causal) of A_h, times V_(h // group)

Each mixed score depends on all heads, and an SM cannot hold the scores and outputs of all heads for
a tile. Scores are therefore written to a scratch buffer, for as many query rows at a time as fit,
mixed there and read back (in 16 bits for 16-bit inputs). This takes 2 products, and 1/8 to 1/4 of a
product for the mixing; mixing queries or keys before their product would take one product for each
key/value head. The backward pass takes 5 products, as in dense attention, and 3 mixings, with two
buffers. Memory bandwidth is the bottleneck: a score is moved 4 times forward and 10 times backward.
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
from msattn.kernels.multi_token.checks import check_head_weight
from msattn.kernels.multi_token.head_mix_attention.materialized import (
    materialized_attention,
    materialized_attention_backward,
)
from msattn.kernels.multi_token.head_mix_attention.scores import (
    MAX_HEADS,
    mix_heads,
    mix_heads_backward,
    score_dtype,
    write_scores,
)
from msattn.kernels.multi_token.reference import head_mix_attention as reference
from msattn.kernels.multi_token.score_products import (
    matmul_accumulate,
    matmul_accumulate_transposed,
    row_chunks,
    zero_padding,
)
from msattn.kernels.types import Backend

MIN_ROWS = 256  # query rows of a chunk at least, for enough programs to fill a GPU


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
    """Computes attention with scores mixed over heads (Multi-Token Attention).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries, fp32, fp16 or bf16 (fp64 on the torch backend). Non-contiguous views are supported.
    k, v : Tensor ``[B, Hkv, M, D]``
        Keys and values; query head h reads head ``h // (Hq // Hkv)``.
    weight : Tensor ``[Hq, Hq]``
        Weight of the scores of head g (column) in head h (row), in the dtype of q or fp32; the
        identity gives plain attention.
    causal : bool
        Query i has position ``M - N + i`` and sees no key after it.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Length of the left padding of each sequence.
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
    check_head_weight(weight, q)
    check_per_sequence(q, kv_start=kv_start)
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
    """Launches the forward kernels.

    It processes as many query rows at a time as :data:`score_products.SCRATCH_ELEMENTS` allows.
    """
    q, k, v = zero_padding(kv_start, causal, (q,), (k, v))
    check_layout(q=q, k=k, v=v)
    if q.shape[1] > MAX_HEADS:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected up to {MAX_HEADS} heads, or backend='torch'"
        )
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    weight = weight.contiguous()
    for rows, (scores,) in row_chunks(q, k, score_dtype(q.dtype), 1, MIN_ROWS, causal, kv_start):
        write_scores(q, k, scores, rows, scale)
        mix_heads(scores, weight, scores, rows)
        materialized_attention(scores, v, out, lse, rows)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the backward kernels, for a chunk of query rows at a time.

    Returns dq, dk, dv, dweight.
    """
    q, dout, k, v = zero_padding(kv_start, causal, (q, dout), (k, v))
    dout = aligned_gradient(dout.contiguous())
    contiguous_weight = weight.contiguous()
    row_delta = (dout.float() * out).sum(-1)
    dq, dk, dv, dweight = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v, weight)
    )
    for rows, (scores, mixed) in row_chunks(
        q, k, score_dtype(q.dtype), 2, MIN_ROWS, causal, kv_start
    ):
        write_scores(q, k, scores, rows, scale)
        mix_heads(scores, contiguous_weight, mixed, rows)
        dmixed = materialized_attention_backward(mixed, v, dout, lse, row_delta, dv, rows)
        dweight += mix_heads_backward(scores, dmixed, contiguous_weight, rows, scale)
        matmul_accumulate_transposed(dmixed, q, dk, rows)
        matmul_accumulate(dmixed, k, dq, rows)
    dq, dk, dv, dweight = (
        torch.empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv), (weight, dweight))
    )
    return dq, dk, dv, dweight


_operator, _backward_operator = register_attention(
    "head_mix_attention",
    launch,
    launch_backward,
    reference.head_mix_attention_forward,
    reference.head_mix_attention_backward,
    differentiable=("q", "k", "v", "weight"),
    saved=("q", "k", "v", "weight", "kv_start", "out", "lse"),
)

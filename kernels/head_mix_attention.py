"""Attention whose scores are mixed over heads before the softmax (Multi-Token Attention, head convolution).

    S_g = scale * Q_g K_(g // group)^T          A_h = sum over heads g of W[h, g] S_g
    out_h = softmax over keys j (j <= i if causal) of A_h, times V_(h // group)

Heads that read the same keys are added up before they meet them, ``x_{h,t} = sum over g in group t of W[h, g] q_g``, so that
``A_h = sum_t x_{h,t} K_t^T`` has a term for each key/value head, not for each query head: ``(Hkv + 1) / 2`` times the work of
dense attention, all of it on tensor cores (see :mod:`msattn.kernels.summed_attention`). The other way in, ``Hq ** 2``
multiply-adds for each position on CUDA cores, holds a tile of scores of every head in one program: Hq of them do not fit.

Prepared queries x are Hkv copies of the queries, made for as many heads at a time as fit 1 GiB. They, and what leads their
gradient back to queries and weights, are matrix products over heads: plain PyTorch. The gradient is ``3 Hkv + 2`` products
where dense attention has 5.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.checks import (
    check_head_weight,
    check_layout,
    check_per_sequence,
    check_qkv,
    query_offset,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.operators import Passes, mixing
from msattn.kernels.summed_attention import Scores, attend, kv_slices
from msattn.kernels.summed_attention_backward import attend_backward
from msattn.kernels.types import Backend

QUERIES_AT_ONCE = 2**20  # in a sum over queries and head size: cuBLAS takes fewer than 2**31 terms


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
    """Run the kernel, for as many key/value heads of V at a time as :data:`summed_attention.SCRATCH` allows."""
    check_layout(q=q, k=k, v=v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    queries = _grouped(q, k.shape[1], kv_start, query_offset(q.shape[2], k.shape[2], causal))
    for kv, heads in _slices(q, k, q[:, 0].numel()):
        scores = Scores(_prepare(queries, weight[heads]), k, k.shape[1], False)
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
    """Gradients of q, k, v and weight, for a few key/value heads of V at a time."""
    num_queries, (kv_heads, num_keys) = q.shape[2], k.shape[1:3]
    dout = dout.contiguous()
    row_term = (dout.float() * out).sum(-1) - dlse
    dv, dweight = torch.empty_like(v), torch.empty_like(weight)
    queries = _grouped(q, kv_heads, kv_start, query_offset(num_queries, num_keys, causal))
    dqueries = torch.zeros_like(queries, dtype=torch.float32)
    dk = torch.zeros_like(k, dtype=torch.float32)
    for kv, heads in _slices(q, k, max(q[:, 0].numel(), q.shape[0] * num_queries * num_keys // kv_heads)):
        scores = Scores(_prepare(queries, weight[heads]), k, kv_heads, False)
        statistics = lse[:, heads], row_term[:, heads]
        grads = attend_backward(scores, v[:, kv], dout[:, heads], *statistics, kv_start, causal, scale)
        dprepared = grads.x.unflatten(1, (-1, kv_heads))  # [B, H, T, N, D]
        mixing = weight[heads].float().unflatten(1, (kv_heads, -1))  # [H, T, G]
        dqueries += torch.einsum("bhtnd,htg->btgnd", dprepared, mixing)
        parts = zip(dprepared.split(QUERIES_AT_ONCE, 3), queries.split(QUERIES_AT_ONCE, 3), strict=True)
        dweight[heads] = sum(torch.einsum("bhtnd,btgnd->htg", x, y.float()).flatten(1) for x, y in parts)
        dk += grads.y
        dv[:, kv] = grads.v
    return torch.empty_like(q).copy_(dqueries.flatten(1, 2)), torch.empty_like(k).copy_(dk), dv, dweight


def _slices(q: Tensor, k: Tensor, elements: int) -> list[tuple[slice, slice]]:
    """Key/value heads that go together and their query heads, each of which needs ``Hkv * elements`` of scratch."""
    group = q.shape[1] // k.shape[1]
    slices = kv_slices(k.shape[1], q.shape[1] * elements)
    return [(kv, slice(kv.start * group, kv.stop * group)) for kv in slices]


def _grouped(q: Tensor, kv_heads: int, kv_start: Tensor | None, offset: int) -> Tensor:
    """Queries ``[B, T, G, N, D]`` by the head of their keys; those of the padding, which sums would spread, are 0."""
    if kv_start is not None:
        position = torch.arange(q.shape[2], device=q.device) + offset
        q = q.masked_fill((position < kv_start[:, None])[:, None, :, None], 0)
    return q.unflatten(1, (kv_heads, -1))


def _prepare(queries: Tensor, weight: Tensor) -> Tensor:
    """Prepared queries ``[B, H * T, N, D]`` for the rows ``[H, Hq]`` of the weight, rounded once to the dtype of q."""
    mixing = weight.unflatten(1, queries.shape[1:3])  # [H, T, G]
    prepared = torch.einsum("btgnd,htg->bhtnd", queries.to(weight.dtype), mixing)
    return prepared.to(queries.dtype).flatten(1, 2).contiguous()


_operator, _backward_operator = mixing(
    "head_mix_attention",
    Passes(launch, launch_backward),
    Passes(reference.head_mix_attention_forward, reference.head_mix_attention_backward),
)

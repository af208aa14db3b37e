"""Differentiable attention as custom operators: schema, shapes for tracing, choice of the backend and autograd, once for all.

Two schemas: attention that reads what a block map selects, and attention whose scores a weight mixes. An operation brings what
runs: forward and backward for Triton, the same for the reference. Operators give ``out`` and ``lse``, take the gradients of
both, and save their inputs and results for the backward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset, statistics_dtype

Operator = Any  # what torch.library.custom_op gives has no public name


class Passes(NamedTuple):
    """Forward and backward pass of an operation on one backend."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def register_sparse_op(name: str, triton: Passes, torch_: Passes) -> tuple[Operator, Operator]:
    """Operator and backward operator of attention over blocks that ``selected [B | 1, Hq | Hkv | 1, Tr, Tc]`` names."""

    @torch.library.custom_op(f"msattn::{name}", mutates_args=())
    def operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selected: Tensor,
        kv_start: Tensor | None,
        block_size: int,
        causal: bool,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                return triton.forward(q, k, v, selected, kv_start, block_size, causal, scale)
        return torch_.forward(q, k, v, selected, block_size=block_size, causal=causal, scale=scale, kv_start=kv_start)

    @torch.library.custom_op(f"msattn::{name}_backward", mutates_args=())
    def backward_operator(
        dout: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selected: Tensor,
        out: Tensor,
        lse: Tensor,
        kv_start: Tensor | None,
        block_size: int,
        causal: bool,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = dout, dlse, q, k, v, out, lse, selected
        if backend == "triton":
            with torch.cuda.device_of(q):
                return triton.backward(*given, kv_start, block_size, causal, scale)
        return torch_.backward(*given, block_size=block_size, causal=causal, scale=scale, kv_start=kv_start)

    @backward_operator.register_fake
    def _(dout, dlse, q, k, v, *others):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    _differentiate(operator, backward_operator)
    return operator, backward_operator


def register_weighted_op(name: str, triton: Passes, torch_: Passes) -> tuple[Operator, Operator]:
    """Operator and backward operator of attention whose scores are mixed by ``weight [Hq, ...]``, which has a gradient too."""

    @torch.library.custom_op(f"msattn::{name}", mutates_args=())
    def operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        kv_start: Tensor | None,
        causal: bool,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                q, k, v = _without_padding(kv_start, causal, (q,), (k, v))
                return triton.forward(q, k, v, weight, kv_start, causal, scale)
        return torch_.forward(q, k, v, weight, causal=causal, scale=scale, kv_start=kv_start)

    @torch.library.custom_op(f"msattn::{name}_backward", mutates_args=())
    def backward_operator(
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
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                q, dout, k, v = _without_padding(kv_start, causal, (q, dout), (k, v))
                return triton.backward(dout, dlse, q, k, v, weight, out, lse, kv_start, causal, scale)
        given = dout, dlse, q, k, v, weight, out, lse
        return torch_.backward(*given, causal=causal, scale=scale, kv_start=kv_start)

    @backward_operator.register_fake
    def _(dout, dlse, q, k, v, weight, *others):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(weight)

    _differentiate(operator, backward_operator)
    return operator, backward_operator


def _without_padding(
    kv_start: Tensor | None, causal: bool, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Zeros before each sequence, as 0 times what lies there may be NaN.

    Once for all kernels: those that zeroed a factor in the loop over products raced (Triton 3.6).
    """
    if kv_start is None:
        return *queries, *keys
    offset = query_offset(queries[0].shape[2], keys[0].shape[2], causal)
    return *(_zeroed(x, kv_start - offset) for x in queries), *(_zeroed(x, kv_start) for x in keys)


def _zeroed(x: Tensor, first: Tensor) -> Tensor:
    """``x [B, H, N, D]`` with 0 in rows before ``first [B]``, laid out as ``empty_like(x)``, which the fakes promise."""
    before = torch.arange(x.shape[2], device=x.device) < first[:, None]
    return x.clone().masked_fill_(before[:, None, :, None], 0)


def _differentiate(operator: Operator, backward_operator: Operator) -> None:
    """Give the operator its fake and its gradient: four tensors, ``kv_start``, then options without gradients."""

    @operator.register_fake
    def _(q, *others):
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=statistics_dtype(q))

    def save(ctx, inputs, output):
        *tensors, kv_start = inputs[:5]
        ctx.options = inputs[5:]
        ctx.save_for_backward(*tensors, *output, kv_start)

    def backward(ctx, dout, dlse):
        gradients = backward_operator(dout, dlse, *ctx.saved_tensors, *ctx.options)
        return *gradients, *[None] * (5 + len(ctx.options) - len(gradients))

    operator.register_autograd(backward, setup_context=save)

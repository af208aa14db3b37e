"""Registers the schema, fake kernel, dispatch and autograd of an operation.

There are two schemas of differentiable operations: sparse attention, which takes a block map, and weighted attention, which
takes a weight that mixes scores. Such an operation supplies its forward and backward passes for Triton and for the reference.
Operators return ``out`` and ``lse``, and save their inputs and results for the backward pass. Sparse attention accepts the
gradients of both, weighted attention that of ``out`` alone, as its LSE stays inside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import has_aligned_rows, query_offset, statistics_dtype

Operator = Any  # the type that torch.library.custom_op returns is not public


class Passes(NamedTuple):
    """Forward and backward pass of an operation on one backend."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def register_no_gradient(operator: Operator, name: str, advice: str = "detach its inputs, or use torch.no_grad()") -> None:
    """Registers a backward pass that raises NotImplementedError, for an operation for inference or targets."""

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(f"{name} has no gradient: {advice}")

    operator.register_autograd(backward)


def register_sparse_op(name: str, triton: Passes, torch_: Passes) -> tuple[Operator, Operator]:
    """Registers sparse attention over a block map.

    The block map is ``selected [B | 1, Hq | Hkv | 1, Tr, Tc]``. Returns the operator ``msattn::<name>`` and its backward
    operator ``msattn::<name>_backward``.
    """

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
        softcap: float | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                return triton.forward(q, k, v, selected, kv_start, block_size, causal, scale, softcap)
        return torch_.forward(
            q, k, v, selected, block_size=block_size, causal=causal, scale=scale, softcap=softcap, kv_start=kv_start
        )

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
        softcap: float | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                dout = _aligned_gradient(dout)
                inputs = dout, dlse, q, k, v, out, lse, selected
                return triton.backward(*inputs, kv_start, block_size, causal, scale, softcap)
        inputs = dout, dlse, q, k, v, out, lse, selected
        return torch_.backward(*inputs, block_size=block_size, causal=causal, scale=scale, softcap=softcap, kv_start=kv_start)

    @backward_operator.register_fake
    def _(dout, dlse, q, k, v, *others):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    _register_autograd(operator, backward_operator)
    return operator, backward_operator


def register_weighted_op(name: str, triton: Passes, torch_: Passes) -> tuple[Operator, Operator]:
    """Registers attention whose scores are mixed by a trained ``weight [Hq, ...]``.

    Returns the operator ``msattn::<name>`` and its backward operator ``msattn::<name>_backward``.
    """

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
                q, k, v = _zero_padding(kv_start, causal, (q,), (k, v))
                return triton.forward(q, k, v, weight, kv_start, causal, scale)
        return torch_.forward(q, k, v, weight, causal=causal, scale=scale, kv_start=kv_start)

    @torch.library.custom_op(f"msattn::{name}_backward", mutates_args=())
    def backward_operator(
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
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if backend == "triton":
            with torch.cuda.device_of(q):
                q, dout, k, v = _zero_padding(kv_start, causal, (q, dout), (k, v))
                dout = _aligned_gradient(dout)
                return triton.backward(dout, q, k, v, weight, out, lse, kv_start, causal, scale)
        inputs = dout, q, k, v, weight, out, lse
        return torch_.backward(*inputs, causal=causal, scale=scale, kv_start=kv_start)

    @backward_operator.register_fake
    def _(dout, q, k, v, weight, *others):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(weight)

    _register_autograd(operator, lambda dout, _, *saved: backward_operator(dout, *saved))
    return operator, backward_operator


def _zero_padding(
    kv_start: Tensor | None, causal: bool, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Replaces left padding by zeros.

    Padding may hold NaN, and kernels multiply it by 0. They do not mask factors inside the product loop, because code compiled
    by Triton 3.6 then has a race.
    """
    if kv_start is None:
        return *queries, *keys
    offset = query_offset(queries[0].shape[2], keys[0].shape[2], causal)
    return *(_zero_rows_before(x, kv_start - offset) for x in queries), *(_zero_rows_before(x, kv_start) for x in keys)


def _zero_rows_before(x: Tensor, first: Tensor) -> Tensor:
    """Copies ``x [B, H, N, D]`` with zeros in the rows before ``first [B]``.

    The copy has the layout of ``empty_like(x)``, as the fake kernels state.
    """
    before = torch.arange(x.shape[2], device=x.device) < first[:, None]
    return x.clone().masked_fill_(before[:, None, :, None], 0)


def _aligned_gradient(dout: Tensor) -> Tensor:
    """Returns a gradient that tensor descriptors can read, copied if necessary.

    Autograd may pass an expanded scalar, a transposed tensor, or one that is not aligned to 16 bytes.
    """
    if has_aligned_rows(dout) and 0 not in dout.stride():
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def _register_autograd(operator: Operator, backward_pass: Callable[..., Any]) -> None:
    """Registers the fake kernel and the autograd formula of an operator.

    The operator's arguments are four tensors, ``kv_start``, then options without gradients.
    """

    @operator.register_fake
    def _(q, *others):
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=statistics_dtype(q))

    def save(ctx, inputs, output):
        *tensors, kv_start = inputs[:5]
        ctx.options = inputs[5:]
        ctx.save_for_backward(*tensors, *output, kv_start)

    def backward(ctx, dout, dlse):
        gradients = backward_pass(dout, dlse, *ctx.saved_tensors, *ctx.options)
        return *gradients, *[None] * (5 + len(ctx.options) - len(gradients))

    operator.register_autograd(backward, setup_context=save)

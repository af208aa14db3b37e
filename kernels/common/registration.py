"""Registers the schema, fake kernel, dispatch and autograd of an operation.

An operation supplies the function that launches its kernels, its reference, and a function that
makes empty results. Those of differentiable attention also supply a backward pass, which is an
operator of its own: sparse attention takes a block map and accepts the gradients of ``out`` and
``lse``, weighted attention takes a weight that mixes scores and accepts that of ``out`` alone, as
its LSE stays inside.
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, get_args

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.types import PagedKeys

Operator = Any  # the type that torch.library.custom_op returns is not public
USE_NO_GRAD = "detach its inputs, or use torch.no_grad()"


def register_op(
    name: str,
    launch: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    no_gradient: str | None = None,
) -> Operator:
    """Registers the operator ``msattn::<name>``, whose parameters are those of ``launch``, then
    ``backend``.

    Parameters of ``launch`` with a default are left out, unless the operator ``mutates`` them. The
    reference gets the same arguments by name. ``fake`` gets those of the operator and returns empty
    results, as ``launch`` does. ``no_gradient`` is advice for an operation for inference or
    targets, whose backward pass raises NotImplementedError.
    """
    parameters = [
        parameter.replace(default=Parameter.empty)
        for parameter in signature(launch).parameters.values()
        if parameter.default is Parameter.empty or parameter.name in mutates
    ]

    def dispatch(*arguments):
        *inputs, backend = arguments
        if backend == "triton":
            with torch.cuda.device_of(inputs[0]):
                return launch(*inputs)
        return reference(
            **{parameter.name: x for parameter, x in zip(parameters, inputs, strict=True)}
        )

    backend = Parameter("backend", Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    dispatch.__signature__ = signature(launch).replace(parameters=[*parameters, backend])  # type: ignore[attr-defined]
    operator = torch.library.custom_op(f"msattn::{name}", dispatch, mutates_args=mutates)
    operator.register_fake(fake)
    if no_gradient is not None:

        def backward(ctx, *gradients):
            raise NotImplementedError(f"{name} has no gradient: {no_gradient}")

        operator.register_autograd(backward)
    return operator


def register_attention(
    name: str,
    launch: Callable[..., Any],
    launch_backward: Callable[..., Any],
    reference: Callable[..., Any],
    reference_backward: Callable[..., Any],
) -> tuple[Operator, Operator]:
    """Registers differentiable attention and its backward pass, the operator
    ``msattn::<name>_backward``.

    The arguments of attention are q, k, v, a block map or weight, ``kv_start``, and options. The
    backward pass takes the gradient of ``out``, that of ``lse`` if it has a parameter ``dlse``, the
    first four arguments, the results, ``kv_start`` and the options. It returns the gradients of the
    first three arguments, or of four.
    """
    of_backward = signature(launch_backward)
    first, count = (
        list(of_backward.parameters).index("q"),
        len(get_args(of_backward.return_annotation)),
    )

    def empty_gradients(*arguments):
        return tuple(torch.empty_like(x) for x in arguments[first : first + count])

    operator = register_op(name, launch, reference, empty_attention)
    backward_operator = register_op(
        f"{name}_backward", launch_backward, reference_backward, empty_gradients
    )

    def save(ctx, inputs, output):
        *tensors, kv_start = inputs[:5]
        ctx.options = inputs[5:]
        ctx.save_for_backward(*tensors, *output, kv_start)

    def backward(ctx, *gradients):
        gradients = backward_operator(*gradients[:first], *ctx.saved_tensors, *ctx.options)
        return *gradients, *[None] * (5 + len(ctx.options) - count)

    operator.register_autograd(backward, setup_context=save)
    return operator, backward_operator


def empty_attention(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns an empty output in the layout of q, and LSEs."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=statistics_dtype(q))


def empty_decoding(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns an empty contiguous output, and LSEs."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=statistics_dtype(q))


def on_pages(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a reference that takes the tensors of its ``cache`` one by one."""
    return lambda k, v, table, kv_len, **others: reference(
        cache=PagedKeys(k, v, table, kv_len), **others
    )

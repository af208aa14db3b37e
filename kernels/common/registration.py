"""Registers the schema, fake kernel, dispatch and autograd of an operation.

An operation supplies the function that launches its kernels, its reference, and a function that
makes empty results. Those of differentiable attention also supply a backward pass, which is an
operator of its own, and the names of what it needs.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any, get_type_hints

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.types import PagedKeys

Operator = Any  # the type of torch.ops' members is not public
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

    Parameters of ``launch`` with a default are left out, unless the operator ``mutates`` them. A
    parameter that is a NamedTuple stands for its fields, since operators take no records. The
    reference gets the same arguments by name. ``fake`` gets those of the operator and returns empty
    results, as ``launch`` does. ``no_gradient`` is advice for an operation for inference or
    targets, whose backward pass raises NotImplementedError.
    """
    given = [
        parameter.replace(default=Parameter.empty)
        for parameter in signature(launch).parameters.values()
        if parameter.default is Parameter.empty or parameter.name in mutates
    ]
    parameters = [each for parameter in given for each in _fields(parameter)]
    takes = [_take(parameter) for parameter in given]  # once: it takes microseconds

    def dispatch(*arguments):
        *inputs, backend = arguments
        if backend == "triton":
            values = iter(inputs)
            with torch.cuda.device_of(inputs[0]):
                return launch(*(take(values) for take in takes))
        return reference(
            **{parameter.name: x for parameter, x in zip(parameters, inputs, strict=True)}
        )

    backend = Parameter("backend", Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    dispatch.__signature__ = signature(launch).replace(parameters=[*parameters, backend])  # type: ignore[attr-defined]
    # not custom_op, whose wrappers take several times as long, and most with what is mutated
    schema = torch.library.infer_schema(dispatch, mutates_args=mutates)
    torch.library.define(f"msattn::{name}", schema)
    torch.library.impl(f"msattn::{name}", "default", torch.compiler.disable(dispatch))
    operator = getattr(torch.ops.msattn, name).default
    torch.library.register_fake(operator, fake)
    if no_gradient is not None:

        def backward(ctx, *gradients):
            raise NotImplementedError(f"{name} has no gradient: {no_gradient}")

        torch.library.register_autograd(operator, backward)
    return operator


def _fields(parameter: Parameter) -> list[Parameter]:
    """Returns the fields of a parameter that is a NamedTuple, or the parameter itself."""
    if not hasattr(parameter.annotation, "_fields"):
        return [parameter]
    return [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for name, annotation in get_type_hints(parameter.annotation).items()
    ]


def _take(parameter: Parameter) -> Callable[[Iterator[Any]], Any]:
    """Returns a function that takes the next of some values, or those of a NamedTuple's fields as
    one.
    """
    record = parameter.annotation
    if not hasattr(record, "_fields"):
        return next
    return lambda values: record(*(next(values) for _ in record._fields))


def register_attention(
    name: str,
    launch: Callable[..., Any],
    launch_backward: Callable[..., Any],
    reference: Callable[..., Any],
    reference_backward: Callable[..., Any],
    *,
    differentiable: Sequence[str],
    saved: Sequence[str],
) -> tuple[Operator, Operator]:
    """Registers differentiable attention and its backward pass, the operator
    ``msattn::<name>_backward``.

    ``launch`` returns ``out`` and ``lse``; ``saved`` are the tensors among its parameters and these
    results that the backward pass needs. Parameters of ``launch_backward`` have the names of those
    of ``launch``, or are ``out``, ``lse``, ``dout`` and ``dlse``. It returns the gradients of the
    ``differentiable`` parameters.
    """
    names, names_of_backward = (
        [*signature(function).parameters, "backend"] for function in (launch, launch_backward)
    )

    def empty_gradients(*arguments):
        given = dict(zip(names_of_backward, arguments, strict=True))
        return tuple(torch.empty_like(given[x]) for x in differentiable)

    operator = register_op(name, launch, reference, empty_attention)
    backward_operator = register_op(
        f"{name}_backward", launch_backward, reference_backward, empty_gradients,
        no_gradient="it is a first derivative",
    )  # fmt: skip

    def save(ctx, inputs, output):
        given = dict(zip(names, inputs, strict=True))
        tensors = given | {"out": output[0], "lse": output[1]}
        ctx.save_for_backward(*(tensors[x] for x in saved))
        ctx.options = {x: value for x, value in given.items() if x not in saved}

    def backward(ctx, dout, dlse):
        tensors = dict(zip(saved, ctx.saved_tensors, strict=True))
        given = {"dout": dout, "dlse": dlse, **tensors, **ctx.options}
        results = backward_operator(*(given[x] for x in names_of_backward))
        gradients = dict(zip(differentiable, results, strict=True))
        return tuple(gradients.get(x) for x in names)

    torch.library.register_autograd(operator, backward, setup_context=save)
    return operator, backward_operator


def empty_attention(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns an empty output in the layout of q, and LSEs."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=statistics_dtype(q))


def empty_decoding(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns an empty contiguous output, and LSEs."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=statistics_dtype(q))


def on_pages(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a reference that takes the tensors of its ``cache`` one by one."""
    return lambda k, v, table, kv_len, k_scale, v_scale, **others: reference(
        cache=PagedKeys(k, v, table, kv_len, k_scale, v_scale), **others
    )

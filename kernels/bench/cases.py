"""Benchmark cases: inputs, reference, peers, and the check before any timing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bench import eager
from msattn.kernels.bench.rows import Work
from msattn.kernels.bench.timing import Call, graphed
from msattn.kernels.operations import OPERATIONS
from msattn.kernels.testing import assert_within_budget

# maps the tensors of a layer to a tensor, or to a tuple that begins with the output
Function = Callable[..., Any]
Layer = tuple[Any, ...]
# (layer of one sequence, begin, end) -> inputs of the query rows [begin, end)
Window = Callable[[Layer, int, int], Layer]
WEIGHT_GRADIENT = "gradient 3"  # for a weight that mixes scores: a sum over all pairs of tokens


class ReferenceMismatch(AssertionError):
    """An operation disagrees with its reference."""


@dataclass(frozen=True)
class Options:
    """Choice of the measurements, apart from the size of the problem."""

    lengths: Sequence[int]  # numbers of keys
    # shares of the visible keys that are not read, for operations that select
    sparsities: Sequence[float] = (0.9, 0.8, 0.5)
    queries: Sequence[int] = (1, 4, 16)  # numbers of queries, for flash_decode
    # (queries, keys) of a convolution; the paper's by default
    kernels: Sequence[Sequence[int]] = ((6, 11),)
    backward: bool = False  # time the backward pass alone instead of the forward pass
    softcap: float | None = None  # limit of soft-capped scores; peers without a cap are left out
    fp8: bool = False  # caches in pages are in FP8; peers and contiguous caches are not
    # those to time
    peers: Sequence[str] = ("flash", "cudnn", "flex", "eager", "block_sparse", "product")


@dataclass(frozen=True, eq=False)
class Peer:
    """A competing implementation.

    ``prepare`` returns the function to time. It may compile, run out of memory or find the peer
    unsupported; the exception it raises is reported as the reason why the peer was not timed. A
    peer that several cases share is timed once.
    """

    name: str
    prepare: Callable[[], Function]
    layers: Sequence[Layer]
    work: Work
    sparsity: float = 0.0
    setting: str = ""
    note: str = ""


@dataclass(frozen=True, eq=False)
class BenchCase:
    """One operation on one problem.

    ``call``, ``reference`` and ``eager``, the form in eager PyTorch that materializes all scores,
    take the tensors of a layer. The error of the eager form in the operation's precision sets the
    tolerance of the check. Decoding cycles through several ``layers`` so that none is in the L2
    cache when it is read. ``window`` selects the reference's inputs for a range of query rows in
    the check at full size; if None, only problems with few queries are checked there.
    """

    call: Function
    reference: Function
    eager: Function
    layers: Sequence[Layer]
    work: Work  # of one layer
    peers: Sequence[Peer] = ()  # in the order in which they are timed
    setting: str = ""  # as in a BenchRow, like the next two
    sparsity: float = 0.0
    queries: int | None = None  # None: as many as keys
    graph: bool = False  # run as a CUDA graph, which removes launch overhead from the time
    # size of the terms that cancel in a result, which scales the rounding band (kernels/testing.py)
    term: float = 1.0
    window: Window | None = None
    context: int = 0  # rows before a window that its first rows depend on


class Forms(NamedTuple):
    """An operation, its reference, and its eager form, as in :class:`BenchCase`."""

    call: Function
    reference: Function
    eager: Function


def forms_of(name: str, **options: Any) -> Forms:
    """Returns the forms of an operation, all with the same options; a reference may be the eager
    form.
    """
    operation = OPERATIONS[name]
    call, exact = (getattr(import_module(x), name) for x in (operation.module, operation.reference))
    return Forms(*(partial(form, **options) for form in (call, exact, getattr(eager, name, exact))))


def runner(
    function: Function, layers: Sequence[Layer], backward: bool, graph: bool, device: str
) -> Call:
    """Returns a call that runs the function, or its backward pass, on each layer."""
    if backward:
        return _backward_of(function, layers)

    def forward() -> None:
        with torch.no_grad():
            for layer in layers:
                function(*layer)

    return graphed(forward, device) if graph else forward


def _backward_of(function: Function, layers: Sequence[Layer]) -> Call:
    """Returns a call that computes only the gradients of the first output."""
    passes = []
    for layer in layers:
        leaves, wanted = _with_gradients(layer)
        out = outputs(function(*leaves))[0]
        passes.append((out, wanted, torch.randn_like(out)))

    def backward() -> None:
        for out, wanted, dout in passes:
            torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return backward


def check(case: BenchCase, backward: bool) -> None:
    """Compares outputs, and gradients if ``backward``, with the fp64 reference.

    The tolerance is the error of the eager form in the same precision plus a rounding band (see
    ``kernels/testing.py``); a larger error raises ReferenceMismatch.
    """
    layer = case.layers[0]
    exact_layer = tuple(x.double() if is_float(x) else x for x in layer)
    exact = _results(case.reference, exact_layer, backward)
    eager = _results(case.eager, layer, backward)
    actual = _results(case.call, layer, backward)
    for name, expected in exact.items():
        count = layer[0].shape[2] * layer[1].shape[2] if name == WEIGHT_GRADIENT else 1
        try:
            assert_within_budget(
                name, actual[name], expected, eager[name], term=case.term, count=count
            )
        except AssertionError as error:
            raise ReferenceMismatch(
                f"{case.setting}: {error}" if case.setting else str(error)
            ) from error


def _results(function: Function, layer: Layer, backward: bool) -> dict[str, Tensor]:
    if not backward:
        with torch.no_grad():
            return {f"output {i}": x for i, x in enumerate(outputs(function(*layer)))}
    leaves, wanted = _with_gradients(layer)
    results = outputs(function(*leaves))
    generator = torch.Generator().manual_seed(0)
    douts = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    gradients = torch.autograd.grad(results, wanted, douts)
    named = {f"output {i}": x.detach() for i, x in enumerate(results)}
    return named | {f"gradient {i}": x for i, x in enumerate(gradients)}


def _with_gradients(layer: Layer) -> tuple[Layer, list[Tensor]]:
    leaves = tuple(x.detach().requires_grad_() if is_float(x) else x for x in layer)
    return leaves, [x for x in leaves if is_float(x)]


def outputs(result: Any) -> list[Tensor]:
    """Returns a list of the floating-point results, and of counts (int32) and boolean ones as such
    numbers.
    """
    tensors = (result,) if isinstance(result, Tensor) else result
    exact = (torch.bool, torch.int32)
    return [
        x.float() if x.dtype in exact else x for x in tensors if is_float(x) or x.dtype in exact
    ]


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()

"""One problem for an operation, what stands beside it, and the check that comes before any time is taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.bench.rows import Work
from msattn.kernels.bench.timing import Call, graphed
from msattn.kernels.testing import assert_within_budget

Function = Callable[..., Any]  # of a problem's tensors; gives a tensor, or a tuple that begins with the output
Layer = tuple[Any, ...]
Window = Callable[[Layer, int, int], Layer]  # of a layer of one sequence, what the query rows from one to before another see
SUMMED = "gradient 3"  # of a weight over scores: a sum over every pair of tokens


class Disagreement(AssertionError):
    """An operation is not what its reference says: there is nothing to time."""


@dataclass(frozen=True)
class Options:
    """What to measure, beside the size.

    Attributes
    ----------
    lengths : numbers of keys.
    sparsities : shares of the visible keys that are not read, for operations that select.
    queries : numbers of queries, for ``flash_decode``.
    kernels : queries and keys of a convolution, for ``conv_attention`` and ``conv_decode``; as in the paper by default.
    backward : time the backward pass alone, instead of the forward pass.
    peers : names of what may stand beside the operation.
    """

    lengths: Sequence[int]
    sparsities: Sequence[float] = (0.9, 0.8, 0.5)
    queries: Sequence[int] = (1, 4, 16)
    kernels: Sequence[Sequence[int]] = ((6, 11),)
    backward: bool = False
    peers: Sequence[str] = ("flash", "cudnn", "flex", "eager", "block_sparse", "product")


@dataclass(frozen=True, eq=False)
class Peer:
    """Something that stands beside the operation. One that several cases share is timed once.

    ``prepare`` makes the function, which may compile, need room or not exist here: whatever it raises is why it is absent.
    """

    name: str
    prepare: Callable[[], Function]
    layers: Sequence[Layer]
    work: Work
    sparsity: float = 0.0
    setting: str = ""
    note: str = ""


@dataclass(frozen=True, eq=False)
class Case:
    """One operation on one problem.

    Attributes
    ----------
    call, reference, eager : the operation, its reference, and the plain form that holds every score in memory: each takes
        the tensors of a layer. The eager form in the operation's own precision says how much rounding is to be expected.
    layers : tensors of each layer; decoding takes several in turn, so that none is in the L2 cache when its turn comes.
    work : of one layer.
    peers : in the order in which they are timed.
    setting, sparsity, queries : as in a row; ``queries=None`` is as many as keys.
    graph : whether launches are left out of the time, by a CUDA graph.
    term : size of the terms that cancel in a result, for what rounding may be (``kernels/testing.py``).
    window : what the check at full size takes for the reference; None: there is no such check beyond a few queries.
    context : rows before a window that its first rows depend on.
    """

    call: Function
    reference: Function
    eager: Function
    layers: Sequence[Layer]
    work: Work
    peers: Sequence[Peer] = ()
    setting: str = ""
    sparsity: float = 0.0
    queries: int | None = None
    graph: bool = False
    term: float = 1.0
    window: Window | None = None
    context: int = 0


def runner(function: Function, layers: Sequence[Layer], backward: bool, graph: bool, device: str) -> Call:
    """A call without arguments that runs the function once on each layer, or its backward pass alone."""
    if backward:
        return _backward_of(function, layers)

    def forward() -> None:
        with torch.no_grad():
            for layer in layers:
                function(*layer)

    return graphed(forward, device) if graph else forward


def _backward_of(function: Function, layers: Sequence[Layer]) -> Call:
    """Gradients of the output alone, as a model asks for them."""
    passes = []
    for layer in layers:
        leaves, wanted = _with_gradients(layer)
        out = outputs(function(*leaves))[0]
        passes.append((out, wanted, torch.randn_like(out)))

    def backward() -> None:
        for out, wanted, dout in passes:
            torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return backward


def check(case: Case, backward: bool) -> None:
    """Hold an operation to its reference in fp64, outputs and gradients.

    It may be as far away as the eager form of its own precision, plus a rounding band (see ``kernels/testing.py``).

    Raises
    ------
    Disagreement
        If it is farther.
    """
    layer = case.layers[0]
    exact_layer = tuple(x.double() if is_float(x) else x for x in layer)
    exact = _results(case.reference, exact_layer, backward)
    eager = _results(case.eager, layer, backward)
    actual = _results(case.call, layer, backward)
    for name, want in exact.items():
        count = layer[0].shape[2] * layer[1].shape[2] if name == SUMMED else 1
        try:
            assert_within_budget(name, actual[name], want, eager[name], term=case.term, count=count)
        except AssertionError as error:
            raise Disagreement(f"{case.setting}: {error}" if case.setting else str(error)) from error


def _results(function: Function, layer: Layer, backward: bool) -> dict[str, Tensor]:
    if not backward:
        with torch.no_grad():
            return {f"output {i}": x for i, x in enumerate(outputs(function(*layer)))}
    leaves, wanted = _with_gradients(layer)
    given = outputs(function(*leaves))
    generator = torch.Generator().manual_seed(0)
    douts = [torch.randn(x.shape, generator=generator).to(x) for x in given]
    gradients = torch.autograd.grad(given, wanted, douts)
    named = {f"output {i}": x.detach() for i, x in enumerate(given)}
    return named | {f"gradient {i}": x for i, x in enumerate(gradients)}


def _with_gradients(layer: Layer) -> tuple[Layer, list[Tensor]]:
    leaves = tuple(x.detach().requires_grad_() if is_float(x) else x for x in layer)
    return leaves, [x for x in leaves if is_float(x)]


def outputs(result: Any) -> list[Tensor]:
    """An operation's floating results and masks (as 0 and 1), whether they come alone or in a tuple."""
    tensors = (result,) if isinstance(result, Tensor) else result
    return [x.float() if x.dtype == torch.bool else x for x in tensors if is_float(x) or x.dtype == torch.bool]


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()

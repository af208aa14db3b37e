"""Custom operators of all operations: schema and fake kernel, compilation without graph breaks,
gradients or their refusal.
"""

import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from msattn.kernels.types import Backend
from tests.kernels.cases.every import CASES
from tests.kernels.cases.records import Arguments, Cases
from tests.kernels.shared import assert_same


def operator_calls(cases: Cases, given: Arguments) -> list[tuple[OpOverload, tuple[Any, ...]]]:
    """Calls the function, and returns the operators that it calls, with their arguments."""
    module, calls = sys.modules[cases.function.__module__], []

    def recorder(operator: OpOverload) -> Callable[..., Any]:
        return lambda *operands: (calls.append((operator, operands)), operator(*operands))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name, operator in cases.operators.items():
            patch.setattr(module, name, recorder(operator))
        cases.function(**given)
    return calls


# interpreted they take long, and the reference's operators have the same schema
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("operator" in cases.slow))
        for name, cases in CASES.items()
        if cases.operators
    ],
)
def test_operator(operation: str, backend: Backend, steady_device: str) -> None:
    """Of each operator of an operation, and for other types of its arguments."""
    cases = CASES[operation]
    torch._dynamo.reset()
    compiled = torch.compile(cases.function, fullgraph=True, backend="aot_eager")
    first = cases.arguments(steady_device)
    for change in ({}, *cases.variants(first)):
        given: Arguments = {**first, **change, "backend": backend}
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
        if cases.differentiable:
            leaves = [x.requires_grad_() for x in leaves]
        ((operator, operands),) = operator_calls(cases, given)
        torch.library.opcheck(operator, operands)
        counts = change.get("counts", torch.zeros(0)).zero_()
        got, want = compiled(**given), cases.function(**given)  # both add to the counts
        assert_same(got, want)
        assert (counts % 2 == 0).all()
        assert (counts > 10).all()
        if cases.differentiable:
            assert_same(*(torch.autograd.grad(_sum_of_squares(x), leaves) for x in (got, want)))
        elif any(x.is_floating_point() for x in tree_leaves(want)):
            leaves[0].requires_grad_()
            with pytest.raises(NotImplementedError, match="no gradient"):
                _sum_of_squares(cases.function(**given)).backward()
            leaves[0].requires_grad_(False)


def test_compilation_never_looks_into_operators() -> None:
    """Also where it gave up on the function that calls them: kernels would be compiled again for
    each shape, or fail.
    """
    graphs, lock = [], Lock()
    operands = torch.randn(2, 1, 2, 3, 16), torch.randn(2, 1, 2, 3), "torch"

    def merge() -> tuple[Tensor, ...]:
        with lock:
            torch._dynamo.graph_break()
            return torch.ops.msattn.merge_states(*operands)

    torch._dynamo.reset()
    compiled = torch.compile(merge, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert_same(compiled(), merge())
    assert not graphs


def _sum_of_squares(result: Any) -> Tensor:
    parts = (result,) if isinstance(result, Tensor) else result
    return torch.stack([x.square().sum() for x in parts if x.requires_grad]).sum()

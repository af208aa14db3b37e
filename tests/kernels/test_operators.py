"""Custom operators of all operations: schema and fake kernel, compilation without graph breaks,
gradients or their refusal.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from msattn.kernels.flash_decode.score_mod import alibi, sliding_window, softcap
from msattn.kernels.operations import DIFFERENTIABLE, OPERATIONS
from msattn.kernels.types import Backend
from tests.kernels.cases.every import CASES, SLOW
from tests.kernels.shared import assert_same

FUNCTIONS = (*OPERATIONS, "block_softmax", "bucket_sums")
WITH_GRADIENT = (*DIFFERENTIABLE, "block_softmax")
COUNTING = ("bucket_decode", "paged_bucket_decode")
# their results have no gradient
WITHOUT_FLOATS = ("best_blocks", "gate_blocks", "paged_bucket_sizes", "probe_buckets")


def variants(operation: str, device: str) -> Iterator[dict[str, Any]]:
    """Yields arguments for each operator of an operation, and for other types of its arguments."""
    given = CASES[operation].arguments(device)
    yield given
    if operation == "flash_decode":
        for mod in (softcap(2.0), sliding_window(20), alibi(torch.rand(4, device=device))):
            yield given | {"score_mod": mod}
    if operation in COUNTING:
        yield given | {"recent": 5, "counts": torch.zeros(2, 2, dtype=torch.int64, device=device)}
    if operation == "probe_buckets":
        yield given | {
            "sizes": torch.full((1, 2, 20), 7, dtype=torch.int32, device=device),
            "threshold": 1.5,
        }
    if operation in ("gate_scores", "gate_blocks"):
        q, pooled_k = given["q"], torch.randn(1, 2, 5, 48, device=device)
        yield given | {
            "q_rope": q.flip(3),
            "pooled_k": pooled_k,
            "mean_weight": 0.5,
            "last_queries": True,
        }
        yield given | {
            "last_rows": torch.rand(1, 4, 2, 5, device=device),
            "whole": torch.tensor([[False, True]], device=device),
            "columns": torch.rand(1, 4, 5, device=device),
        }
    if operation == "paged_block_sparse_attention":
        yield given | {"block_mask": None}


def operator_calls(
    function: Callable[..., Any], given: dict[str, Any]
) -> list[tuple[CustomOpDef, tuple[Any, ...]]]:
    """Calls the function, and returns the operators that it calls, with their arguments."""
    module, calls = sys.modules[function.__module__], []

    def recorder(operator: CustomOpDef) -> Callable[..., Any]:
        return lambda *operands: (calls.append((operator, operands)), operator(*operands))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name, operator in [
            (name, x) for name, x in vars(module).items() if isinstance(x, CustomOpDef)
        ]:
            patch.setattr(module, name, recorder(operator))
        function(**given)
    return calls


# interpreted they take long, and the reference's operators have the same schema
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "operation", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in FUNCTIONS]
)
def test_operator(operation: str, backend: Backend, steady_device: str) -> None:
    function = CASES[operation].function
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for options in variants(operation, steady_device):
        given: dict[str, Any] = {**options, "backend": backend}
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
        if operation in WITH_GRADIENT:
            leaves = [x.requires_grad_() for x in leaves if x is not given.get("sinks")]
        ((operator, operands),) = operator_calls(function, given)
        torch.library.opcheck(operator, operands)
        counts = (
            given["counts"].zero_()
            if operation in COUNTING and "counts" in given
            else torch.zeros(0)
        )
        got, want = compiled(**given), function(**given)  # both add to the counts
        assert_same(got, want)
        assert (counts % 2 == 0).all()
        assert (counts > 10).all()
        if operation in WITH_GRADIENT:
            assert_same(*(torch.autograd.grad(_sum_of_squares(x), leaves) for x in (got, want)))
        elif operation not in WITHOUT_FLOATS:
            leaves[0].requires_grad_()
            # an operator that mutates has no backward pass
            refusal = RuntimeError if len(counts) else NotImplementedError
            with pytest.raises(refusal, match="backward" if len(counts) else "no gradient"):
                _sum_of_squares(function(**given)).backward()
            leaves[0].requires_grad_(False)


def _sum_of_squares(result: Any) -> Tensor:
    parts = (result,) if isinstance(result, Tensor) else result
    return torch.stack([x.square().sum() for x in parts if x.requires_grad]).sum()

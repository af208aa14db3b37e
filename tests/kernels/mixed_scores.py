"""Checks shared by the tests of conv_attention and head_mix_attention."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.testing import assert_within_budget, starts
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import Case, Rounding, assert_sum_within_budget, gradient_rounding, largest_term

Operation = Callable[..., Tensor]
RESULTS = ("out", "dq", "dk", "dv", "dweight")


def roundings(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, dout: Tensor, mixed: float, pairs: int) -> dict[str, Rounding]:
    """Returns the expected rounding errors of output and gradients.

    They are those of plain attention, times ``mixed``, the sum of the absolute weights of a score. A gradient of the weight
    accumulates ``pairs`` pairs of query and key in sequence.
    """
    scale, one = q.shape[3] ** -0.5, weight.new_ones(1)
    plain = dict(zip(("dq", "dk", "dv"), gradient_rounding(q, k, v, dout, scale), strict=True))
    largest_dscore, largest_score = largest_term(dout, v, one, 1.0), largest_term(q, k, one, scale)
    return {
        **{name: Rounding(mixed * rounding.term, rounding.count) for name, rounding in plain.items()},
        "out": Rounding(mixed * v.abs().max().item(), 1),
        "dweight": Rounding(largest_dscore * largest_score, pairs),
    }


def assert_agrees(
    operation: Operation,
    definition: Callable[[Sequence[Tensor], Tensor, Tensor, torch.dtype], tuple[Tensor, ...]],
    case: Case,
    weight: Tensor,
    mixed: float,
    backend: Backend,
    device: str,
    pairs: int = 1,
) -> None:
    """Asserts that output and gradients agree with ``definition`` in fp64.

    They are exactly 0 for queries without visible keys. Padding holds NaN.
    """
    q, k, v = case.qkv(device)
    leaves = [*shared.fill_padding(case, q, k, v), weight.requires_grad_()]
    out = operation(*leaves, causal=case.causal, kv_start=starts(case.padding, device), backend=backend)
    dout = torch.randn_like(out)
    got = out.detach(), *torch.autograd.grad(out, leaves, dout)
    seen = case.visible(device)
    wanted, eager = (definition((q, k, v, weight), seen, dout, dtype) for dtype in (torch.float64, case.dtype))
    rounding = roundings(q, k, v, weight.detach(), dout, mixed, pairs)
    for name, x, x_exact, x_eager in zip(RESULTS, got, wanted, eager, strict=True):
        assert x.dtype == case.dtype
        within_budget = assert_sum_within_budget if name == "dweight" else assert_within_budget
        within_budget(name, x, x_exact, x_eager, **rounding[name]._asdict())
    empty = ~seen.any(-1).expand(out.shape[:3])
    assert (got[0][empty] == 0).all()
    assert (got[1][empty] == 0).all()


def results(operation: Operation, inputs: Sequence[Tensor], dout: Tensor, backend: Backend | None = None) -> list[Tensor]:
    """Returns the output and the gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    out = operation(*leaves, backend=backend)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def assert_accepts_misaligned_gradients(operation: Operation, inputs: Sequence[Tensor]) -> None:
    """Asserts that a gradient that is not aligned to 16 bytes gives the same results."""
    dout = torch.randn_like(inputs[0]).contiguous()
    misaligned = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view_as(dout)
    got, want = (results(operation, inputs, x, "triton") for x in (misaligned, dout))
    shared.assert_same(got, want)


def assert_operator(
    module: ModuleType, operation: Operation, inputs: Sequence[Tensor], backend: Backend, *options: Any
) -> None:
    """Asserts that the custom operator passes opcheck, and works under torch.compile."""
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(module._operator, (*leaves, starts([3], leaves[0].device), True, 0.1, *options, backend))
    dout = torch.ones_like(inputs[0])
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    shared.assert_same(*(results(f, leaves, dout, backend) for f in (compiled, operation)))


def assert_step_is_captured(module: ModuleType, inputs: Sequence[Tensor], dout: Tensor, *options: Any) -> None:
    """Asserts that a captured step, with backward, follows new inputs and padding."""
    kv_start = torch.tensor([7], dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        out, lse = module._operator(*inputs, kv_start, True, 0.1, *options, "triton")
        return [out, *module._backward_operator(dout, *inputs, out, lse, kv_start, True, 0.1, *options, "triton")]

    def change() -> None:
        kv_start.fill_(60)
        for x in inputs:
            x.copy_(torch.randn_like(x))

    shared.assert_cuda_graph(step, change)

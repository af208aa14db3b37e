"""Checks shared by the tests of conv_attention, conv_decode and head_mix_attention, and the
definition of the first two.
"""

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.testing import assert_within_budget, starts
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.problems import (
    Case,
    Rounding,
    assert_sum_within_budget,
    gradient_rounding,
    largest_term,
)

Operation = Callable[..., Tensor]
RESULTS = ("out", "dq", "dk", "dv", "dweight")


def roundings(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, dout: Tensor, mixed: float, pairs: int
) -> dict[str, Rounding]:
    """Returns the expected rounding errors of output and gradients.

    They are those of plain attention, times ``mixed``, the sum of the absolute weights of a score.
    A gradient of the weight accumulates ``pairs`` pairs of query and key in sequence.
    """
    scale, one = q.shape[3] ** -0.5, weight.new_ones(1)
    plain = dict(zip(("dq", "dk", "dv"), gradient_rounding(q, k, v, dout, scale), strict=True))
    largest_dscore, largest_score = largest_term(dout, v, one, 1.0), largest_term(q, k, one, scale)
    return {
        **{
            name: Rounding(mixed * rounding.term, rounding.count)
            for name, rounding in plain.items()
        },
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
    out = operation(
        *leaves, causal=case.causal, kv_start=starts(case.padding, device), backend=backend
    )
    dout = torch.randn_like(out)
    got = out.detach(), *torch.autograd.grad(out, leaves, dout)
    seen = case.visible(device)
    wanted, eager = (
        definition((q, k, v, weight), seen, dout, dtype) for dtype in (torch.float64, case.dtype)
    )
    rounding = roundings(q, k, v, weight.detach(), dout, mixed, pairs)
    for name, x, x_exact, x_eager in zip(RESULTS, got, wanted, eager, strict=True):
        assert x.dtype == (weight.dtype if name == "dweight" else case.dtype)
        within_budget = assert_sum_within_budget if name == "dweight" else assert_within_budget
        # The gradient of an fp32 weight is a sum of products in the dtype of the scores.
        within_budget(name, x.to(case.dtype), x_exact, x_eager, **rounding[name]._asdict())
    empty = ~seen.any(-1).expand(out.shape[:3])
    assert (got[0][empty] == 0).all()
    assert (got[1][empty] == 0).all()


def shifted(x: Tensor, up: int, right: int) -> Tensor:
    """Returns ``x[..., i - up, j + right]``, 0 outside."""
    padded = torch.nn.functional.pad(x, (max(-right, 0), max(right, 0), up, 0))
    return padded[..., : x.shape[-2], max(right, 0) : max(right, 0) + x.shape[-1]]


def convolved_scores(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    seen: Tensor,
    scale: float,
    dtype: torch.dtype,
    mask: ConvMask,
) -> Tensor:
    """Computes the convolved scores eagerly in ``dtype``, all in memory; -inf where they are
    masked.

    ``weight`` is ``[Hq, c_q, c_k]``, or ``[N, Hq, c_q, c_k]`` with one for each query.
    """
    statistics = torch.promote_types(dtype, torch.float32)
    q, k, weight = (x.to(dtype) for x in (q, k, weight))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    counts = seen if mask == "query" else seen.any(-1, keepdim=True)
    scores = torch.where(counts, (q @ k.mT).to(statistics) * scale, 0).to(dtype)
    window, taps = weight.shape[-2:]
    weight = weight.expand(q.shape[2], *weight.shape[-3:])
    mixed = torch.zeros_like(scores, dtype=statistics)
    for a, c in itertools.product(range(window), range(taps)):
        up, right = window - 1 - a, c - (taps - 1) // 2
        moved = shifted(scores, up, right)
        if mask == "key":
            moved = moved * shifted(seen, 0, right)
        mixed = mixed + weight[:, :, a, c].T[..., None] * moved
    return mixed.masked_fill(~seen, -torch.inf)


def convolved_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    seen: Tensor,
    scale: float,
    dtype: torch.dtype,
    mask: ConvMask = "query",
) -> Tensor:
    """Computes the definition eagerly in ``dtype``. Rows without visible keys are 0."""
    scores = convolved_scores(q, k, weight, seen, scale, dtype, mask).masked_fill(
        ~seen.any(-1, keepdim=True), 0
    )
    return scores.softmax(-1).masked_fill(~seen, 0).to(dtype) @ v.to(dtype).repeat_interleave(
        q.shape[1] // v.shape[1], 1
    )


def random_convolution(
    heads: int, size: tuple[int, int], dtype: torch.dtype, device: str
) -> Tensor:
    """Random kernels that preserve the magnitude of scores."""
    return (torch.randn(heads, *size) / (size[0] * size[1]) ** 0.5).to(device, dtype)


def results(
    operation: Operation, inputs: Sequence[Tensor], dout: Tensor, backend: Backend | None = None
) -> list[Tensor]:
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


def assert_step_is_captured(
    module: ModuleType, inputs: Sequence[Tensor], dout: Tensor, *options: Any
) -> None:
    """Asserts that a captured step, with backward, follows new inputs and padding."""
    kv_start = torch.tensor([7], dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        out, lse = module._operator(*inputs, kv_start, True, 0.1, *options, "triton")
        return [
            out,
            *module._backward_operator(
                dout, *inputs, out, lse, kv_start, True, 0.1, *options, "triton"
            ),
        ]

    def change() -> None:
        kv_start.fill_(60)
        for x in inputs:
            x.copy_(torch.randn_like(x))

    shared.assert_cuda_graph(step, change)

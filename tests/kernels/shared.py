"""Checks that the tests of several operations share."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset
from msattn.kernels.testing import Attention, assert_within_budget, dense_attention, starts
from msattn.kernels.types import Backend
from tests.kernels.problems import Case

BACKENDS: list[Backend] = ["torch", "triton"]
HALF, FULL = torch.float16, torch.float32


def assert_same(got: Any, want: Any) -> None:
    """Asserts bitwise equality of tensors, or of tuples of them."""
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def fill_padding(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns leaves that hold NaN in the left padding, which no result may depend on."""
    first = starts(case.padding, q.device)
    if first is None:
        return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
    offset = query_offset(case.num_queries, case.num_keys, case.causal)

    def fill(x: Tensor, first: Tensor) -> Tensor:
        padded = torch.arange(x.shape[2], device=x.device) < first[:, None]
        return x.detach().masked_fill(padded[:, None, :, None], torch.nan).requires_grad_()

    return fill(q, first - offset), fill(k, first), fill(v, first)


def assert_agrees(
    got: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Attention, Attention]:
    """Asserts that ``out`` and ``lse`` agree with dense attention in fp64, up to the error of eager
    PyTorch.

    The output is exactly 0 for queries that see no key. Returns the dense attention in fp64 and in
    fp32.
    """
    exact, eager, full = (
        dense_attention(q, k, v, seen, scale, dtype, score_mod, sinks)
        for dtype in (torch.float64, q.dtype, FULL)
    )
    out, lse = got.out.detach(), got.lse.detach()
    assert out.dtype == q.dtype
    assert lse.dtype == FULL
    assert_within_budget("out", out, exact.out, eager.out)
    assert_within_budget("lse", lse, exact.lse, full.lse)
    assert (out[~seen.any(-1).expand(lse.shape)] == 0).all()
    return exact, full


def assert_not_copied(
    module: ModuleType, kernel: str, step: Callable[[], Any], tensors: Iterable[Tensor]
) -> None:
    """Asserts that a step passes the tensors themselves to a kernel of the module."""
    launched, passed = getattr(module, kernel), []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **options: (passed.extend(args), launched[grid](*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, kernel, Launches())
        step()
    assert {x.data_ptr() for x in tensors} <= {
        x.data_ptr() for x in passed if isinstance(x, Tensor)
    }


def assert_cuda_graph(step: Callable[[], Any], change: Callable[[], Any]) -> None:
    """Asserts that a captured step follows in-place changes of its inputs, bit by bit."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels compile before the capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    change()
    graph.replay()
    assert_same(got, step())


def assert_reproducible(step: Callable[[], Any], runs: int = 3) -> None:
    """Asserts that all runs of a step give bitwise equal results."""
    want = step()
    for _ in range(runs):
        assert_same(step(), want)

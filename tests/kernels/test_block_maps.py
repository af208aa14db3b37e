"""Tests that block_sparse_attention and multiscale_attention share: accuracy against fp64,
gradients, edge cases.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.testing import random_qkv
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.block_maps import BLOCK_SPARSE, MULTISCALE, Operation, check, each_operation
from tests.kernels.problems import ANY_LENGTHS, CASES, Case
from tests.kernels.shared import BACKENDS

CAPPED = [(2, 5.0), (1, 50.0), (5, 5.0), (8, 5.0)]  # numbers of cases, and limits


@pytest.mark.interpreted(by="operation")
@each_operation
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("number", "softcap"),
    [CAPPED[0], *((n, None) for n in range(len(CASES))), *CAPPED[1:]],
    ids=str,
)
def test_agrees_with_fp64(
    operation: Operation,
    number: int,
    softcap: float | None,
    backend: Backend,
    device: str,
    poisoned: None,
) -> None:
    """Covers maps shared by batch or heads, and rows without a block."""
    case = CASES[number]
    heads = (case.q_heads, case.kv_heads, 1)[number % 3]
    blocks = operation.draw(case.batch if number % 2 else 1, heads, case.blocks, device=device)
    if number % 4 == 3:
        blocks[:, :, -1] = 0
    # Interpreted gradients take most of the time, so every second case checks the outputs alone.
    with_gradients = device == "cuda" or backend == "torch" or number % 2 == 1
    check(operation, case, blocks, backend, device, with_gradients, softcap)


@pytest.mark.parametrize(
    ("operation", "backend"),
    [
        (BLOCK_SPARSE, "torch"),
        (MULTISCALE, "torch"),
        pytest.param(BLOCK_SPARSE, "triton", marks=pytest.mark.slow),
    ],
    ids=["block_sparse", "multiscale", "block_sparse_triton"],
)
@settings(max_examples=16, deadline=None)
@given(
    **ANY_LENGTHS,
    keys=st.sampled_from([None, 16, 32, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_any_lengths(
    operation: Operation,
    backend: Backend,
    device: str,
    n: int,
    more: int,
    causal: bool,
    block: int,
    softcap: float | None,
    keys: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Column blocks of a mask may be of another size than row blocks."""
    keys = keys if operation is BLOCK_SPARSE else None
    case = Case(1, 2, 1, n, max(1, n + more), 16, dtype, causal, None, block, keys)
    blocks = operation.draw(1, 2, case.blocks, 0.5, device, seed)
    check(operation, case, blocks, backend, device, backend == "torch", softcap)


@pytest.mark.gpu
@each_operation
def test_reference_at_4095_tokens(operation: Operation, device: str) -> None:
    case = Case(1, 1, 1, 4095, 4095, 64)
    blocks = operation.draw(1, 1, case.blocks, 0.1, device)
    check(operation, case, blocks, "torch", device, with_gradients=operation is BLOCK_SPARSE)


@pytest.mark.slow
@each_operation
def test_accepts_output_gradients_of_any_layout(operation: Operation, device: str) -> None:
    """Covers expanded, transposed and misaligned ones, and those of the LSE alone."""
    q, k, v = inputs = [
        x.requires_grad_() for x in random_qkv(1, 2, 1, 70, head_size=16, device=device)
    ]
    blocks = operation.draw(1, 2, (3, 3), 0.5, device)
    out, lse = operation.attend(q, k, v, blocks, block_size=32, backend="triton")
    plain = torch.randn_like(out).contiguous()
    transposed = plain.mT.contiguous().mT
    shifted = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view_as(plain)
    want, *others = (
        torch.autograd.grad(out, inputs, x, retain_graph=True) for x in (plain, transposed, shifted)
    )
    for got in others:
        shared.assert_same(got, want)
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    shared.assert_same(torch.autograd.grad(out.sum(), inputs, retain_graph=True), ones)
    assert (torch.autograd.grad(lse.sum(), inputs)[2] == 0).all()


def step_of(
    operation: Operation, inputs: Sequence[Tensor], blocks: Tensor, **options: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a forward and backward pass on the same inputs."""
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    dout = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        got = operation.attend(q, k, v, blocks, **options)
        return *got, *torch.autograd.grad(got, leaves, (dout, torch.ones_like(got.lse)))

    return step


@pytest.mark.gpu
@each_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(operation: Operation, dtype: torch.dtype) -> None:
    case = Case(2, 8, 2, 2000, 2000, 128, dtype, True, (0, 300))
    blocks = operation.draw(1, 8, case.blocks, 0.3, "cuda")
    shared.assert_reproducible(
        step_of(operation, case.qkv("cuda"), blocks, **case.options("cuda")), runs=20
    )


@pytest.mark.gpu
@each_operation
def test_cuda_graph(operation: Operation) -> None:
    """A captured forward and backward step follows maps that change in place."""
    blocks = operation.draw(1, 4, (5, 5), 0.4, "cuda")
    step = step_of(operation, random_qkv(1, 4, 2, 300, dtype=torch.bfloat16, device="cuda"), blocks)
    shared.assert_cuda_graph(
        step, lambda: blocks.copy_(operation.draw(1, 4, (5, 5), 0.8, "cuda", seed=1))
    )

"""Tests head_mix_attention: accuracy against fp64, gradients, edge cases."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.multi_token import score_products
from msattn.kernels.multi_token.head_mix_attention import head_mix_attention
from msattn.kernels.multi_token.head_mix_attention import operation as module
from msattn.kernels.multi_token.head_mix_attention import scores as head_mix_scores
from msattn.kernels.testing import random_qkv
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.multi_token import mixed_scores
from tests.kernels.problems import Case, full_product
from tests.kernels.shared import BACKENDS, FULL, HALF


def mixed_attention(
    inputs: Sequence[Tensor], seen: Tensor, dout: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Computes output and gradients of the definition eagerly in ``dtype``.

    Rows without visible keys are 0. In fp64 each query has its own copy of the weight: its gradient
    is ``[N, Hq, Hq]``.
    """
    if dtype == torch.float64:
        inputs = [*inputs[:3], inputs[3].expand(dout.shape[2], -1, -1)]
    q, k, v, weight = leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
    by_query = weight.expand(q.shape[2], -1, -1)
    statistics = torch.promote_types(dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    mixed = torch.stack(
        [(by_query[:, h].T[..., None] * scores).sum(1) for h in range(q.shape[1])], 1
    ).to(statistics)
    mixed = mixed.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
    out = mixed.softmax(-1).masked_fill(~seen, 0).to(dtype) @ v
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


def random_weight(heads: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random weight near the identity, from which training starts."""
    return (torch.eye(heads) + torch.randn(heads, heads) / (2 * heads**0.5)).to(device, dtype)


def check(
    case: Case, backend: Backend, device: str, weight_dtype: torch.dtype | None = None
) -> None:
    weight = random_weight(case.q_heads, weight_dtype or case.dtype, device)
    mixed = weight.abs().sum(0).max().item()
    mix_tile = head_mix_scores.mix_backward_tile(case.q_heads)
    pairs = mix_tile.rows * mix_tile.keys
    mixed_scores.assert_agrees(
        head_mix_attention, mixed_attention, case, weight, mixed, backend, device, pairs
    )


CASES = [
    Case(1, 2, 1, 1, 1, 64),
    Case(2, 4, 1, 63, 63, 80, HALF, True, (0, 40)),
    Case(1, 7, 1, 65, 65, 128, FULL),
    Case(1, 1, 1, 111, 111, 64, HALF, False),
    Case(2, 2, 2, 33, 111, 128, HALF, True, (70, 100)),
    Case(2, 4, 4, 20, 65, 80, FULL, False, (3, 65)),
    Case(1, 4, 4, 1, 130, 64, HALF),
    Case(2, 4, 2, 65, 30, 16, FULL, True, (0, 20)),
    Case(1, 1, 1, 130, 130, 256, HALF),
    Case(1, 6, 3, 40, 90, 8, FULL, True, (60,)),
    Case(1, 20, 5, 40, 70, 16, HALF),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    check(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    for case in full_product(
        head_size, dtype, [(1, 1), (63, 63), (65, 65), (111, 300), (1025, 1025), (130, 65)]
    ):
        check(case, "triton", "cuda")
    check(Case(1, 4, 2, 4095, 4095, head_size, dtype), "triton", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_scratch_equals_one_pass(
    backend: Backend, device: str, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    """A small scratch forces processing by a few rows."""
    q, k, v = random_qkv(1, 4, 2, 140, head_size=16, dtype=HALF, device=device)
    inputs, dout = (q, k, v, random_weight(4, HALF, device)), torch.randn_like(q)
    whole = mixed_scores.results(head_mix_attention, inputs, dout, backend)
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 1)
    monkeypatch.setattr(module, "MIN_ROWS", 128)
    monkeypatch.setattr(
        "msattn.kernels.multi_token.reference.mixed_scores.SCORES_AT_ONCE", 50 * 140
    )
    parts = mixed_scores.results(head_mix_attention, inputs, dout, backend)
    torch.testing.assert_close(parts, whole, rtol=4e-3, atol=4e-3)


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 40), more=st.integers(0, 40))
def test_any_lengths(n: int, more: int) -> None:
    check(Case(1, 2, 2, n, n + more, 8), "torch", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_weight_with_16_bit_inputs(backend: Backend, device: str) -> None:
    check(Case(1, 2, 1, 30, 30, 16, HALF), backend, device, weight_dtype=FULL)


def test_scores_beyond_half_precision(device: str) -> None:
    """Scores saturate at the largest fp16 number, and nothing becomes NaN."""
    q, k, v = random_qkv(1, 2, 1, 40, head_size=16, dtype=HALF, device=device)
    k[:, :, 3] = q[:, :1, 30] * 40
    inputs = [200 * q, 40 * k, v, torch.eye(2, dtype=HALF, device=device)]
    out, *gradients = mixed_scores.results(head_mix_attention, inputs, torch.ones_like(q), "triton")
    torch.testing.assert_close(out[:, :1, 30], v[:, :, 3])
    assert all(x.isfinite().all() for x in gradients)


def test_accepts_misaligned_output_gradients(device: str) -> None:
    inputs = *random_qkv(1, 4, 2, 20, head_size=16, device=device), random_weight(4, FULL, device)
    mixed_scores.assert_accepts_misaligned_gradients(head_mix_attention, inputs)


def test_rejects_more_heads_than_the_kernels_support(device: str) -> None:
    q, k, v = random_qkv(1, 129, 1, 3, head_size=8, device=device)
    weight = torch.eye(129, device=device)
    assert head_mix_attention(q, k, v, weight, backend="torch").isfinite().all()
    with pytest.raises(ValueError, match=r"q.shape=\(1, 129, 3, 8\)"):
        head_mix_attention(q, k, v, weight, backend="triton")


def gpu_step(num_queries: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    q, k, v = random_qkv(1, 8, 4, num_queries, head_size=128, dtype=dtype, device="cuda")
    return [q, k, v, random_weight(8, dtype, "cuda")], torch.randn_like(q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 2**20)
    inputs, dout = gpu_step(1000, dtype)
    shared.assert_reproducible(lambda: mixed_scores.results(head_mix_attention, inputs, dout))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    mixed_scores.assert_step_is_captured(module, *gpu_step(300, torch.bfloat16))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last rows of 2**31 elements or more give the same results as alone."""
    q = torch.randn(1, 1, 2**24 + 64, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 1, 32, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = random_weight(1, torch.bfloat16, "cuda")
    long = [x.requires_grad_() for x in (q, k, v, weight)]
    short = [x.detach().requires_grad_() for x in (q[:, :, -40:], k, v, weight)]
    dout = torch.zeros_like(q)
    dout[:, :, -40:] = torch.randn_like(dout[:, :, -40:])
    results = []
    for inputs in (long, short):
        out = head_mix_attention(inputs[0], inputs[1], inputs[2], inputs[3], causal=False)
        dq, *rest = torch.autograd.grad(out, inputs, dout[:, :, -out.shape[2] :])
        results.append((out[:, :, -40:].detach(), dq[:, :, -40:], *rest))
    torch.testing.assert_close(*results)

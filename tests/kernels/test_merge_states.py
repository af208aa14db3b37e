"""Tests of `merge_states`: fp64 agreement, any order and grouping, operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.merge_states import merge_states
from msattn.kernels.testing import assert_within_budget, dense_attention, random_qkv
from msattn.kernels.types import Backend

BACKENDS: list[Backend] = ["torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_size", [8, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_agrees_with_fp64(dtype: torch.dtype, head_size: int, backend: Backend, device: str, poisoned: None) -> None:
    outs = torch.randn(5, 2, 3, 37, head_size, device=device).to(dtype)
    lses = torch.randn(5, 2, 3, 37, device=device) * 3
    lses[3] = -torch.inf
    weights, weights64 = lses.softmax(0)[..., None], lses.double().softmax(0)[..., None]
    exact, eager = (outs.double() * weights64).sum(0), (outs * weights.to(dtype)).sum(0)
    outs[3] = float("nan")  # outputs of an empty part are ignored
    got = merge_states(outs, lses, backend=backend)
    assert got.out.dtype == dtype
    assert_within_budget("out", got.out, exact, eager)
    assert_within_budget("lse", got.lse, lses.double().logsumexp(0), lses.logsumexp(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_merged_parts_equal_the_whole(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(2, 3, 3, 37, 65, device=device)
    part = torch.randint(0, 5, (65,), device=device)
    parts = [dense_attention(q, k, v, part == s, dtype=torch.float32) for s in range(5)]
    got = merge_states(torch.stack([x.out for x in parts]), torch.stack([x.lse for x in parts]), backend=backend)
    whole = dense_attention(q, k, v, part >= 0, dtype=torch.float32)
    torch.testing.assert_close(got, (whole.out, whole.lse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_parts_empty(backend: Backend, device: str) -> None:
    lses = torch.full((3, 1, 2, 5), -torch.inf, device=device)
    lses[0, :, 1] = 0.5
    got = merge_states(torch.ones(3, 1, 2, 5, 16, device=device), lses, backend=backend)
    assert (got.out[:, 0] == 0).all()
    assert (got.lse[:, 0] == -torch.inf).all()
    assert (got.out[:, 1] == 1).all()
    torch.testing.assert_close(got.lse[:, 1], lses[0, :, 1])


@settings(max_examples=15, deadline=None)
@given(parts=st.integers(2, 6), at=st.integers(1, 5), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 99))
def test_is_associative_and_commutative(device: str, parts: int, at: int, backend: Backend, seed: int) -> None:
    at = min(at, parts - 1)
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, 1, 2, 7, 16, generator=generator).to(device)
    lses = torch.randn(parts, 1, 2, 7, generator=generator).to(device) * 10
    whole = merge_states(outs, lses, backend=backend)
    halves = [merge_states(outs[part], lses[part], backend=backend) for part in (slice(at), slice(at, None))]
    grouped = merge_states(*(torch.stack(x) for x in zip(*halves, strict=True)), backend=backend)
    backwards = merge_states(outs.flip(0), lses.flip(0), backend=backend)
    torch.testing.assert_close(grouped, whole)
    torch.testing.assert_close(backwards, whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    from msattn.kernels import merge_states as module

    outs, lses = torch.randn(3, 2, 1, 5, 16, device=device), torch.randn(3, 2, 1, 5, device=device)
    torch.library.opcheck(module._operator, (outs, lses, backend))
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    got, want = (f(outs, lses, backend=backend) for f in (compiled, merge_states))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="no gradient"):
        merge_states(outs.requires_grad_(), lses, backend=backend).out.sum().backward()


def test_accepts_strided_views(device: str) -> None:
    outs = torch.randn(2, 5, 3, 16, 2, device=device).permute(4, 0, 2, 1, 3)  # all dimensions permuted
    lses = torch.randn(2, 5, 3, 2, device=device).permute(3, 0, 2, 1)
    got = merge_states(outs, lses, backend="triton")
    torch.testing.assert_close(got, merge_states(outs.contiguous(), lses.contiguous(), backend="torch"))


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(2, 1, 1, 5, 8), torch.zeros(2, 1, 1, 4), "lses is"),
        (torch.zeros(2, 1, 1, 5, 8), torch.zeros(2, 1, 1, 5, dtype=torch.float64), "lses is"),
        (torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5), "outs is"),
        (torch.zeros(0, 1, 1, 5, 8), torch.zeros(0, 1, 1, 5), "outs is"),
    ],
)
def test_refuses(outs: torch.Tensor, lses: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_states(outs, lses)

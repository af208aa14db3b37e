"""Tests maxpool_attention: accuracy against fp64, edge cases, operator."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels import reference
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.kernels.testing import (
    CAPPED_CASES,
    CAPPED_SCALE,
    CASES,
    Case,
    assert_within_budget,
    block_numbers,
    capped,
    dense_attention,
    full_product,
    max_over_blocks,
    random_qkv,
    starts,
)
from msattn.kernels.types import Backend

BACKENDS: list[Backend] = ["torch", "triton"]


def exact_map(probs: torch.Tensor, case: Case) -> torch.Tensor:
    sizes = case.batch, case.num_queries, case.num_keys, case.causal, starts(case.padding), case.block_size
    return max_over_blocks(probs, *block_numbers(*sizes), case.blocks)


def check(case: Case, backend: Backend, device: str, softcap: float | None = None, sinks: torch.Tensor | None = None) -> None:
    q, k, v = case.qkv(device)
    scale = None if softcap is None else CAPPED_SCALE
    exact, full, eager = (
        dense_attention(q, k, v, case.visible(device), scale, dtype, capped(softcap), sinks)
        for dtype in (torch.float64, torch.float32, case.dtype)
    )
    got = maxpool_attention(q, k, v, **case.options(device), scale=scale, softcap=softcap, sinks=sinks, backend=backend)
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == got.pooled.dtype == torch.float32
    assert_within_budget("out", got.out, exact.out, eager.out)
    assert_within_budget("lse", got.lse, exact.lse, full.lse)
    assert_within_budget("pooled", got.pooled, exact_map(exact.probs, case), exact_map(full.probs, case))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    check(case, backend, device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "softcap"), CAPPED_CASES, ids=str)
def test_softcap_agrees_with_fp64(case: Case, softcap: float, backend: Backend, device: str, poisoned: None) -> None:
    check(case, backend, device, softcap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [CASES[n] for n in (8, 1, 5, 0, 2, 4)], ids=str)
def test_sinks_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    """Each row's probabilities are normalized with the sink, before the maximum over rows."""
    check(case, backend, device, sinks=3 * torch.randn(case.q_heads, device=device).to(case.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_softcap_and_sinks_at_4095_tokens(head_size: int, softcap: float, poisoned: None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(2, 7, 1, 4095, 4095, head_size, dtype, True, (0, 30))
        check(case, "triton", "cuda", softcap)
        check(case, "triton", "cuda", softcap, 3 * torch.randn(7, device="cuda").to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("length", [4095])
def test_reference_at_4095_tokens(length: int) -> None:
    check(Case(1, 1, 1, length, length, 64), "torch", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("head_size", "block_size"), [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (4095, 4095), (130, 65)]
    for case in full_product(head_size, dtype, lengths, block_size):
        check(case, "triton", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_equals_unpadded(backend: Backend, device: str) -> None:
    """A padded sequence gives the same results as alone, with NaN in the padding."""
    q, k, v = random_qkv(1, 2, 1, 100, head_size=64, device=device)
    alone = maxpool_attention(q, k, v, block_size=32, backend=backend)
    pad = 45
    padded = [torch.nn.functional.pad(x, (0, 0, pad, 0), value=float("nan")) for x in (q, k, v)]
    got = maxpool_attention(*padded, block_size=32, kv_start=starts([pad], device), backend=backend)
    assert (got.out[:, :, :pad] == 0).all()
    assert (got.lse[:, :, :pad] == -torch.inf).all()
    torch.testing.assert_close(got.out[:, :, pad:], alone.out)
    torch.testing.assert_close(got.lse[:, :, pad:], alone.lse)
    rows, cols = alone.pooled.shape[2:]
    torch.testing.assert_close(got.pooled[:, :, :rows, :cols], alone.pooled)
    assert (got.pooled[:, :, rows:] == 0).all()
    assert (got.pooled[:, :, :, cols:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_visible_keys(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(2, 2, 1, 70, 40, device=device)
    got = maxpool_attention(q, k, v, kv_start=starts([0, 40], device), backend=backend)
    assert (got.out[0, :, :30] == 0).all()
    assert (got.lse[0, :, :30] == -torch.inf).all()
    assert got.lse[0, :, 30:].isfinite().all()
    assert (got.out[1] == 0).all()
    assert (got.lse[1] == -torch.inf).all()
    assert (got.pooled[1] == 0).all()


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 150),
    more=st.integers(0, 90),
    causal=st.booleans(),
    block=st.sampled_from([16, 64]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
)
def test_bounds_of_the_block_map(n: int, more: int, causal: bool, block: int, softcap: float | None) -> None:
    """Values are in [0, 1], row maxima at least 1 / keys, and 0 above the diagonal; capped scores bound the LSE."""
    q, k, v = random_qkv(1, 2, 1, n, n + more, 16)
    _, lse, pooled = maxpool_attention(q, k, v, block_size=block, causal=causal, softcap=softcap, scale=1.0)
    assert softcap is None or lse.max() <= softcap + math.log(n + more) + 1e-5
    assert pooled.min() >= 0
    assert pooled.max() <= 1 + 1e-6
    assert (pooled.amax(-1) >= 1 / (n + more) - 1e-6).all()
    if causal:
        last = torch.arange(pooled.shape[2]) * block + block - 1 + more
        above = torch.arange(pooled.shape[3]) * block > last[:, None]
        assert (pooled[..., above] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_are_independent(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(3, 2, 1, 70, device=device)
    padding = torch.tensor([0, 5, 33], dtype=torch.int32, device=device)
    order = torch.tensor([2, 0, 1], device=device)
    straight = maxpool_attention(q, k, v, kv_start=padding, backend=backend)
    shuffled = maxpool_attention(q[order], k[order], v[order], kv_start=padding[order], backend=backend)
    for x, y in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(x[order], y)


def test_equals_scaled_dot_product_attention(device: str) -> None:
    q, k, v = random_qkv(2, 4, 2, 130, device=device)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(maxpool_attention(q, k, v, scale=0.3).out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    from msattn.kernels import maxpool_attention as module

    q, k, v = random_qkv(1, 2, 1, 70, device=device)
    arguments = (q, k, v, torch.randn(2, device=device), starts([3], device), 64, True, 0.1, 5.0, backend)
    torch.library.opcheck(module._operator, arguments)
    compiled = torch.compile(maxpool_attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(q, k, v, backend=backend), maxpool_attention(q, k, v, backend=backend), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_reads_views_of_a_packed_projection(device: str) -> None:
    packed = torch.randn(2, 70, 4, 64, device=device).transpose(1, 2)
    q, k, v = packed[:, :2], packed[:, 2:3], packed[:, 3:]
    got = maxpool_attention(q, k, v, backend="triton")
    want = maxpool_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="triton")
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_no_gradient(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 20, device=device)
    out = maxpool_attention(q.requires_grad_(), k, v, backend=backend).out
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size=48"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"softcap": float("inf")}, "softcap=inf"),
        ({"sinks": torch.zeros(3)}, "sinks is torch.float32 \\(3,\\)"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks is torch.int32"),
        ({"kv_start": torch.zeros(2)}, "kv_start is torch.float32"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"q": torch.zeros(1, 3, 20, 64)}, "q has 3 heads"),
        ({"q": torch.zeros(1, 2, 20, 60)}, "head size"),
        ({"q": torch.zeros(1, 2, 20, 64, dtype=torch.float64)}, "dtype"),
        ({"q": torch.zeros(2, 20, 64)}, "q.shape"),
        ({"q": torch.zeros(2, 2, 20, 64)}, "batch"),
    ],
)
def test_rejects_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(1, 2, 20, 64) for name in "qkv"} | change
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        maxpool_attention(q, k, v, **arguments)


def test_rejects_unsupported_layout_and_dtype(device: str) -> None:
    q, k, v = random_qkv(1, 1, 1, 64, head_size=64, device=device)
    with pytest.raises(ValueError, match=r"k.stride\(\)"):
        maxpool_attention(q, k.transpose(2, 3), v, backend="triton")
    with pytest.raises(ValueError, match="float64"):
        maxpool_attention(q.double(), k.double(), v.double(), backend="triton")
    with pytest.raises(ValueError, match="kv_start"):
        reference.maxpool_attention(q, k, v, kv_start=starts([65], device))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = random_qkv(2, 4, 2, 300, dtype=torch.bfloat16, device="cuda")
    padding = torch.zeros(2, dtype=torch.int32, device="cuda")
    maxpool_attention(q, k, v, kv_start=padding)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maxpool_attention(q, k, v, kv_start=padding)
    padding.copy_(torch.tensor([17, 100]))
    graph.replay()
    for x, y in zip(got, maxpool_attention(q, k, v, kv_start=padding), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)

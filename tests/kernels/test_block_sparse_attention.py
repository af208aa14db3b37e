"""Tests block_sparse_attention: accuracy against fp64, gradients, edge cases."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.common.block_lists import compact_columns, compact_rows
from msattn.kernels.testing import (
    assert_within_budget,
    capped,
    dense_attention,
    random_block_mask,
    random_qkv,
    starts,
    tokens_of_blocks,
    visible,
)
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, CASES, Case, full_product, gradient_rounding
from tests.kernels.shared import BACKENDS

CAPPED = [(2, 5.0), (1, 50.0), (5, 5.0), (8, 5.0)]  # numbers of cases, and limits


def seen_tokens(mask: Tensor, case: Case, device: str) -> Tensor:
    padding = starts(case.padding, device)
    sizes = case.batch, case.q_heads, case.num_queries, case.num_keys, case.causal, padding, case.block_size
    return case.visible(device) & tokens_of_blocks(mask, *sizes)


def dense_gradients(
    inputs: Sequence[Tensor], seen: Tensor, dout: Tensor, dlse: Tensor, dtype: torch.dtype, scale: float, softcap: float | None
) -> tuple[Tensor, ...]:
    """Gradients of dense attention in ``dtype``; 0 for rows without visible keys."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    empty = ~seen.any(-1)
    q, k, v = leaves
    out, lse, _ = dense_attention(q, k, v, seen | empty[..., None], scale, dtype, capped(softcap))
    weights = dout.to(out.dtype).masked_fill(empty[..., None], 0), dlse.to(lse.dtype).masked_fill(empty, 0)
    return torch.autograd.grad((out, lse), leaves, weights)


def check(
    case: Case, mask: Tensor, backend: Backend, device: str, with_gradients: bool = True, softcap: float | None = None
) -> None:
    """Checks outputs, and gradients through out and lse, against dense attention.

    Padding holds NaN. Query gradients of rows without visible keys are exactly 0.
    """
    drawn = q, k, v = case.qkv(device)
    seen = seen_tokens(mask, case, device)
    scale = case.head_size**-0.5 if softcap is None else CAPPED_SCALE
    inputs = shared.fill_padding(case, *drawn)
    got = block_sparse_attention(*inputs, mask, **case.options(device), scale=scale, softcap=softcap, backend=backend)
    shared.assert_agrees(got, q, k, v, seen, scale, capped(softcap))
    if not with_gradients:
        return
    weights = torch.randn_like(got.out), torch.randn_like(got.lse)
    gradients = torch.autograd.grad(got, inputs, weights)
    wanted, eager_ones = (
        dense_gradients(drawn, seen, *weights, dtype, scale, softcap) for dtype in (torch.float64, case.dtype)
    )
    roundings = gradient_rounding(q, k, v, weights[0], scale)
    for name, x, x_exact, x_eager, rounding in zip(("dq", "dk", "dv"), gradients, wanted, eager_ones, roundings, strict=True):
        assert x.dtype == case.dtype
        assert_within_budget(name, x, x_exact, x_eager, **rounding._asdict())
    assert (gradients[0][~seen.any(-1)] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "softcap"), [CAPPED[0], *((n, None) for n in range(len(CASES))), *CAPPED[1:]], ids=str)
def test_agrees_with_fp64(number: int, softcap: float | None, backend: Backend, device: str, poisoned: None) -> None:
    """Covers masks shared by batch or heads, and rows without a block."""
    case = CASES[number]
    heads = (case.q_heads, case.kv_heads, 1)[number % 3]
    mask = random_block_mask(case.batch if number % 2 else 1, heads, *case.blocks, 0.4, device)
    if number % 4 == 3:
        mask[:, :, -1] = False
    # Interpreted gradients take most of the time, so every second case checks the outputs alone.
    with_gradients = device == "cuda" or backend == "torch" or number % 2 == 1
    check(case, mask, backend, device, with_gradients, softcap)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 150),
    more=st.integers(-20, 90),
    causal=st.booleans(),
    block=st.sampled_from([16, 64]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    seed=st.integers(0, 99),
)
def test_any_lengths(
    backend: Backend, device: str, n: int, more: int, causal: bool, block: int, softcap: float | None, seed: int
) -> None:
    case = Case(1, 2, 1, n, max(1, n + more), 16, causal=causal, block_size=block)
    check(case, random_block_mask(1, 2, *case.blocks, 0.5, device, seed), backend, device, backend == "torch", softcap)


@pytest.mark.gpu
def test_reference_at_4095_tokens(device: str) -> None:
    case = Case(1, 1, 1, 4095, 4095, 64)
    check(case, random_block_mask(1, 1, *case.blocks, 0.1, device), "torch", device)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_size", "block_size"), [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (4095, 4095), (130, 65)]
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for case in full_product(head_size, dtype, lengths, block_size):
        check(case, random_block_mask(1, case.q_heads, *case.blocks, 0.3, "cuda"), "triton", "cuda", softcap=next(limits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_only_selected_blocks(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 2, 200, head_size=64, device=device)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool, device=device)
    mask[:, :, :, 0] = mask[:, :, 2, 1] = True
    want = block_sparse_attention(q, k, v, mask, backend=backend)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")  # above the diagonal or not selected
    inputs = [x.requires_grad_() for x in (q, k, v)]
    got = block_sparse_attention(q, k, v, mask, backend=backend)
    shared.assert_same(got, want)
    dq, dk, dv = torch.autograd.grad(got.out.square().sum(), inputs)
    assert dq.isfinite().all()
    for x in (dk, dv):
        assert x[:, :, :128].isfinite().all()
        assert (x[:, :, 128:] == 0).all()


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_compacted_lists(heads: int, causal: bool, device: str) -> None:
    """Lists hold the visible blocks in order and count the full ones."""
    block, num_queries, num_keys = 16, 70, 100
    mask = random_block_mask(1, heads, 5, 7, 0.5, device)
    sizes = mask, None, num_queries, num_keys, num_keys - num_queries, block, causal
    (rows, row_lengths), (columns, column_lengths) = compact_rows(*sizes), compact_columns(*sizes, 2, 2)

    def tiles(missing_keys: bool, missing_queries: bool) -> Tensor:
        seen = visible(1, num_queries, num_keys, causal, None, device)[0, 0]
        seen = torch.nn.functional.pad(seen, (0, 7 * block - num_keys), value=missing_keys)
        seen = torch.nn.functional.pad(seen, (0, 0, 0, 5 * block - num_queries), value=missing_queries)
        return seen.unflatten(1, (7, block)).unflatten(0, (5, block)).transpose(1, 2).flatten(2)

    on = mask[0].repeat_interleave(4 // heads, 0) & tiles(False, False).any(2)
    for h, r in itertools.product(range(heads), range(5)):
        listed = on[h * 4 // heads, r].nonzero()[:, 0]
        plain, count = row_lengths[0, h, r].tolist()
        assert rows[0, h, r, :count].tolist() == listed.tolist()
        assert plain == tiles(False, True).all(2)[r, listed].sum()
    for h, c in itertools.product(range(2), range(7)):
        listed = on[2 * h : 2 * h + 2, :, c].mT.flatten().nonzero()[:, 0]
        plain, count = column_lengths[0, h, c].tolist()
        assert columns[0, h, c, :count].tolist() == listed.tolist()
        assert plain == tiles(True, True).all(2)[listed // 2, c].sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_selected(backend: Backend, device: str) -> None:
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 70, device=device)]
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool, device=device)
    got = block_sparse_attention(q, k, v, mask, backend=backend)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()
    for x in torch.autograd.grad(got, inputs, (torch.randn_like(got.out), torch.full_like(got.lse, torch.inf))):
        assert (x == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, steady_device: str) -> None:
    from msattn.kernels.block_sparse_attention import forward as module

    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 40, head_size=16, device=steady_device)]
    mask = random_block_mask(1, 1, 2, 2, 0.5, steady_device)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return block_sparse_attention(q, k, v, mask, block_size=32, backend=backend)

    arguments = (*inputs, mask, starts([3], steady_device), 32, True, 0.1, 5.0, backend)
    shared.assert_operator(module._operator, arguments, step, q, k, v)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    shared.assert_same(*(torch.autograd.grad([x.square().sum() for x in f(q, k, v)], inputs) for f in (compiled, step)))


@pytest.mark.slow
def test_accepts_output_gradients_of_any_layout(device: str) -> None:
    """Covers expanded, transposed and misaligned ones, and those of the LSE alone."""
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 70, head_size=16, device=device)]
    mask = random_block_mask(1, 2, 3, 3, 0.5, device)
    out, lse = block_sparse_attention(q, k, v, mask, block_size=32, backend="triton")
    plain = torch.randn_like(out).contiguous()
    transposed = plain.mT.contiguous().mT
    shifted = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view_as(plain)
    want, *others = (torch.autograd.grad(out, inputs, x, retain_graph=True) for x in (plain, transposed, shifted))
    for got in others:
        shared.assert_same(got, want)
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    shared.assert_same(torch.autograd.grad(out.sum(), inputs, retain_graph=True), ones)
    assert (torch.autograd.grad(lse.sum(), inputs)[2] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size=48"),
        ({"block_mask": torch.ones(1, 2, 1, 1)}, "block_mask is torch.float32"),
        ({"block_mask": torch.ones(1, 2, 2, 1, dtype=torch.bool)}, "row blocks must be 1"),
        ({"block_mask": torch.ones(1, 3, 1, 1, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
        ({"kv_start": torch.zeros(2, dtype=torch.int32)}, "kv_start"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"softcap": -1.0}, "softcap=-1.0"),
    ],
)
def test_rejects_bad_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v = random_qkv(1, 4, 2, 20)
    arguments: dict[str, Any] = {"block_mask": torch.ones(1, 2, 1, 1, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, **arguments)
    with pytest.raises(ValueError, match="kv_start"):
        reference.block_sparse_attention(q, k, v, torch.ones(1, 1, 1, 1, dtype=torch.bool), kv_start=starts([21]))


def step_of(inputs: Sequence[Tensor], mask: Tensor, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a forward and backward pass on the same inputs."""
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    dout = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        got = block_sparse_attention(q, k, v, mask, **options)
        return *got, *torch.autograd.grad(got.out, leaves, dout)

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(dtype: torch.dtype) -> None:
    case = Case(2, 8, 2, 2000, 2000, 128, dtype, True, (0, 300))
    mask = random_block_mask(1, 8, *case.blocks, 0.3, "cuda")
    shared.assert_reproducible(step_of(case.qkv("cuda"), mask, **case.options("cuda")), runs=20)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    mask = random_block_mask(1, 4, 5, 5, 0.3, "cuda")
    step = step_of(random_qkv(1, 4, 2, 300, dtype=torch.bfloat16, device="cuda"), mask)
    shared.assert_cuda_graph(step, lambda: mask.copy_(random_block_mask(1, 4, 5, 5, 0.6, "cuda", seed=1)))


@pytest.mark.gpu
@pytest.mark.parametrize("long", ["queries", "keys"])
def test_offsets_beyond_32_bits(long: str) -> None:
    """The first and last block of 2**31 elements give the same results as alone."""
    num_queries, num_keys = (2**23 + 64, 128) if long == "queries" else (128, 2**23 + 64)
    q = torch.randn(1, 2, num_queries, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (torch.randn(1, 2, num_keys, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2))
    mask = torch.zeros(1, 1, -(-num_queries // 64), -(-num_keys // 64), dtype=torch.bool, device="cuda")
    mask[:, :, :: mask.shape[2] - 1, :: mask.shape[3] - 1] = True
    out = block_sparse_attention(q, k, v, mask, causal=False).out
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)

    def outer_blocks(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :64], x[:, :, -64:]], 2).detach()

    q, k, v = small = [outer_blocks(x).requires_grad_() for x in (q, k, v)]
    everything = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cuda")
    want = block_sparse_attention(q, k, v, everything, causal=False).out
    torch.testing.assert_close(outer_blocks(out), want.detach())
    for x, y in zip(gradients, torch.autograd.grad(want, small, outer_blocks(dout)), strict=True):
        torch.testing.assert_close(outer_blocks(x), y)
        assert not x[:, :, 64:-64].any()

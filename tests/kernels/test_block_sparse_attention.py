"""Tests block_sparse_attention: accuracy against fp64, gradients, edge cases."""

import itertools
from collections.abc import Sequence
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
    CAPPED_CASES,
    CAPPED_SCALE,
    CASES,
    Case,
    assert_within_budget,
    capped,
    dense_attention,
    full_product,
    gradient_rounding,
    random_block_mask,
    random_qkv,
    starts,
    tokens_of_blocks,
    visible,
)
from msattn.kernels.types import Backend

BACKENDS: list[Backend] = ["torch", "triton"]


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

    Query gradients of rows without visible keys are exactly 0.
    """
    q, k, v = inputs = [x.requires_grad_() for x in case.qkv(device)]
    seen = seen_tokens(mask, case, device)
    scale = case.head_size**-0.5 if softcap is None else CAPPED_SCALE
    with torch.no_grad():
        exact, full, eager = (
            dense_attention(q, k, v, seen, scale, dtype, capped(softcap))
            for dtype in (torch.float64, torch.float32, case.dtype)
        )
    got = block_sparse_attention(q, k, v, mask, **case.options(device), scale=scale, softcap=softcap, backend=backend)
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == torch.float32
    assert_within_budget("out", got.out.detach(), exact.out, eager.out)
    assert_within_budget("lse", got.lse.detach(), exact.lse, full.lse)
    if not with_gradients:
        return
    weights = torch.randn_like(got.out), torch.randn_like(got.lse)
    gradients = torch.autograd.grad(got, inputs, weights)
    wanted, eager_ones = (
        dense_gradients(inputs, seen, *weights, dtype, scale, softcap) for dtype in (torch.float64, case.dtype)
    )
    roundings = gradient_rounding(q.detach(), k.detach(), v.detach(), weights[0], scale)
    for name, x, x_exact, x_eager, rounding in zip(("dq", "dk", "dv"), gradients, wanted, eager_ones, roundings, strict=True):
        assert x.dtype == case.dtype
        assert_within_budget(name, x, x_exact, x_eager, **rounding._asdict())
    assert (gradients[0][~seen.any(-1)] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_agrees_with_fp64(number: int, backend: Backend, device: str, poisoned: None) -> None:
    """Covers masks shared by batch or heads, and rows without a block."""
    case = CASES[number]
    heads = (case.q_heads, case.kv_heads, 1)[number % 3]
    mask = random_block_mask(case.batch if number % 2 else 1, heads, *case.blocks, 0.4, device)
    if number % 4 == 3:
        mask[:, :, -1] = False
    # Interpreted gradients take most of the time, so every second case checks the outputs alone.
    check(case, mask, backend, device, with_gradients=device == "cuda" or backend == "torch" or number % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "softcap"), CAPPED_CASES, ids=str)
def test_softcap_agrees_with_fp64(case: Case, softcap: float, backend: Backend, device: str, poisoned: None) -> None:
    check(case, random_block_mask(1, case.q_heads, *case.blocks, 0.4, device), backend, device, softcap=softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_softcap_at_4095_tokens(head_size: int, softcap: float, poisoned: None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(2, 7, 1, 4095, 4095, head_size, dtype, True, (0, 30))
        check(case, random_block_mask(1, 7, *case.blocks, 0.3, "cuda"), "triton", "cuda", softcap=softcap)


@pytest.mark.gpu
def test_reference_at_4095_tokens(device: str) -> None:
    case = Case(1, 1, 1, 4095, 4095, 64)
    check(case, random_block_mask(1, 1, *case.blocks, 0.1, device), "torch", device)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_size", "block_size"), [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (4095, 4095), (130, 65)]
    for case in full_product(head_size, dtype, lengths, block_size):
        check(case, random_block_mask(1, case.q_heads, *case.blocks, 0.3, "cuda"), "triton", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_equals_unpadded(backend: Backend, device: str) -> None:
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 100, head_size=64, device=device)]
    mask = random_block_mask(1, 2, 5, 5, 0.5, device)
    alone = block_sparse_attention(q, k, v, mask[:, :, :4, :4], block_size=32, backend=backend)
    weight = torch.randn_like(alone.out)
    wanted = torch.autograd.grad(alone.out, inputs, weight)
    pad = 45
    padded = (torch.nn.functional.pad(x.detach(), (0, 0, pad, 0), value=float("nan")) for x in inputs)
    q, k, v = inputs = [x.requires_grad_() for x in padded]
    got = block_sparse_attention(q, k, v, mask, block_size=32, kv_start=starts([pad], device), backend=backend)
    gradients = torch.autograd.grad(got.out, inputs, torch.nn.functional.pad(weight, (0, 0, pad, 0)))
    for x, want in zip(gradients, wanted, strict=True):
        assert (x[:, :, :pad] == 0).all()
        torch.testing.assert_close(x[:, :, pad:], want)
    assert (got.out[:, :, :pad] == 0).all()
    assert (got.lse[:, :, :pad] == -torch.inf).all()
    torch.testing.assert_close(got.out[:, :, pad:], alone.out)
    torch.testing.assert_close(got.lse[:, :, pad:], alone.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_only_selected_blocks(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 2, 200, head_size=64, device=device)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool, device=device)
    mask[:, :, :, 0] = mask[:, :, 2, 1] = True
    want = block_sparse_attention(q, k, v, mask, backend=backend)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")  # above the diagonal or not selected
    inputs = [x.requires_grad_() for x in (q, k, v)]
    got = block_sparse_attention(q, k, v, mask, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
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


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 150),
    more=st.integers(0, 90),
    causal=st.booleans(),
    block=st.sampled_from([16, 64]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
)
def test_full_mask_equals_dense_attention(n: int, more: int, causal: bool, block: int, softcap: float | None) -> None:
    case = Case(1, 2, 1, n, n + more, 16, causal=causal, block_size=block)
    q, k, v = case.qkv()
    mask = torch.ones(1, 1, *case.blocks, dtype=torch.bool)
    got = block_sparse_attention(q, k, v, mask, **case.options(), softcap=softcap)
    want = dense_attention(q, k, v, case.visible(), dtype=torch.float32, score_mod=capped(softcap))
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 150), more=st.integers(0, 90), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 99))
def test_ignores_mask_above_the_diagonal(device: str, n: int, more: int, backend: Backend, seed: int) -> None:
    case = Case(1, 2, 1, n, n + more, 16, block_size=32)
    q, k, v = case.qkv(device)
    mask = random_block_mask(1, 2, *case.blocks, 0.5, device, seed)
    last = torch.arange(case.blocks[0], device=device) * 32 + 31 + more
    below = torch.arange(case.blocks[1], device=device) * 32 <= last[:, None]
    got = [block_sparse_attention(q, k, v, x, block_size=32, backend=backend) for x in (mask | ~below, mask & below)]
    torch.testing.assert_close(*got, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_are_independent(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(3, 2, 1, 70, device=device)
    mask = random_block_mask(3, 2, 5, 5, 0.4, device)
    order = torch.tensor([2, 0, 1], device=device)
    straight = block_sparse_attention(q, k, v, mask, block_size=16, backend=backend)
    shuffled = block_sparse_attention(q[order], k[order], v[order], mask[order], block_size=16, backend=backend)
    for x, y in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(x[order], y)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(n=st.integers(1, 80), more=st.integers(0, 40), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 99))
def test_invariant_to_a_constant_added_to_the_keys(device: str, n: int, more: int, backend: Backend, seed: int) -> None:
    """The output and dQ stay the same, and the gradients of the keys sum to 0."""
    case = Case(1, 2, 1, n, n + more, 16, block_size=64)
    q, k, v = case.qkv(device, seed)
    mask = random_block_mask(1, 2, *case.blocks, 0.5, device, seed)
    dout = torch.randn_like(q)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = block_sparse_attention(q, k, v, mask, backend=backend).out
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    plain, shifted_keys = (
        step(*(x.detach().requires_grad_() for x in (q, keys, v))) for keys in (k, k + torch.randn_like(k[:, :, :1]))
    )
    torch.testing.assert_close(shifted_keys, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain[2].sum(2), torch.zeros_like(plain[2][:, :, 0]), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, steady_device: str) -> None:
    from msattn.kernels.block_sparse_attention import forward as module

    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 40, head_size=16, device=steady_device)]
    mask = random_block_mask(1, 1, 2, 2, 0.5, steady_device)
    torch.library.opcheck(module._operator, (*inputs, mask, starts([3], steady_device), 32, True, 0.1, 5.0, backend))
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    got, want = (f(q, k, v, mask, block_size=32, backend=backend) for f in (compiled, block_sparse_attention))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    gradients, wanted = (torch.autograd.grad(x.out.square().sum() + x.lse.sum(), inputs) for x in (got, want))
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize("padding", [None, (0, 7)])
def test_reference_gradients_match_finite_differences(padding: tuple[int, ...] | None, softcap: float | None) -> None:
    case = Case(2, 2, 1, 18, 20, 8, torch.float64, True, padding, 16)
    mask = random_block_mask(1, 2, *case.blocks, 0.5)
    mask[:, :, :, 0] = True
    q, k, v = (x.requires_grad_() for x in case.qkv())
    rows = slice(7, None)  # rows before these have an LSE of -inf in one sequence

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        got = block_sparse_attention(q, k, v, mask, **case.options(), softcap=softcap)
        return got.out, got.lse[:, :, rows]

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


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
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs, retain_graph=True), ones, rtol=0, atol=0)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(dtype: torch.dtype) -> None:
    case = Case(2, 8, 2, 2000, 2000, 128, dtype, True, (0, 300))
    q, k, v = inputs = [x.requires_grad_() for x in case.qkv("cuda")]
    mask = random_block_mask(1, 8, *case.blocks, 0.3, "cuda")
    weight = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        got = block_sparse_attention(q, k, v, mask, **case.options("cuda"))
        return *got, *torch.autograd.grad(got.out, inputs, weight)

    want = step()
    for _ in range(20):
        torch.testing.assert_close(step(), want, rtol=0, atol=0)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 4, 2, 300, dtype=torch.bfloat16, device="cuda")]
    mask = random_block_mask(1, 4, 5, 5, 0.3, "cuda")
    weight = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        got = block_sparse_attention(q, k, v, mask)
        return *got, *torch.autograd.grad(got.out, inputs, weight)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    mask.copy_(random_block_mask(1, 4, 5, 5, 0.6, "cuda", seed=1))
    graph.replay()
    torch.testing.assert_close(got, step(), rtol=0, atol=0)


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


def test_chunked_prefill_equals_one_pass(device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 96, device=device)
    mask = random_block_mask(1, 2, 6, 6, 0.5, device)
    whole = block_sparse_attention(q, k, v, mask, block_size=16).out
    tail = block_sparse_attention(q[:, :, 48:], k, v, mask[:, :, 3:], block_size=16).out
    torch.testing.assert_close(tail, whole[:, :, 48:])
    assert visible(1, 48, 96, True, None)[0, 0, 0].sum() == 49

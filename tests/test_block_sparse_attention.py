"""block_sparse_attention: kernel and reference against fp64, its edges, gradients, and how it behaves as an operator."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels import reference
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.testing import (
    CASES,
    Case,
    assert_within_budget,
    dense_attention,
    random_block_mask,
    random_qkv,
    starts,
    tokens_of_blocks,
    visible,
)
from msattn.kernels.types import Backend

BACKENDS: list[Backend] = ["torch", "triton"]


def seen_tokens(mask: torch.Tensor, case: Case, device: str) -> torch.Tensor:
    padding = starts(case.padding, device)
    sizes = case.batch, case.q_heads, case.num_queries, case.num_keys, case.causal, padding, case.block_size
    return case.visible(device) & tokens_of_blocks(mask, *sizes)


def check(case: Case, mask: torch.Tensor, backend: Backend, device: str) -> None:
    q, k, v = case.qkv(device)
    seen = seen_tokens(mask, case, device)
    exact, full = dense_attention(q, k, v, seen), dense_attention(q, k, v, seen, dtype=torch.float32)
    eager = dense_attention(q, k, v, seen, dtype=case.dtype)
    got = block_sparse_attention(q, k, v, mask, **case.options(device), backend=backend)
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == torch.float32
    assert_within_budget("out", got.out, exact.out, eager.out)
    assert_within_budget("lse", got.lse, exact.lse, full.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_agrees_with_fp64(number: int, backend: Backend, device: str, poisoned: None) -> None:
    """Masks of one sequence or all, and of query heads, key/value heads or none, in turn; rows without a block among them."""
    case = CASES[number]
    heads = (case.q_heads, case.kv_heads, 1)[number % 3]
    mask = random_block_mask(case.batch if number % 2 else 1, heads, *case.blocks, 0.4, device)
    if number % 4 == 3:
        mask[:, :, -1] = False
    check(case, mask, backend, device)


def test_reference_at_length() -> None:
    case = Case(1, 1, 1, 4095, 4095, 64)
    check(case, random_block_mask(1, 1, *case.blocks, 0.1), "torch", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    heads, lengths = [(2, 2), (4, 1), (7, 1)], [(1, 1), (63, 63), (65, 65), (111, 300), (4095, 4095), (130, 65)]
    for (q_heads, kv_heads), (n, m), causal, padding in itertools.product(heads, lengths, [True, False], [None, (0, 30)]):
        batch = 1 if padding is None else 2
        padding = None if padding is None else tuple(min(p, m) for p in padding)
        case = Case(batch, q_heads, kv_heads, n, m, head_size, dtype, causal, padding, block_size)
        check(case, random_block_mask(1, q_heads, *case.blocks, 0.3, "cuda"), "triton", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_equals_unpadded(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 100, head_size=64, device=device)
    mask = random_block_mask(1, 2, 5, 5, 0.5, device)
    alone = block_sparse_attention(q, k, v, mask[:, :, :4, :4], block_size=32, backend=backend)
    pad = 45
    q, k, v = (torch.nn.functional.pad(x, (0, 0, pad, 0), value=float("nan")) for x in (q, k, v))
    got = block_sparse_attention(q, k, v, mask, block_size=32, kv_start=starts([pad], device), backend=backend)
    assert (got.out[:, :, :pad] == 0).all()
    assert (got.lse[:, :, :pad] == -torch.inf).all()
    torch.testing.assert_close(got.out[:, :, pad:], alone.out)
    torch.testing.assert_close(got.lse[:, :, pad:], alone.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_only_what_the_mask_selects(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 2, 200, head_size=64, device=device)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool, device=device)
    mask[:, :, :, 0] = mask[:, :, 2, 1] = True
    want = block_sparse_attention(q, k, v, mask, backend=backend)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")  # above the diagonal or not selected
    got = block_sparse_attention(q, k, v, mask, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_selected(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 70, device=device)
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool, device=device)
    got = block_sparse_attention(q, k, v, mask, backend=backend)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 150), more=st.integers(0, 90), causal=st.booleans(), block=st.sampled_from([16, 64]))
def test_full_mask_is_dense(n: int, more: int, causal: bool, block: int) -> None:
    case = Case(1, 2, 1, n, n + more, 16, causal=causal, block_size=block)
    q, k, v = case.qkv()
    got = block_sparse_attention(q, k, v, torch.ones(1, 1, *case.blocks, dtype=torch.bool), **case.options())
    want = dense_attention(q, k, v, case.visible(), dtype=torch.float32)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 150), more=st.integers(0, 90), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 99))
def test_above_the_diagonal_is_ignored(n: int, more: int, backend: Backend, seed: int) -> None:
    case = Case(1, 2, 1, n, n + more, 16, block_size=32)
    q, k, v = case.qkv()
    mask = random_block_mask(1, 2, *case.blocks, 0.5, seed=seed)
    last = torch.arange(case.blocks[0]) * 32 + 31 + more
    below = torch.arange(case.blocks[1]) * 32 <= last[:, None]
    got = [block_sparse_attention(q, k, v, x, block_size=32, backend=backend) for x in (mask | ~below, mask & below)]
    torch.testing.assert_close(*got, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_are_independent(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(3, 2, 1, 70, device=device)
    mask = random_block_mask(3, 2, 5, 5, 0.4, device)
    order = torch.tensor([2, 0, 1], device=device)
    straight = block_sparse_attention(q, k, v, mask, block_size=16, backend=backend)
    shuffled = block_sparse_attention(q[order], k[order], v[order], mask[order], block_size=16, backend=backend)
    for x, y in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(x[order], y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    from msattn.kernels import block_sparse_attention as module

    q, k, v = random_qkv(1, 2, 1, 70, device=device)
    mask = random_block_mask(1, 1, 2, 2, 0.5, device)
    torch.library.opcheck(module._operator, (q, k, v, mask, starts([3], device), 64, True, 0.1, backend))
    compiled = torch.compile(block_sparse_attention, fullgraph=True)
    got, want = (f(q, k, v, mask, backend=backend) for f in (compiled, block_sparse_attention))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("padding", [None, (0, 13)])
def test_gradients_of_the_reference(padding: tuple[int, ...] | None) -> None:
    """Through out and lse, against autograd of dense fp64 attention; rows that see nothing get exactly 0."""
    case = Case(2, 4, 2, 40, 40, 8, torch.float64, True, padding, 16)
    q, k, v = inputs = [x.requires_grad_() for x in case.qkv()]
    mask = random_block_mask(2, 2, *case.blocks, 0.4)
    mask[1, 0, 1] = False
    seen = seen_tokens(mask, case, "cpu")
    got = block_sparse_attention(q, k, v, mask, **case.options())
    want = dense_attention(q, k, v, seen)
    dout, dlse = torch.randn_like(got.out), torch.randn_like(got.lse)
    empty = ~seen.any(-1)

    def gradients(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (out * dout).sum() + (lse.masked_fill(empty, 0) * dlse).sum()
        return torch.autograd.grad(loss, inputs)

    exact = dense_attention(q, k, v, seen | empty[..., None])  # no NaN from rows that see nothing: they count as 0 below
    torch.testing.assert_close(got, (want.out, want.lse))
    wanted = gradients(exact.out * ~empty[..., None], exact.lse)
    gotten = gradients(*got)
    for x, y in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert (gotten[0][empty] == 0).all()


def test_gradients_compile_and_are_checked() -> None:
    from msattn.kernels import block_sparse_attention as module

    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 40, head_size=8, dtype=torch.float64)]
    mask = random_block_mask(1, 1, 3, 3, 0.5)
    torch.library.opcheck(module._operator, (*inputs, mask, None, 16, True, 0.3, "torch"))
    compiled = torch.compile(block_sparse_attention, fullgraph=True)
    got, want = (f(q, k, v, mask, block_size=16).out.sum() for f in (compiled, block_sparse_attention))
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))


def test_triton_is_forward_only(device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 20, device=device)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    out = block_sparse_attention(q.requires_grad_(), k, v, mask, backend="triton").out
    with pytest.raises(NotImplementedError, match="backend='torch'"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size=48"),
        ({"block_mask": torch.ones(1, 2, 1, 1)}, "block_mask is torch.float32"),
        ({"block_mask": torch.ones(1, 2, 2, 1, dtype=torch.bool)}, "row blocks must be 1"),
        ({"block_mask": torch.ones(1, 3, 1, 1, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
        ({"kv_start": torch.zeros(2, dtype=torch.int32)}, "kv_start"),
        ({"scale": float("nan")}, "scale=nan"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    q, k, v = random_qkv(1, 4, 2, 20)
    arguments: dict[str, Any] = {"block_mask": torch.ones(1, 2, 1, 1, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, **arguments)
    with pytest.raises(ValueError, match="kv_start"):
        reference.block_sparse_attention(q, k, v, torch.ones(1, 1, 1, 1, dtype=torch.bool), kv_start=starts([21]))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = random_qkv(1, 4, 2, 300, dtype=torch.bfloat16, device="cuda")
    mask = random_block_mask(1, 4, 5, 5, 0.3, "cuda")
    block_sparse_attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = block_sparse_attention(q, k, v, mask)
    mask.copy_(random_block_mask(1, 4, 5, 5, 0.6, "cuda", seed=1))
    graph.replay()
    torch.testing.assert_close(got, block_sparse_attention(q, k, v, mask), rtol=0, atol=0)


def test_chunks_of_a_prefill_select_alike(device: str) -> None:
    """Chunked prefill in multiples of the block gives what one pass gives."""
    q, k, v = random_qkv(1, 2, 1, 96, device=device)
    mask = random_block_mask(1, 2, 6, 6, 0.5, device)
    whole = block_sparse_attention(q, k, v, mask, block_size=16).out
    tail = block_sparse_attention(q[:, :, 48:], k, v, mask[:, :, 3:], block_size=16).out
    torch.testing.assert_close(tail, whole[:, :, 48:])
    assert visible(1, 48, 96, True, None)[0, 0, 0].sum() == 49

"""Tests conv_attention: accuracy against fp64, gradients, edge cases."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.multi_token import score_products
from msattn.kernels.multi_token.conv_attention import band as conv_band
from msattn.kernels.multi_token.conv_attention import conv_attention
from msattn.kernels.multi_token.conv_attention import operation as module
from msattn.kernels.testing import random_qkv, starts
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.multi_token import mixed_scores
from tests.kernels.multi_token.mixed_scores import convolved_attention, random_convolution
from tests.kernels.problems import Case, full_product
from tests.kernels.shared import BACKENDS, FULL, HALF


@pytest.fixture(autouse=True)
def _larger_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds up interpreted kernels, whose time depends on the number of tiles."""
    if device == "cpu":
        monkeypatch.setattr(conv_band, "TILE_ROWS", 64)


def with_gradients(
    inputs: Sequence[Tensor], seen: Tensor, dout: Tensor, dtype: torch.dtype, mask: ConvMask
) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of q, k, v and weight.

    In fp64 each query has its own copy of the weight, with its own gradient.
    """
    if dtype == torch.float64:
        inputs = [*inputs[:3], inputs[3].expand(dout.shape[2], -1, -1, -1)]
    leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
    q, k, v, weight = leaves
    out = convolved_attention(q, k, v, weight, seen, q.shape[3] ** -0.5, dtype, mask)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


def check(
    case: Case,
    size: tuple[int, int],
    mask: ConvMask,
    backend: Backend,
    device: str,
    weight_dtype: torch.dtype | None = None,
) -> None:
    weight = random_convolution(case.q_heads, size, weight_dtype or case.dtype, device)
    mixed = weight.abs().sum((1, 2)).max().item()
    operation, definition = (partial(f, mask=mask) for f in (conv_attention, with_gradients))
    mixed_scores.assert_agrees(operation, definition, case, weight, mixed, backend, device)


QUERY_MASKED = [
    (Case(1, 2, 1, 1, 1, 64), (3, 3)),
    (Case(2, 4, 1, 20, 20, 80, HALF, True, (0, 9)), (2, 2)),
    (Case(1, 1, 1, 63, 63, 128, FULL, True), (3, 3)),
    (Case(1, 1, 1, 111, 111, 64, HALF), (3, 4)),
    (Case(1, 2, 2, 33, 65, 64, HALF, True, (50,)), (4, 2)),
    (Case(1, 7, 1, 20, 33, 24, FULL, False, None), (2, 3)),
    (Case(2, 2, 1, 33, 33, 16, FULL, False, (0, 20)), (5, 1)),
    (Case(1, 2, 1, 70, 30, 16, FULL, True, None), (2, 4)),
    (Case(1, 1, 1, 18, 18, 16, HALF), (6, 11)),
    (Case(2, 2, 1, 12, 12, 16, HALF, True, (12, 5)), (4, 2)),
    (Case(1, 4, 2, 40, 40, 8, FULL, True, None), (1, 1)),
    (Case(1, 1, 1, 50, 50, 256, HALF, True, (3,)), (1, 6)),
]
CASES: list[tuple[Case, tuple[int, int], ConvMask]] = [
    *((*case, "query") for case in QUERY_MASKED),
    (Case(2, 4, 1, 20, 20, 80, HALF, True, (0, 9)), (2, 2), "key"),
    (Case(1, 2, 2, 33, 65, 64, FULL, True, (50,)), (4, 2), "key"),
    (Case(1, 2, 1, 70, 30, 16, FULL, True, None), (3, 4), "key"),
    (Case(1, 1, 1, 18, 18, 16, HALF), (6, 11), "key"),
    (Case(1, 2, 1, 40, 40, 8, FULL), (5, 1), "key"),
    (Case(1, 2, 1, 20, 33, 24, FULL, False, None), (2, 3), "key"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "size", "mask"), CASES, ids=str)
def test_agrees_with_fp64(
    case: Case, size: tuple[int, int], mask: ConvMask, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, size, mask, backend, device)


def literal_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, counts: Callable[[int, int, int], bool]
) -> Tensor:
    """Computes causal attention in fp64, score by score; ``counts(i, row, key)`` chooses the scores
    that enter output row i.
    """
    q, k, v, weight = (x.double() for x in (q, k, v, weight))
    tokens, (window, taps) = q.shape[2], weight.shape[1:]
    scores = q @ k.mT * q.shape[3] ** -0.5
    mixed = torch.full_like(scores, -torch.inf)
    for i, j in itertools.product(range(tokens), repeat=2):
        if j <= i:
            places = [
                (a, c, i - window + 1 + a, j - (taps - 1) // 2 + c)
                for a in range(window)
                for c in range(taps)
            ]
            inside = [
                at for at in places if min(at[2:]) >= 0 and at[3] < tokens and counts(i, *at[2:])
            ]
            mixed[:, :, i, j] = sum(
                (weight[:, a, c] * scores[:, :, row, key] for a, c, row, key in inside),
                torch.zeros(()),
            )
    return mixed.softmax(-1) @ v


def own_query(_: int, row: int, key: int) -> bool:
    """The reading of ``mask="query"``: a score counts unless its key comes after its own query."""
    return key <= row


def output_query(i: int, _: int, key: int) -> bool:
    """The printed formula of the paper, ``mask="key"``: a score counts unless its key comes after
    the output's query.
    """
    return key <= i


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_the_readings_of_the_paper(backend: Backend, device: str) -> None:
    """The two readings of the causal mask differ on normal inputs."""
    q, k, v = random_qkv(1, 2, 2, 14, head_size=16, device="cpu")
    weight = random_convolution(2, (4, 5), FULL, "cpu")
    own, printed = (
        literal_attention(q, k, v, weight, counts) for counts in (own_query, output_query)
    )
    masks: tuple[ConvMask, ConvMask] = ("query", "key")
    for mask, want in zip(masks, (own, printed), strict=True):
        got = (
            conv_attention(*(x.to(device) for x in (q, k, v, weight)), mask=mask, backend=backend)
            .cpu()
            .double()
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (printed - own).norm() > 0.1 * own.norm()
    assert ((printed - own).abs().amax((1, 3))[0, 1:] > 1e-3).all(), (
        "every row but the first, which has one key"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    """A length has one size of the mixing kernel, padding one mask: each further combination
    compiles for a minute.
    """
    sizes = {1: (1, 1), 63: (3, 3), 65: (6, 11), 111: (2, 4), 1025: (5, 1), 130: (3, 4)}
    for case in full_product(
        head_size, dtype, [(1, 1), (63, 63), (65, 65), (111, 300), (1025, 1025), (130, 65)]
    ):
        check(
            case,
            sizes[case.num_queries],
            "query" if case.padding is None else "key",
            "triton",
            "cuda",
        )
    for mask in get_args(ConvMask):
        check(Case(1, 4, 2, 2047, 2047, head_size, dtype), (6, 11), mask, "triton", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_scratch_equals_one_pass(
    backend: Backend, device: str, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    """A small scratch forces processing by single heads and by a few rows."""
    q, k, v = random_qkv(1, 2, 2, 140, head_size=16, dtype=HALF, device=device)
    inputs, dout = (q, k, v, random_convolution(2, (2, 2), HALF, device)), torch.randn_like(q)
    whole = mixed_scores.results(conv_attention, inputs, dout, backend)
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 1)
    monkeypatch.setattr(
        "msattn.kernels.multi_token.reference.mixed_scores.SCORES_AT_ONCE", 50 * 140
    )
    torch.testing.assert_close(mixed_scores.results(conv_attention, inputs, dout, backend), whole)


@pytest.mark.parametrize("mask", ["query", "key"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_have_no_influence(backend: Backend, mask: ConvMask, device: str) -> None:
    """The results of earlier queries are bitwise equal."""
    q, k, v = random_qkv(1, 1, 1, 40, head_size=16, dtype=HALF, device=device)
    weight = random_convolution(1, (3, 4), HALF, device)
    before = conv_attention(q, k, v, weight, mask=mask, backend=backend)[:, :, :30]
    for x in (q, k, v):
        x[:, :, 30:] *= 3
    shared.assert_same(
        conv_attention(q, k, v, weight, mask=mask, backend=backend)[:, :, :30], before
    )


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 60),
    more=st.integers(0, 40),
    window=st.integers(1, 6),
    taps=st.integers(1, 11),
    mask=st.sampled_from(["query", "key"]),
)
def test_any_lengths(n: int, more: int, window: int, taps: int, mask: ConvMask) -> None:
    check(Case(1, 2, 1, n, n + more, 16), (window, taps), mask, "torch", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_weight_with_16_bit_inputs(backend: Backend, device: str) -> None:
    check(Case(1, 1, 1, 30, 30, 16, HALF), (2, 3), "query", backend, device, weight_dtype=FULL)


def test_accepts_misaligned_output_gradients(device: str) -> None:
    inputs = (
        *random_qkv(1, 2, 1, 20, head_size=16, device=device),
        random_convolution(2, (2, 2), FULL, device),
    )
    mixed_scores.assert_accepts_misaligned_gradients(conv_attention, inputs)


def gpu_step(num_queries: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    q, k, v = random_qkv(1, 4, 2, num_queries, head_size=128, dtype=dtype, device="cuda")
    return [q, k, v, random_convolution(4, (6, 11), dtype, "cuda")], torch.randn_like(q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 2**20)
    inputs, dout = gpu_step(1000, dtype)
    shared.assert_reproducible(lambda: mixed_scores.results(conv_attention, inputs, dout))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    mixed_scores.assert_step_is_captured(module, *gpu_step(300, torch.bfloat16), "query")


@pytest.mark.gpu
@pytest.mark.parametrize("long", ["queries", "keys"])
def test_offsets_beyond_32_bits(long: str) -> None:
    """The last rows of 2**31 elements or more give the same results as alone."""
    num_queries, num_keys = (2**24 + 64, 32) if long == "queries" else (32, 2**24 + 64)
    q = torch.randn(1, 1, num_queries, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 1, num_keys, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = random_convolution(1, (2, 3), torch.bfloat16, "cuda")
    if long == "keys":
        k[:, :, :-64] = 0
        v[:, :, :-64] = 0
        kv_start = starts([num_keys - 40], "cuda")
    else:
        kv_start = None
    leaves = [x.requires_grad_() for x in (q, k, v, weight)]
    out = conv_attention(
        leaves[0], leaves[1], leaves[2], leaves[3], causal=False, kv_start=kv_start
    )
    dout = torch.zeros_like(out)
    dout[:, :, -20:] = torch.randn_like(dout[:, :, -20:])
    got = torch.autograd.grad(out, leaves, dout)

    tails = [x.detach()[:, :, -40:].requires_grad_() for x in (q, k, v)]
    short = [*tails, weight.detach().requires_grad_()]
    want = conv_attention(short[0], short[1], short[2], short[3], causal=False)
    torch.testing.assert_close(out[:, :, -20:], want[:, :, -20:])
    for x, y in zip(
        got, torch.autograd.grad(want, short, dout[:, :, -want.shape[2] :]), strict=True
    ):
        torch.testing.assert_close(
            x[:, :, -20:] if x.dim() == 4 else x, y[:, :, -20:] if y.dim() == 4 else y
        )

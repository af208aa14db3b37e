"""Tests of the operations that mix scores, conv_attention and head_mix_attention: accuracy against
fp64, gradients, shapes.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.multi_token import score_products
from msattn.kernels.multi_token.conv_attention import band as conv_band
from msattn.kernels.testing import random_qkv, starts
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.multi_token.mixed_scores import MIXINGS, Size, check
from tests.kernels.problems import Case, full_product
from tests.kernels.shared import BACKENDS, FULL, HALF

Problem = tuple[str, Case, Size, ConvMask | None]
CONVOLVED: list[tuple[Case, Size, ConvMask]] = [
    (Case(1, 2, 1, 1, 1, 64), (3, 3), "query"),
    (Case(2, 4, 1, 20, 20, 80, HALF, True, (0, 9)), (2, 2), "query"),
    (Case(1, 1, 1, 63, 63, 128, FULL, True), (3, 3), "query"),
    (Case(1, 1, 1, 111, 111, 64, HALF), (3, 4), "query"),
    (Case(1, 2, 2, 33, 65, 64, HALF, True, (50,)), (4, 2), "query"),
    (Case(1, 7, 1, 20, 33, 24, FULL, False, None), (2, 3), "query"),
    (Case(2, 2, 1, 33, 33, 16, FULL, False, (0, 20)), (5, 1), "query"),
    (Case(1, 2, 1, 70, 30, 16, FULL, True, None), (2, 4), "query"),
    (Case(1, 1, 1, 18, 18, 16, HALF), (6, 11), "query"),
    (Case(2, 2, 1, 12, 12, 16, HALF, True, (12, 5)), (4, 2), "query"),
    (Case(1, 4, 2, 40, 40, 8, FULL, True, None), (1, 1), "query"),
    (Case(1, 1, 1, 50, 50, 256, HALF, True, (3,)), (1, 6), "query"),
    (Case(2, 4, 1, 20, 20, 80, HALF, True, (0, 9)), (2, 2), "key"),
    (Case(1, 2, 2, 33, 65, 64, FULL, True, (50,)), (4, 2), "key"),
    (Case(1, 2, 1, 70, 30, 16, FULL, True, None), (3, 4), "key"),
    (Case(1, 1, 1, 18, 18, 16, HALF), (6, 11), "key"),
    (Case(1, 2, 1, 40, 40, 8, FULL), (5, 1), "key"),
    (Case(1, 2, 1, 20, 33, 24, FULL, False, None), (2, 3), "key"),
]
MIXED = [
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
PROBLEMS: list[Problem] = [
    *(("conv_attention", *problem) for problem in CONVOLVED),
    *(("head_mix_attention", case, (0, 0), None) for case in MIXED),
]
each_operation = pytest.mark.parametrize("operation", MIXINGS)


@pytest.fixture(autouse=True)
def _larger_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds up interpreted kernels, whose time depends on the number of tiles."""
    if device == "cpu":
        monkeypatch.setattr(conv_band, "TILE_ROWS", 64)


@pytest.mark.interpreted(by="operation")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("operation", "case", "size", "mask"), PROBLEMS, ids=str)
def test_agrees_with_fp64(
    operation: str,
    case: Case,
    size: Size,
    mask: ConvMask | None,
    backend: Backend,
    device: str,
    poisoned: None,
) -> None:
    check(operation, case, backend, device, size, mask)


@pytest.mark.gpu
@each_operation
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(operation: str, dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    """A length has one size of the convolution, padding one mask: each further combination compiles
    for a minute.
    """
    masks = MIXINGS[operation].masks
    sizes = {1: (1, 1), 63: (3, 3), 65: (6, 11), 111: (2, 4), 1025: (5, 1), 130: (3, 4)}
    for case in full_product(
        head_size, dtype, [(1, 1), (63, 63), (65, 65), (111, 300), (1025, 1025), (130, 65)]
    ):
        mask = masks[0 if case.padding is None else -1]
        check(operation, case, "triton", "cuda", sizes[case.num_queries], mask)
    tokens = 2047 if operation == "conv_attention" else 4095
    for mask in masks:
        long = Case(1, 4, 2, tokens, tokens, head_size, dtype)
        check(operation, long, "triton", "cuda", (6, 11), mask)


@each_operation
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 60),
    more=st.integers(0, 40),
    window=st.integers(1, 6),
    taps=st.integers(1, 11),
    last_mask=st.booleans(),
)
def test_any_lengths(
    operation: str, n: int, more: int, window: int, taps: int, last_mask: bool
) -> None:
    mask = MIXINGS[operation].masks[-last_mask]
    check(operation, Case(1, 2, 1, n, n + more, 16), "torch", "cpu", (window, taps), mask)


@each_operation
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_weight_with_16_bit_inputs(operation: str, backend: Backend, device: str) -> None:
    check(operation, Case(1, 2, 1, 30, 30, 16, HALF), backend, device, weight_dtype=FULL)


def problem(
    operation: str,
    heads: int,
    num_queries: int,
    dtype: torch.dtype,
    device: str,
    size: Size = (2, 2),
    head_size: int = 16,
) -> tuple[list[Tensor], Tensor]:
    """Returns random q, k, v and weight, and a gradient of the output."""
    q, k, v = random_qkv(
        1, heads, heads // 2, num_queries, head_size=head_size, dtype=dtype, device=device
    )
    weight = MIXINGS[operation].random_weight(heads, size, dtype, device)
    return [q, k, v, weight], torch.randn_like(q)


def results(
    operation: str, inputs: list[Tensor], dout: Tensor, backend: Backend | None = None
) -> list[Tensor]:
    """Returns the output and the gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    out = MIXINGS[operation].attend(*leaves, backend=backend)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.slow
@each_operation
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_scratch_equals_one_pass(
    operation: str,
    backend: Backend,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
) -> None:
    """A small scratch forces processing by single heads, if they are not mixed, and by a few
    rows.
    """
    inputs, dout = problem(operation, 4, 140, HALF, device)
    whole = results(operation, inputs, dout, backend)
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 1)
    monkeypatch.setattr(
        "msattn.kernels.multi_token.reference.mixed_scores.SCORES_AT_ONCE", 50 * 140
    )
    tolerance = {}
    if operation == "head_mix_attention":
        monkeypatch.setattr(MIXINGS[operation].module, "MIN_ROWS", 128)
        tolerance = {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(results(operation, inputs, dout, backend), whole, **tolerance)


@each_operation
def test_accepts_misaligned_output_gradients(operation: str, device: str) -> None:
    """A gradient that is not aligned to 16 bytes gives the same results."""
    inputs, dout = problem(operation, 4, 20, FULL, device)
    dout = dout.contiguous()
    misaligned = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view_as(dout)
    got, want = (results(operation, inputs, x, "triton") for x in (misaligned, dout))
    shared.assert_same(got, want)


@pytest.mark.gpu
@each_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(
    operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_products, "SCRATCH_ELEMENTS", 2**20)
    inputs, dout = problem(operation, 8, 1000, dtype, "cuda", (6, 11), 128)
    shared.assert_reproducible(lambda: results(operation, inputs, dout))


@pytest.mark.gpu
@each_operation
def test_cuda_graph(operation: str) -> None:
    """A captured step, with backward, follows new inputs and padding."""
    inputs, dout = problem(operation, 8, 300, torch.bfloat16, "cuda", (6, 11), 128)
    kv_start = torch.tensor([7], dtype=torch.int32, device="cuda")
    mixing: Any = MIXINGS[operation]
    options = kv_start, True, 0.1, *filter(None, mixing.masks[:1]), "triton"

    def step() -> list[Tensor]:
        out, lse = mixing.module._operator(*inputs, *options)
        return [out, *mixing.module._backward_operator(dout, *inputs, out, lse, *options)]

    def change() -> None:
        kv_start.fill_(60)
        for x in inputs:
            x.copy_(torch.randn_like(x))

    shared.assert_cuda_graph(step, change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operation", "long"), [*((name, "queries") for name in MIXINGS), ("conv_attention", "keys")]
)
def test_offsets_beyond_32_bits(operation: str, long: str) -> None:
    """The last rows of 2**31 elements or more give the same results as alone."""
    attend = MIXINGS[operation].attend
    num_queries, num_keys = (2**24 + 64, 32) if long == "queries" else (32, 2**24 + 64)
    q = torch.randn(1, 1, num_queries, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 1, num_keys, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = MIXINGS[operation].random_weight(1, (2, 3), torch.bfloat16, "cuda")
    kv_start = None
    if long == "keys":
        k[:, :, :-64] = v[:, :, :-64] = 0
        kv_start = starts([num_keys - 40], "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v, weight)]
    out = attend(*leaves, causal=False, kv_start=kv_start)
    dout = torch.zeros_like(out)
    dout[:, :, -20:] = torch.randn_like(dout[:, :, -20:])
    got = torch.autograd.grad(out, leaves, dout)

    short = [x.detach()[:, :, -40:].requires_grad_() for x in (q, k, v)]
    short.append(weight.detach().requires_grad_())
    want = attend(*short, causal=False)
    torch.testing.assert_close(out[:, :, -20:], want[:, :, -20:])
    for x, y in zip(
        got, torch.autograd.grad(want, short, dout[:, :, -want.shape[2] :]), strict=True
    ):
        torch.testing.assert_close(
            x[:, :, -20:] if x.dim() == 4 else x, y[:, :, -20:] if y.dim() == 4 else y
        )

"""Tests of `conv_decode`: agreement with fp64, edge cases, operator."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels import conv_decode as module
from msattn.kernels import reference
from msattn.kernels.conv_decode import conv_decode
from msattn.kernels.testing import assert_within_budget, random_qkv, starts
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    """One problem; sequence b fills positions ``padding[b]`` to ``filled[b]``."""

    batch: int
    q_heads: int
    kv_heads: int
    num_keys: int
    head_size: int
    size: tuple[int, int]
    dtype: torch.dtype = torch.float32
    padding: tuple[int, ...] | None = None
    filled: tuple[int, ...] | None = None
    splits: int | None = None
    mask: ConvMask = "query"

    def spans(self) -> list[tuple[int, int]]:
        """Returns the first key and the end of each sequence."""
        none = (0,) * self.batch, (self.num_keys,) * self.batch
        return list(zip(self.padding or none[0], self.filled or none[1], strict=True))

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns query window (0 before a sequence), cache and weights."""
        window, taps = self.size
        q, k, v = random_qkv(self.batch, self.q_heads, self.kv_heads, window, self.num_keys, self.head_size, self.dtype, device)
        for b, (start, end) in enumerate(self.spans()):
            q[b, :, : max(window - max(end - start, 0), 0)] = 0
        weight = torch.randn(self.q_heads, window, taps) / (window * taps) ** 0.5
        return q, k, v, weight.to(device, self.dtype)

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        lengths = {"kv_start": starts(self.padding, device), "kv_len": starts(self.filled, device)}
        return {**lengths, "splits": self.splits, "mask": self.mask}


def last_row(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, case: Case, dtype: torch.dtype) -> Tensor:
    """Computes the definition tap by tap, in eager PyTorch of ``dtype``."""
    statistics = torch.promote_types(dtype, torch.float32)
    q, k, v, weight = (x.to(dtype) for x in (q, k, v, weight))
    out = torch.zeros_like(q[:, :, :1])
    window, taps = case.size
    group = case.q_heads // case.kv_heads
    for b, (start, end) in enumerate(case.spans()):
        if end <= start:
            continue
        keys, values = (x[b, :, start:end].repeat_interleave(group, 0) for x in (k, v))
        scores = (q[b] @ keys.mT).to(statistics) * case.head_size**-0.5  # [Hq, c_q, m]
        if case.mask == "query":
            scores = scores.tril(end - start - window)
        scores = scores.to(dtype)
        scores = torch.nn.functional.pad(scores, ((taps - 1) // 2, taps - 1 - (taps - 1) // 2))
        mixed = torch.zeros_like(scores[:, 0, : end - start], dtype=statistics)
        for a, c in itertools.product(range(window), range(taps)):
            mixed = mixed + weight[:, a, c, None] * scores[:, a, c : c + end - start]
        out[b] = mixed.softmax(-1).to(dtype)[:, None] @ values
    return out


def check(case: Case, backend: Backend, device: str) -> None:
    inputs = case.inputs(device)
    exact, eager = (last_row(*inputs, case, dtype) for dtype in (torch.float64, case.dtype))
    for b, (start, end) in enumerate(case.spans()):
        for x in inputs[1:3]:
            x[b, :, :start] = x[b, :, end:] = torch.nan  # unread keys may hold any value
    got = conv_decode(*inputs, **case.options(device), backend=backend)
    assert got.dtype == case.dtype
    assert all((got[b] == 0).all() for b, (start, end) in enumerate(case.spans()) if end <= start)
    mixed = inputs[3].abs().sum((1, 2)).max().item()  # a mixed score is a weighted sum, which scales the rounding error
    assert_within_budget("out", got, exact, eager, term=mixed * inputs[2].nan_to_num().abs().max().item())


CASES = [
    Case(1, 2, 1, 1, 64, (3, 3)),
    Case(2, 4, 1, 63, 80, (6, 11), HALF, (0, 60), splits=2),
    Case(1, 7, 1, 65, 128, (2, 4), FULL),
    Case(2, 4, 4, 111, 64, (5, 1), HALF, (0, 50), (111, 52)),
    Case(1, 4, 2, 300, 64, (6, 11), HALF, splits=3),
    Case(2, 8, 2, 90, 16, (3, 3), FULL, (7, 90), (90, 90)),
    Case(1, 20, 1, 70, 8, (1, 1), HALF),
    Case(1, 1, 1, 200, 256, (32, 32), HALF),
    Case(1, 2, 2, 130, 64, (6, 11), FULL, splits=40),
    Case(2, 2, 1, 65, 24, (4, 6), HALF, None, (0, 3)),
    Case(2, 4, 1, 63, 80, (6, 11), HALF, (0, 60), splits=2, mask="key"),
    Case(2, 4, 4, 111, 64, (5, 1), FULL, (0, 50), (111, 52), mask="key"),
    Case(1, 2, 1, 1, 64, (3, 4), mask="key"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    check(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    heads, lengths, splits = [(2, 2), (4, 1), (7, 1)], [1, 23, 63, 65, 111, 4095], itertools.cycle([None, 1, 5])
    masks: Iterator[ConvMask] = itertools.cycle(["query", "key"])
    sizes = [(6, 11), (3, 3), (2, 4), (5, 1), (1, 1), (1, 2), (4, 5), (6, 8), (1, 9), (4, 16), (6, 17), (4, 32)]
    for (q_heads, kv_heads), num_keys, size in itertools.product(heads, lengths, sizes):
        for padding, filled in ((None, None), ((num_keys // 2, 0), (num_keys, num_keys // 2))):
            case = Case(2, q_heads, kv_heads, num_keys, head_size, size, dtype, padding, filled, next(splits), next(masks))
            check(case, "triton", "cuda")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 60),
    window=st.integers(1, 6),
    taps=st.integers(1, 11),
    pad=st.integers(0, 9),
    free=st.integers(0, 9),
    mask=st.sampled_from(["query", "key"]),
    backend=st.sampled_from(BACKENDS),
)
def test_is_the_last_row_of_conv_attention(
    device: str, n: int, window: int, taps: int, pad: int, free: int, mask: ConvMask, backend: Backend
) -> None:
    q, k, v = random_qkv(1, 2, 1, n, head_size=16, device=device)
    weight = torch.randn(2, window, taps, device=device) / (window * taps) ** 0.5
    want = reference.conv_attention(q, k, v, weight, mask=mask)
    queries = torch.nn.functional.pad(q, (0, 0, max(window - n, 0), 0))[:, :, -window:]
    k, v = (torch.nn.functional.pad(x, (0, 0, pad, free), value=float("nan")) for x in (k, v))
    lengths: dict[str, Any] = {"kv_start": starts([pad], device), "kv_len": starts([pad + n], device)}
    got = conv_decode(queries, k, v, weight, **lengths, mask=mask, backend=backend)
    torch.testing.assert_close(got, want[:, :, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_accepts_strided_views(device: str) -> None:
    q, _, _, weight = Case(2, 4, 2, 70, 64, (2, 3)).inputs(device)
    shared.assert_strides_accepted(lambda k, v: conv_decode(q, k, v, weight, backend="triton"), device)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    q, k, v, weight = Case(2, 4, 2, 40, 16, (2, 3)).inputs(device)
    lengths = starts([40, 30], device)
    arguments = (q, k, v, weight, None, lengths, 0.1, "query", 2, backend)
    shared.assert_operator(module._operator, arguments, conv_decode, q, k, v, weight, kv_len=lengths, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_no_gradient(backend: Backend, device: str) -> None:
    shared.assert_no_gradient(conv_decode, *Case(1, 2, 1, 20, 64, (2, 3)).inputs(device), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 3, 3)}, r"q_window.shape=\(1, 4, 2, 64\): expected 3 queries"),
        ({"weight": torch.zeros(3, 2, 3)}, r"weight.shape=\(3, 2, 3\)"),
        ({"splits": 0}, "splits=0"),
        ({"mask": "keys"}, "mask='keys'"),
        ({"scale": 0.0}, r"scale=0\.0"),
        ({"kv_len": torch.zeros(1)}, "kv_len is torch.float32"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"kv_len": torch.tensor([21], dtype=torch.int32)}, "kv_len=21"),
        ({"kv_start": torch.tensor([-1], dtype=torch.int32)}, "kv_start=-1"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    q, k, v = random_qkv(1, 4, 2, 2, 20)
    arguments: dict[str, Any] = {"weight": torch.ones(4, 2, 3)} | change
    with pytest.raises(ValueError, match=message):
        conv_decode(q, k, v, **arguments)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of lengths, bit by bit."""
    q, k, v, weight = Case(2, 8, 2, 5000, 128, (6, 11), torch.bfloat16).inputs("cuda")
    kv_len = torch.tensor([4000, 3000], dtype=torch.int32, device="cuda")
    shared.assert_cuda_graph(lambda: conv_decode(q, k, v, weight, kv_len=kv_len), lambda: kv_len.copy_(torch.tensor([5000, 1])))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The sequence fills the end of a head of more than 2**31 elements."""
    k, v = (torch.randn(1, 1, 2**24 + 300, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, _, _, weight = Case(1, 4, 1, 300, 128, (6, 11), torch.bfloat16).inputs("cuda")
    got = conv_decode(q, k, v, weight, kv_start=starts([2**24], "cuda"))
    want = conv_decode(q, k[:, :, -300:], v[:, :, -300:], weight)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)  # with other splits, P is rounded relative to other maxima

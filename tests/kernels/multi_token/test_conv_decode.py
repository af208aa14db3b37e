"""Tests of `conv_decode`: agreement with fp64, edge cases."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.multi_token.conv_decode import conv_decode
from msattn.kernels.testing import assert_within_budget, random_qkv, starts, visible
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.multi_token.mixed_scores import convolved_attention, random_convolution
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
        window, _ = self.size
        q, k, v = random_qkv(
            self.batch,
            self.q_heads,
            self.kv_heads,
            window,
            self.num_keys,
            self.head_size,
            self.dtype,
            device,
        )
        for b, (start, end) in enumerate(self.spans()):
            q[b, :, : max(window - max(end - start, 0), 0)] = 0
        return q, k, v, random_convolution(self.q_heads, self.size, self.dtype, device)

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        lengths = {"kv_start": starts(self.padding, device), "kv_len": starts(self.filled, device)}
        return {**lengths, "splits": self.splits, "mask": self.mask}


def last_row(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, case: Case, dtype: torch.dtype
) -> Tensor:
    """Returns the last row of the definition of ``conv_attention``, of each sequence by itself."""
    out = torch.zeros_like(q[:, :, :1], dtype=dtype)
    for b, (start, end) in enumerate(case.spans()):
        if end > start:
            keys, values = (x[b : b + 1, :, start:end] for x in (k, v))
            seen = visible(1, q.shape[2], end - start, True, None, q.device)
            inputs = q[b : b + 1], keys, values, weight, seen
            out[b] = convolved_attention(*inputs, case.head_size**-0.5, dtype, case.mask)[0, :, -1:]
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
    # a mixed score is a weighted sum, which scales the rounding error
    mixed = inputs[3].abs().sum((1, 2)).max().item()
    assert_within_budget(
        "out", got, exact, eager, term=mixed * inputs[2].nan_to_num().abs().max().item()
    )


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


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    check(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    heads = [(2, 2), (4, 1), (7, 1)]
    lengths = [1, 23, 63, 65, 111, 4095]
    splits = itertools.cycle([None, 1, 5])
    masks: Iterator[ConvMask] = itertools.cycle(["query", "key"])
    sizes = [
        (6, 11),
        (3, 3),
        (2, 4),
        (5, 1),
        (1, 1),
        (1, 2),
        (4, 5),
        (6, 8),
        (1, 9),
        (4, 16),
        (6, 17),
        (4, 32),
    ]
    for (q_heads, kv_heads), num_keys, size in itertools.product(heads, lengths, sizes):
        for padding, filled in ((None, None), ((num_keys // 2, 0), (num_keys, num_keys // 2))):
            case = Case(
                2,
                q_heads,
                kv_heads,
                num_keys,
                head_size,
                size,
                dtype,
                padding,
                filled,
                next(splits),
                next(masks),
            )
            check(case, "triton", "cuda")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(0, 60),
    window=st.integers(1, 6),
    taps=st.integers(1, 11),
    pad=st.integers(0, 9),
    free=st.integers(0, 9),
    mask=st.sampled_from(["query", "key"]),
    backend=st.sampled_from(BACKENDS),
)
def test_any_lengths(
    device: str,
    n: int,
    window: int,
    taps: int,
    pad: int,
    free: int,
    mask: ConvMask,
    backend: Backend,
) -> None:
    num_keys = max(1, pad + n + free)
    case = Case(
        1,
        2,
        1,
        num_keys,
        16,
        (window, taps),
        FULL,
        (min(pad, num_keys),),
        (min(pad + n, num_keys),),
        mask=mask,
    )
    check(case, backend, device)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of lengths, bit by bit."""
    q, k, v, weight = Case(2, 8, 2, 5000, 128, (6, 11), torch.bfloat16).inputs("cuda")
    kv_len = torch.tensor([4000, 3000], dtype=torch.int32, device="cuda")
    shared.assert_cuda_graph(
        lambda: conv_decode(q, k, v, weight, kv_len=kv_len),
        lambda: kv_len.copy_(torch.tensor([5000, 1])),
    )


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The sequence fills the end of a head of more than 2**31 elements."""
    k, v = (
        torch.randn(1, 1, 2**24 + 300, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    q, _, _, weight = Case(1, 4, 1, 300, 128, (6, 11), torch.bfloat16).inputs("cuda")
    got = conv_decode(q, k, v, weight, kv_start=starts([2**24], "cuda"))
    want = conv_decode(q, k[:, :, -300:], v[:, :, -300:], weight)
    # with other splits, P is rounded relative to other maxima
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)

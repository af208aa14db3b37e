"""Tests of `write_pages`: equality with indexing, which slots stay, refusals; and of
`round_keys`.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.common.fp8 import FP8
from msattn.kernels.paged.write import round_keys, write_pages
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS


def problem(
    tokens: int,
    heads: int,
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> list[Tensor]:
    """Returns the arguments: new tokens as slices of a fused projection, and distinct slots in
    random order.
    """
    torch.manual_seed(seed)
    count = -(-tokens // page_size) + 2
    k, v = (
        torch.randn(tokens, 4 * heads, size, device=device)
        .to(dtype)
        .transpose(0, 1)[heads : 3 * heads]
        .split(heads)
    )
    keys, values = (
        torch.zeros(count, heads, page_size, 2 * size, dtype=dtype, device=device)
        .transpose(1, 2)
        .chunk(2, dim=-1)
    )
    slots = torch.randperm(count * page_size, device=device)[:tokens]
    ids = torch.randint(-1, 2**15, (heads, tokens), dtype=torch.int32, device=device)
    buckets = torch.zeros(count, page_size, heads, dtype=torch.int16, device=device)
    return [k, v, keys, values, slots // page_size, slots % page_size, ids, buckets]


def assert_written(arguments: list[Tensor], backend: Backend | None = None) -> None:
    """Asserts that the slots of the tokens hold them, and that the others hold what they did."""
    k, v, keys, values, pages, offsets, *rest = arguments
    want = [x.clone() for x in (keys, values)]
    want[0][pages, offsets], want[1][pages, offsets] = k.transpose(0, 1), v.transpose(0, 1)
    wanted_buckets = rest[1].clone() if rest else None
    if wanted_buckets is not None:
        wanted_buckets[pages, offsets] = rest[0].T.short()
    write_pages(*arguments, backend=backend)
    assert torch.equal(keys, want[0])
    assert torch.equal(values, want[1])
    assert wanted_buckets is None or torch.equal(rest[1], wanted_buckets)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "page_size"),
    [(1, 2, 64, 16), (111, 1, 80, 64), (65, 7, 128, 1), (300, 4, 24, 256)],
)
def test_equals_indexing(
    tokens: int,
    heads: int,
    size: int,
    page_size: int,
    dtype: torch.dtype,
    backend: Backend,
    device: str,
) -> None:
    arguments = problem(tokens, heads, size, page_size, dtype, device)
    assert_written(arguments, backend)
    assert_written([-arguments[0], -arguments[1], *arguments[2:6]], backend)  # without buckets


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("scaled", ["by head", "all", "not"])
def test_fp8_holds_the_nearest_number(
    scaled: str, dtype: torch.dtype, backend: Backend, device: str
) -> None:
    """Of all numbers of FP8, and for ties the one whose last bit is 0; larger ones are
    saturated.
    """
    arguments = problem(111, 2, 40, 16, torch.float32, device)
    factors = 10 ** torch.linspace(-4, 3.5, 111, device=device)[:, None]
    k, v = (x.contiguous() * factors for x in arguments[:2])
    every = torch.arange(127, dtype=torch.uint8, device=device).view(FP8).double()
    between = (every[1:] + every[:-1]) / 2
    k[0].view(-1)[:126], v[1].view(-1)[:126] = between, -between  # ties if they are not scaled
    k, v = k.to(dtype), v.to(dtype)
    scales = {
        "by head": torch.tensor([[0.3, 2.7], [0.05, 1.0]], device=device),
        "all": torch.tensor([[0.3], [7.1]], device=device),
        "not": [None, None],
    }[scaled]
    keys, values = (x.to(FP8) for x in arguments[2:4])
    options = {"k_scale": scales[0], "v_scale": scales[1], "backend": backend}
    write_pages(k, v, keys, values, *arguments[4:], **options)
    slots = arguments[4], arguments[5]
    for x, pages, scale in ((k, keys, scales[0]), (v, values, scales[1])):
        factor = torch.ones(1, device=device) if scale is None else scale
        exact = (x.float() / factor.view(-1, 1, 1)).double()
        distance = (exact.abs()[..., None] - every).abs()
        least = distance.amin(-1)
        nearest = distance == least[..., None]
        even = every.where(nearest & (torch.arange(127, device=device) % 2 == 0), -1).amax(-1)
        want = torch.where(nearest.sum(-1) > 1, even, every[distance.argmin(-1)]) * exact.sign()
        got = pages[slots].transpose(0, 1)
        assert torch.equal(got.double(), want)
        meant = (want.float() * factor.view(-1, 1, 1)).to(dtype)
        rounded = round_keys(x, scale, backend=backend)
        assert torch.equal(rounded, meant)
        assert torch.equal(round_keys(rounded, scale, backend=backend), meant)
    assert (keys[slots].double().abs() == 448).any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 65, 111, 4095])
def test_full_product(tokens: int) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    for dtype, heads, size, page_size in itertools.product(
        dtypes, [1, 2, 8], [64, 80, 96, 128, 256], [16, 64, 256]
    ):
        assert_written(problem(tokens, heads, size, page_size, dtype, "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 4),
    page_size=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_any_pages(
    backend: Backend, device: str, tokens: int, heads: int, page_size: int, seed: int
) -> None:
    assert_written(problem(tokens, heads, 16, page_size, torch.float32, device, seed), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_one_slot(backend: Backend, device: str) -> None:
    """No other slot is written; the content of this one is undefined."""
    k, _, keys, values, pages, offsets, ids, buckets = problem(40, 2, 16, 8, torch.float32, device)
    pages[:], offsets[:] = 3, 5
    write_pages(k, k, keys, values, pages, offsets, ids, buckets, backend=backend)
    keys[3, 5], values[3, 5], buckets[3, 5] = 0, 0, 0
    assert not keys.any()
    assert not values.any()
    assert not buckets.any()

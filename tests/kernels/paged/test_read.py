"""Tests of `read_pages`: equality with indexing, also of caches in FP8."""

import pytest
import torch

from msattn.kernels.common.fp8 import FP8, dequantize
from msattn.kernels.paged.read import read_pages
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("first", "end", "heads", "size", "page_size"),
    [(0, 1, 2, 64, 16), (5, 116, 1, 80, 64), (3, 68, 7, 128, 1), (256, 700, 4, 24, 256)],
)
def test_equals_indexing(
    first: int, end: int, heads: int, size: int, page_size: int, dtype: torch.dtype, fp8: bool,
    backend: Backend, device: str,
) -> None:  # fmt: skip
    pages = -(-end // page_size) + 1
    table = torch.randperm(pages + 2)[:pages].int().to(device)
    cache = torch.randn(pages + 2, heads, page_size, 2 * size, device=device)
    cache = cache.to(FP8 if fp8 else dtype).transpose(1, 2)
    scale = torch.rand(heads, device=device) + 0.5 if fp8 else None
    for stored in cache.chunk(2, dim=-1):
        position = torch.arange(first, end, device=device)
        want = stored.float()[table[position // page_size].long(), position % page_size]
        want = dequantize(want.transpose(0, 1), scale, dtype)
        got = read_pages(stored, table, first, end, dtype, stored_scale=scale, backend=backend)
        assert got.is_contiguous()
        assert torch.equal(got, want)

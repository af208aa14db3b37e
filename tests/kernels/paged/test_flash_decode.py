"""Tests of `paged_flash_decode`: agreement with fp64, edge cases."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.common import dense_decode
from msattn.kernels.paged import paged_flash_decode
from msattn.kernels.testing import capped, random_pages, random_qkv, starts
from msattn.kernels.tuned import Tile
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, in_fp8
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    """One problem."""

    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    num_queries: int
    head_size: int
    page_size: int
    dtype: torch.dtype = FULL


def check(
    case: Case,
    backend: Backend,
    device: str,
    softcap: float | None = None,
    by_head: bool | None = None,
) -> None:
    """With ``by_head`` the cache is in FP8, with scales by head or for all."""
    batch, num_keys = len(case.lengths), max(1, *case.lengths)
    q, k, v = random_qkv(batch, *case[1:4], num_keys, case.head_size, case.dtype, device)
    j = torch.arange(num_keys, device=device)
    kv_len = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    i = (
        kv_len.view(-1, 1, 1, 1)
        - case.num_queries
        + torch.arange(case.num_queries, device=device)[:, None]
    )
    scale = None if softcap is None else CAPPED_SCALE
    fp8 = None if by_head is None else in_fp8(k, v, by_head=by_head)
    stored, (k, v) = ((k, v), (k, v)) if fp8 is None else (fp8.stored, fp8.exact)
    unread = (j >= kv_len[:, None])[:, None, :, None]  # these keys may hold any value
    wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in stored)
    cache, _ = random_pages(wide_k, wide_v, kv_len, case.page_size)
    cache = cache if fp8 is None else fp8.cache(cache)
    got = paged_flash_decode(q, cache, scale=scale, softcap=softcap, backend=backend)
    shared.assert_agrees(got, q, k, v, j <= i, scale, capped(softcap))


# Covers nearly all pairs of values of length, head size, dtype, group, page size and number of
# queries.
CASES = [
    Case((111, 0, 300), 4, 1, 1, 80, 16, HALF),
    Case((300, 65), 7, 1, 3, 128, 64, FULL),
    Case((1,), 4, 4, 16, 64, 256, HALF),
    Case((300, 63), 8, 2, 4, 128, 256, HALF),
    Case((111,), 1, 1, 1, 80, 48, FULL),
    Case((63, 1), 2, 2, 2, 64, 64, FULL),
    Case((65, 111), 7, 7, 1, 256, 16, FULL),
    Case((300, 111), 7, 1, 16, 64, 128, HALF),
]


FP8 = [  # groups of 1, 3, 4 and 7
    CASES[0],
    CASES[1],
    Case((65, 111), 6, 2, 2, 24, 16, HALF),  # rows that are not aligned
    Case((257,), 3, 3, 1, 256, 64, HALF),
]
CAPPED = [(CASES[1], 5.0), (CASES[0], 50.0), (CASES[3], 5.0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "softcap"), [CAPPED[0], *((case, None) for case in CASES), *CAPPED[1:]], ids=str
)
def test_agrees_with_fp64(
    case: Case, softcap: float | None, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, backend, device, softcap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "by_head", "softcap"),
    [(CASES[3], True, 5.0), (CASES[5], False, None), *((case, True, None) for case in FP8)],
    ids=str,
)
def test_fp8_agrees_with_fp64(
    case: Case, by_head: bool, softcap: float | None, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, backend, device, softcap, by_head)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16, 64]),
    num_queries=st.integers(1, 5),
    softcap=st.sampled_from([None, 1.0]),
)
def test_any_lengths(
    backend: Backend,
    device: str,
    lengths: list[int],
    page_size: int,
    num_queries: int,
    softcap: float | None,
) -> None:
    check(Case(tuple(lengths), 2, 1, num_queries, 16, page_size), backend, device, softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, page_size: int, num_keys: int, poisoned: None) -> None:
    for head_size, (q_heads, kv_heads), num_queries in itertools.product(
        [64, 80, 128, 256], [(2, 2), (4, 1), (7, 1)], [1, 4, 16]
    ):
        case = Case(
            (num_keys, num_keys // 2), q_heads, kv_heads, num_queries, head_size, page_size, dtype
        )
        for by_head in (None, q_heads == 4):
            check(case, "triton", "cuda", 5.0 if q_heads == 7 else None, by_head)


@pytest.mark.parametrize(
    ("tile", "page_size", "keys", "programs"),
    [(128, 64, 64, 2), (128, 256, 128, 1), (64, 16, 64, 1), (16, 48, 16, 1)],
)
def test_tiles_divide_pages_or_cross_them(
    tile: int, page_size: int, keys: int, programs: int
) -> None:
    got = dense_decode._tile_of_pages(Tile(16, tile, 4, 3), page_size)
    assert (got.keys, got.programs) == (keys, programs)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of pages and lengths."""
    q, k, v = random_qkv(2, 8, 2, 1, 4095, 128, torch.bfloat16, "cuda")
    cache, _ = random_pages(k, v, starts([4095, 1000], "cuda"), 256)
    other, _ = random_pages(k, v, starts([17, 4000], "cuda"), 256, seed=1)
    shared.assert_cuda_graph(
        lambda: paged_flash_decode(q, cache),
        lambda: [x.copy_(y) for x, y in zip(cache[:4], other[:4], strict=True)],
    )

"""Tests of `paged_bucket_decode`: agreement with fp64, edge cases."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.paged import bucket_decode as module
from msattn.kernels.paged import paged_bucket_decode
from msattn.kernels.testing import capped, random_pages, random_qkv, starts
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, in_fp8, keys_read, random_buckets
from tests.kernels.shared import BACKENDS, FULL, HALF


@pytest.fixture(scope="module", autouse=True)
def _several_tiles_of_a_scan(device: str):
    """The interpreter scans fewer positions at a time, so that short sequences have several
    tiles.
    """
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(module, "SCAN", 32)
        yield


class Case(NamedTuple):
    """One problem."""

    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_size: int
    page_size: int
    dtype: torch.dtype = FULL
    num_buckets: int = 10
    num_probes: int = 4
    recent: int | tuple[int, ...] = 9
    sink: int = 1

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns random q, k, v and buckets ``[B, Hkv, M]``, and probes with repetitions, -1 and
        others out of range.
        """
        batch, num_keys = len(self.lengths), max(1, *self.lengths)
        q, k, v = random_qkv(
            batch, self.q_heads, self.kv_heads, 1, num_keys, self.head_size, self.dtype, device
        )
        buckets = random_buckets(batch, self.kv_heads, num_keys, self.num_buckets, device)
        shape = (batch, self.kv_heads, self.num_probes)
        probes = torch.randint(-1, self.num_buckets, shape, dtype=torch.int32)
        probes[..., 2::5] = torch.tensor([-5, 2**15, 2**30])[
            torch.randint(3, probes[..., 2::5].shape)
        ].int()
        return q, k, v, buckets, probes.to(device)

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        recent = starts(self.recent, device) if isinstance(self.recent, tuple) else self.recent
        return {"recent": recent, "sink": self.sink}


def check(
    case: Case,
    backend: Backend,
    device: str,
    softcap: float | None = None,
    by_head: bool | None = None,
) -> None:
    """With ``by_head`` the cache is in FP8, with scales by head or for all."""
    q, k, v, buckets, probes = case.inputs(device)
    read = keys_read(buckets, probes, case.recent, case.sink, 0, case.lengths)
    seen = read.repeat_interleave(case.q_heads // case.kv_heads, 1)[:, :, None]
    scale = None if softcap is None else CAPPED_SCALE
    fp8 = None if by_head is None else in_fp8(k, v, by_head=by_head)
    stored, (k, v) = ((k, v), (k, v)) if fp8 is None else (fp8.stored, fp8.exact)
    unread = ~read[..., None]  # these keys may hold any value
    wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in stored)
    cache, (slots,) = random_pages(
        wide_k, wide_v, starts(case.lengths, device), case.page_size, [buckets.short()]
    )
    cache = cache if fp8 is None else fp8.cache(cache)
    counts = torch.ones(read.shape[:2], dtype=torch.int64, device=device)
    options: dict[str, Any] = {
        **case.options(device),
        "scale": scale,
        "softcap": softcap,
        "counts": counts,
    }
    got = paged_bucket_decode(q, cache, slots, probes, **options, backend=backend)
    shared.assert_agrees(got, q, k, v, seen, scale, capped(softcap))
    assert torch.equal(counts, 1 + read.sum(-1))


# Covers nearly all pairs of values of length, head size, dtype, group, page size and window.
CASES = [
    Case((111, 0, 65), 4, 1, 80, 16, HALF, recent=(3, 70, 9), sink=4),
    Case((300, 63), 7, 1, 128, 64, FULL, num_probes=70),
    Case((1,), 4, 4, 64, 256, HALF, num_probes=0),
    Case((65, 111), 8, 2, 128, 16, HALF, num_buckets=40, recent=0, sink=0),
    Case((111,), 1, 1, 80, 256, FULL, num_buckets=2000, num_probes=700, recent=0),
    Case((63, 1), 2, 2, 64, 64, FULL, recent=500),
    Case((300, 111), 7, 7, 80, 64, HALF, recent=(64, 0), sink=200),
    Case((65, 300), 4, 1, 64, 16, FULL, recent=17),
]


FP8 = [  # groups of 1, 3, 4 and 7
    CASES[0],
    CASES[1],
    CASES[2],
    Case((65, 111), 6, 2, 24, 16, HALF, recent=0),  # rows that are not aligned
]
CAPPED = [(CASES[1], 5.0), (CASES[0], 50.0), (CASES[3], 50.0)]


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


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, page_size: int, num_keys: int, poisoned: None) -> None:
    heads, windows, probes = [(2, 2), (4, 1), (7, 1)], [(0, 0), (1, 9), (4, (2, 100))], [0, 5, 100]
    for head_size, (q_heads, kv_heads), (sink, recent), num_probes in itertools.product(
        [64, 80, 128, 256], heads, windows, probes
    ):
        lengths = (num_keys, num_keys // 2)
        case = Case(
            lengths, q_heads, kv_heads, head_size, page_size, dtype, 64, num_probes, recent, sink
        )
        for by_head in (None, q_heads == 4):
            check(case, "triton", "cuda", 5.0 if sink else None, by_head)


@pytest.mark.gpu
def test_one_split_at_large_batch(poisoned: None) -> None:
    """There are more sequences than programs at once, so that one program scans several tiles."""
    lengths = tuple(range(1, 4000, 20))
    check(Case(lengths, 8, 2, 128, 256, torch.bfloat16, 64, 8, 100), "triton", "cuda")


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16, 64]),
    num_buckets=st.integers(1, 70),
    recent=st.integers(0, 100),
    sink=st.integers(0, 5),
    softcap=st.sampled_from([None, 1.0]),
)
def test_any_pages(
    backend: Backend,
    device: str,
    lengths: Any,
    page_size: int,
    num_buckets: int,
    recent: int,
    sink: int,
    softcap: float | None,
) -> None:
    case = Case(tuple(lengths), 2, 1, 16, page_size, FULL, num_buckets, 6, recent, sink)
    check(case, backend, device, softcap)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_accepts_any_strides(backend: Backend, device: str) -> None:
    case = CASES[1]
    q, k, v, buckets, probes = case.inputs(device)
    cache, (slots,) = random_pages(k, v, starts(case.lengths, device), 64, [buckets.short()])
    want = paged_bucket_decode(q, cache, slots, probes, recent=9, backend=backend)
    by_head_k, by_head_v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v)
    )
    by_head = cache._replace(k=by_head_k, v=by_head_v)
    every_second = cache._replace(table=torch.stack([cache.table, -cache.table], -1)[..., 0])
    slots, probes = slots.permute(2, 0, 1).contiguous().permute(1, 2, 0), probes.mT.contiguous().mT
    for other in (by_head, every_second):
        shared.assert_same(
            paged_bucket_decode(q, other, slots, probes, recent=9, backend=backend), want
        )


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of pages, lengths, buckets, probes and window."""
    case = Case((4095, 1000), 8, 2, 128, 256, torch.bfloat16, num_buckets=64, num_probes=8)
    q, k, v, buckets, probes = case.inputs("cuda")
    cache, (slots,) = random_pages(k, v, starts(case.lengths, "cuda"), 256, [buckets.short()])
    recent = torch.tensor([9, 30], dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        counts.zero_()
        return *paged_bucket_decode(
            q, cache, slots, probes, recent=recent, counts=counts
        ), counts.clone()

    def change(lengths: list[int]) -> None:
        other, (other_slots,) = random_pages(
            k, v, starts([17, 4000], "cuda"), 256, [buckets.short()], seed=1
        )
        for x, y in zip((*cache[:3], slots), (*other[:3], other_slots), strict=True):
            x.copy_(y)
        cache.kv_len.copy_(torch.tensor(lengths))
        probes.random_(-1, 64)
        recent.copy_(torch.tensor([64, 1]))

    for lengths in ([17, 4000], [0, 2049]):
        shared.assert_cuda_graph(step, lambda lengths=lengths: change(lengths))

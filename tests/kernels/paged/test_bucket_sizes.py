"""Tests of `paged_bucket_sizes`: agreement with a count of the gathered ids, edge cases."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.paged import bucket_sizes as module
from msattn.kernels.paged import paged_bucket_sizes
from msattn.kernels.testing import random_pages, starts
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import random_buckets
from tests.kernels.shared import BACKENDS

INT = torch.int32


@pytest.fixture(autouse=True)
def _several_programs_and_histograms(device: str):
    """The interpreter counts fewer positions and buckets at a time, so that small problems have
    several of each.
    """
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(module, "SPAN", 64)
            patch.setattr(module, "MAX_BINS", 32)
        yield


def pages_of(
    buckets: Tensor, lengths: tuple[int, ...], page_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``buckets [B, H, M]`` by slot, the table and the lengths; slots of no sequence hold
    bucket 0.
    """
    kv_len = starts(lengths, str(buckets.device))
    keys = torch.zeros(*buckets.shape, 16, device=buckets.device)
    cache, (slots,) = random_pages(keys, keys, kv_len, page_size, [buckets.short()], seed)
    return slots, cache.table, cache.kv_len


def counted(buckets: Tensor, lengths: tuple[int, ...], num_buckets: int) -> Tensor:
    """Counts by definition."""
    filled = torch.arange(buckets.shape[2], device=buckets.device) < torch.tensor(
        lengths, device=buckets.device
    ).view(-1, 1, 1)
    ids = torch.arange(num_buckets, device=buckets.device)
    return ((buckets[..., None] == ids) & filled[..., None]).sum(2).int()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lengths", "heads", "page_size", "num_buckets"),
    [
        ((111, 0, 65), 2, 16, 10),
        ((1,), 1, 64, 1),
        ((63, 300), 7, 256, 100),
        ((300,), 4, 48, 33),
        ((65, 65), 1, 1, 3),
    ],
    ids=str,
)
def test_equals_the_count(
    lengths: tuple[int, ...],
    heads: int,
    page_size: int,
    num_buckets: int,
    backend: Backend,
    device: str,
    poisoned: None,
) -> None:
    """Some keys are in no bucket, others in one beyond ``num_buckets``."""
    buckets = random_buckets(len(lengths), heads, max(lengths), num_buckets + 2, device)
    buckets[:, :, ::7] = -1
    got = paged_bucket_sizes(
        *pages_of(buckets, lengths, page_size), num_buckets=num_buckets, backend=backend
    )
    assert got.dtype == INT
    assert torch.equal(got, counted(buckets, lengths, num_buckets))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095, 20000])
def test_full_product(num_keys: int, poisoned: None) -> None:
    for page_size, heads, num_buckets in itertools.product(
        [16, 64, 256], [1, 2, 8], [1, 64, 1024, 2**15]
    ):
        lengths = (num_keys, num_keys // 2)
        buckets = random_buckets(2, heads, num_keys, num_buckets, "cuda")
        got = paged_bucket_sizes(*pages_of(buckets, lengths, page_size), num_buckets=num_buckets)
        filled = torch.arange(num_keys, device="cuda") < torch.tensor(lengths, device="cuda").view(
            -1, 1, 1
        )
        ids = torch.where(filled, buckets, -1).long() + 1  # -1 is no bucket
        want = torch.zeros(2, heads, num_buckets + 1, dtype=INT, device="cuda")
        assert torch.equal(got, want.scatter_add_(2, ids, torch.ones_like(ids, dtype=INT))[..., 1:])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([0, 1, 16, 17, 64, 150])),
        min_size=1,
        max_size=3,
    ),
    page_size=st.sampled_from([5, 64]),
    num_buckets=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_adds_the_new_keys(
    backend: Backend,
    device: str,
    lengths: list[tuple[int, int]],
    page_size: int,
    num_buckets: int,
    seed: int,
) -> None:
    """The sizes of the first keys, with those of the others, are the sizes of all."""
    all_keys = tuple(first + new for first, new in lengths)
    first = tuple(first for first, _ in lengths)
    buckets = random_buckets(len(lengths), 2, max(1, *all_keys), num_buckets, device, seed)
    slots, table, kv_len = pages_of(buckets, all_keys, page_size, seed)
    kept = counted(buckets, first, num_buckets)
    got = paged_bucket_sizes(
        slots,
        table,
        kv_len,
        num_buckets=num_buckets,
        counted=starts(first, device),
        sizes=kept,
        backend=backend,
    )
    assert got is kept
    assert torch.equal(got, counted(buckets, all_keys, num_buckets))


def test_counts_nothing_beyond_the_table(device: str) -> None:
    """The kernel does not check lengths: one beyond the pages counts those alone."""
    slots, table, _ = pages_of(random_buckets(2, 2, 32, 10, device), (32, 32), 16)
    full, beyond = (
        torch.full((2,), length, dtype=torch.int32, device=device) for length in (32, 64)
    )
    got, want = (
        paged_bucket_sizes(slots, table, kv_len, num_buckets=10, backend="triton")
        for kv_len in (beyond, full)
    )
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of pages, lengths and buckets."""
    buckets = random_buckets(2, 2, 4095, 64, "cuda")
    inputs, others = (
        pages_of(buckets, lengths, 256, seed)
        for seed, lengths in enumerate([(4095, 1000), (17, 4000)])
    )
    shared.assert_cuda_graph(
        lambda: paged_bucket_sizes(*inputs, num_buckets=64),
        lambda: [x.copy_(y) for x, y in zip(inputs, others, strict=True)],
    )

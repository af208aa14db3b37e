"""Tests of `nearest_centroid` and `bucket_sums` against fp64, on both backends."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from msattn.kernels.nearest_centroid import bucket_sums, nearest_centroid
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import random_buckets
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    batch: int
    heads: int
    num_keys: int
    num_buckets: int
    head_size: int
    dtype: torch.dtype = FULL

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Returns token-major keys ``[B, H, M, D]`` and unit centroids ``[H, C, D]``."""
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(self.batch, self.num_keys, self.heads, self.head_size, generator=generator)
        centroids = torch.randn(self.heads, self.num_buckets, self.head_size, generator=generator)
        return k.transpose(1, 2).to(device, self.dtype), normalize(centroids, dim=-1).to(device)


# Covers nearly all pairs of values of length, bucket count, head size and dtype.
CASES = [
    Case(1, 1, 1, 1, 64),
    Case(2, 3, 63, 5, 80, HALF),
    Case(1, 2, 200, 64, 128, FULL),
    Case(2, 2, 130, 130, 64, HALF),
    Case(1, 4, 129, 200, 8, FULL),
    Case(1, 1, 300, 7, 256, HALF),
    Case(1, 2, 128, 128, 128, HALF),
    Case(3, 1, 65, 33, 80, FULL),
    Case(1, 2, 70, 33, 512, HALF),
]


def check_nearest(case: Case, backend: Backend, device: str) -> None:
    k, centroids = case.inputs(device)
    got = nearest_centroid(k, centroids, backend=backend)
    assert got.buckets.dtype == torch.int32
    assert got.products.dtype == torch.float32
    exact = k.double() @ centroids.double().mT
    lengths = k.double().norm(dim=-1) * centroids.double().norm(dim=-1).amax()
    # stated in the docstring of nearest_centroid
    bound = (2**-18 + 2 * case.head_size * 2**-23) * lengths
    assert ((got.products - exact.amax(-1)).abs() <= 2 * bound).all()
    chosen = exact.gather(-1, got.buckets.long()[..., None])[..., 0]
    assert ((got.products - chosen).abs() <= bound).all()
    assert (chosen >= exact.amax(-1) - 2 * bound).all()


def check_sums(case: Case, backend: Backend, device: str) -> None:
    k, _ = case.inputs(device)
    # -1 among them
    buckets = random_buckets(case.batch, case.heads, case.num_keys, case.num_buckets, device)
    got = bucket_sums(k, buckets, num_buckets=case.num_buckets, backend=backend)
    assert got.sums.dtype == torch.float32
    assert got.counts.dtype == torch.int32
    member = one_hot(buckets.long() + 1, case.num_buckets + 1)[..., 1:]
    assert torch.equal(got.counts.long(), member.sum(2))
    # every addition rounds a partial sum
    terms = member.sum(2)[..., None] * (member.double().mT @ k.double().abs())
    error = (got.sums - member.double().mT @ k.double()).abs()
    assert (error <= 2**-23 * terms + 2**-21 * k.double().abs().amax()).all()
    assert (got.sums[got.counts == 0] == 0).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case, backend: Backend, device: str, poisoned: None) -> None:
    check_nearest(case, backend, device)
    check_sums(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    for num_keys, num_buckets in itertools.product((1, 63, 129, 4095), (1, 7, 128, 1000, 1024)):
        case = Case(2, 3, num_keys, num_buckets, head_size, dtype)
        check_nearest(case, "triton", "cuda")
        check_sums(case, "triton", "cuda")


@pytest.mark.gpu
def test_at_full_length() -> None:
    """A layer of Llama-3.1-8B at 128k tokens, with the full number of splits."""
    case = Case(1, 8, 131_072, 1024, 128, torch.bfloat16)
    check_nearest(case, "triton", "cuda")
    k, centroids = case.inputs("cuda")
    buckets = nearest_centroid(k, centroids).buckets
    got = bucket_sums(k, buckets, num_buckets=1024)
    assert torch.equal(got.counts.sum(-1), torch.full((1, 8), 131_072, device="cuda"))
    for head in range(8):
        want = torch.zeros(1024, 128, dtype=torch.float64, device="cuda")
        want.index_add_(0, buckets[0, head], k[0, head].double())
        torch.testing.assert_close(got.sums[0, head].double(), want, rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_is_deterministic() -> None:
    k, centroids = Case(1, 4, 50_000, 300, 128, torch.bfloat16).inputs("cuda")
    buckets = nearest_centroid(k, centroids).buckets
    shared.assert_reproducible(
        lambda: (*nearest_centroid(k, centroids), *bucket_sums(k, buckets, num_buckets=300)), runs=5
    )


@pytest.mark.gpu
def test_offsets_beyond_31_bits() -> None:
    # the last row starts past 2**31
    k = torch.zeros(2**24 + 1, 136, dtype=torch.float16, device="cuda")[:, :128]
    k[-1] = 1
    k = k[None, None]
    centroids = torch.stack([-torch.ones(128), torch.ones(128)])[None].cuda()
    got = nearest_centroid(k, centroids)
    assert got.buckets[0, 0, -1] == 1
    assert got.products[0, 0, -1] == 128
    sums = bucket_sums(k, got.buckets, num_buckets=2)
    assert (sums.sums[0, 0, 1] == 1).all()
    assert sums.counts.tolist() == [[[2**24, 1]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_number(backend: Backend, device: str) -> None:
    k, centroids = Case(1, 2, 40, 10, 64).inputs(device)
    k, centroids = k.round(), (8 * centroids).round()  # integers: products are exact in any order
    repeated = centroids.repeat(1, 20, 1)  # 200 centroids are several tiles
    once = nearest_centroid(k, centroids, backend=backend)
    again = nearest_centroid(k, repeated, backend=backend)
    assert torch.equal(again.buckets, once.buckets)
    assert torch.equal(again.products, once.products)
    zero = nearest_centroid(torch.zeros_like(k), repeated, backend=backend)
    assert (zero.buckets == 0).all()
    assert (zero.products == 0).all()


@settings(max_examples=8, deadline=None)
@given(num_keys=st.integers(1, 200), num_buckets=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_splits_count_each_key_once(num_keys: int, num_buckets: int, seed: int) -> None:
    """Sums of integers are exact, so that both backends agree for any split."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    k = torch.randint(-9, 10, (1, 2, num_keys, 8), generator=generator).float().to(device)
    buckets = random_buckets(1, 2, num_keys, num_buckets, device, seed)
    got, want = (
        bucket_sums(k, buckets, num_buckets=num_buckets, backend=backend) for backend in BACKENDS
    )
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.sums, want.sums)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    k, centroids = Case(1, 8, 1000, 64, 128, torch.bfloat16).inputs("cuda")
    shared.assert_cuda_graph(
        lambda: nearest_centroid(k, centroids), lambda: k.copy_(torch.randn_like(k))
    )

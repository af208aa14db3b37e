"""Tests of `probe_centroids`: kernel and reference against fp64, ties."""

import pytest
import torch
from torch.nn.functional import normalize

from msattn.kernels.nearest_centroid import nearest_centroid
from msattn.kernels.probe_centroids import probe_centroids
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS, FULL, HALF


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "head", "buckets", "dtype", "probes"),
    [
        (2, 4, 2, 1, 64, 300, HALF, 32),
        (1, 3, 3, 20, 80, 100, HALF, 1),
        (3, 7, 1, 2, 64, 17, FULL, 17),
        (1, 8, 2, 1, 128, 64, FULL, 5),
        (1, 2, 2, 1, 256, 9, FULL, 0),
        (2, 2, 2, 40, 64, 65, FULL, 2),
    ],
)
def test_selects_the_largest_products(
    batch: int, heads: int, kv_heads: int, tokens: int, head: int, buckets: int,
    dtype: torch.dtype, probes: int, backend: Backend, device: str,
) -> None:  # fmt: skip
    x = torch.randn(batch, tokens, heads, head).transpose(1, 2).to(device, dtype)
    centroids = normalize(torch.randn(kv_heads, buckets, head), dim=-1).to(device)
    got, products = probe_centroids(x, centroids, probes=probes, backend=backend)
    assert got.dtype == torch.int32
    assert got.shape == products.shape == (batch, kv_heads, tokens, probes)
    assert (got.diff(dim=-1) > 0).all()
    sums = x.double().unflatten(1, (kv_heads, -1)).sum(2)
    exact = torch.einsum("bhnd,hcd->bhnc", sums, centroids.double())
    torch.testing.assert_close(
        products.double(), exact.gather(-1, got.long()), rtol=0, atol=1e-5 * heads / kv_heads
    )
    if probes:
        least = exact.topk(probes, -1).values[..., -1:]
        assert (products.double() >= least - 1e-5 * heads / kv_heads).all()


@pytest.mark.parametrize("probes", [1, 3, 9])
def test_ties_go_to_the_lowest_number(probes: int, device: str) -> None:
    x, centroids = torch.ones(1, 2, 1, 16, device=device), torch.zeros(1, 9, 16, device=device)
    centroids[0, 4], centroids[0, 6] = 1, -1
    got = probe_centroids(x, centroids, probes=probes, backend="triton").buckets
    best = [4, 0, 1, 2, 3, 5, 7, 8, 6][:probes]
    assert got.flatten().tolist() == sorted(best)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 2, 70])
def test_bf16_and_cuda_graph(sequences: int) -> None:
    q = torch.randn(sequences, 32, 1, 128, device="cuda").bfloat16()
    k = torch.randn(1, 8, sequences, 128, device="cuda").bfloat16()
    centroids = normalize(torch.randn(8, 1024, 128, device="cuda"), dim=-1)
    want = probe_centroids(q, centroids, probes=32, backend="torch").products.sum(-1)
    got, key = probe_centroids(q, centroids, probes=32), probe_centroids(k, centroids, probes=1)
    torch.testing.assert_close(got.products.sum(-1), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(key.buckets.squeeze(-1), nearest_centroid(k, centroids).buckets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = probe_centroids(q, centroids, probes=32)
        key_again = probe_centroids(k, centroids, probes=1)
    graph.replay()
    assert torch.equal(again.buckets, got.buckets)
    assert torch.equal(key_again.buckets, key.buckets)

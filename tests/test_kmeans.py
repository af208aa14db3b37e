"""Spherical k-means: the batched form against Faiss, and routing by centroids."""

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from msattn.trainer.config import KMeansConfig
from msattn.trainer.errors import UserError
from msattn.trainer.saap.kmeans import KMeans, batched_kmeans, faiss_kmeans, fit_points, partition_stats, split_empty

CPU = torch.device("cpu")


def blobs(heads: int = 2, num_points: int = 3000, dim: int = 16, modes: int = 24, seed: int = 0) -> Tensor:
    """Points around random directions, of different lengths: ``[H, n, D]``."""
    generator = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(heads, modes, dim, generator=generator), dim=-1)
    picked = torch.randint(0, modes, (heads, num_points), generator=generator)
    noise = 0.15 * torch.randn(heads, num_points, dim, generator=generator)
    lengths = 1 + torch.rand(heads, num_points, 1, generator=generator)
    return lengths * (centres[torch.arange(heads)[:, None], picked] + noise)


def mean_objective(points: Tensor, centroids: Tensor) -> float:
    stats = partition_stats(points, centroids)
    return sum(head["objective"] for head in stats) / len(stats)


@pytest.mark.parametrize("num_buckets", [8, 64])
def test_batched_form_is_as_good_as_faiss(num_buckets: int) -> None:
    points = blobs(heads=4)
    ours, theirs = (fit(points, num_buckets, 10, 0) for fit in (batched_kmeans, faiss_kmeans))
    assert ours.shape == theirs.shape == (4, num_buckets, 16)
    for centroids in (ours, theirs):
        torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(4, num_buckets))
    # 1 % of the objective, and each seed ends in another local optimum: the mean over heads is compared
    assert mean_objective(points, ours) == pytest.approx(mean_objective(points, theirs), rel=0.01)


def test_an_iteration_assigns_by_product_averages_and_normalizes() -> None:
    points = blobs(heads=1, num_points=500)
    start = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:10]
    first = normalize(points[0, start], dim=-1)
    buckets = (points[0] @ first.T).argmax(-1)
    expected = normalize(torch.stack([points[0, buckets == c].mean(0) for c in range(10)]), dim=-1)
    torch.testing.assert_close(batched_kmeans(points, 10, 1, seed=3)[0], expected, rtol=0, atol=1e-5)


def test_same_seed_same_centroids() -> None:
    points = blobs()
    assert torch.equal(batched_kmeans(points, 16, 5, seed=1), batched_kmeans(points, 16, 5, seed=1))
    assert not torch.equal(batched_kmeans(points, 16, 5, seed=1), batched_kmeans(points, 16, 5, seed=2))


def test_an_empty_bucket_shares_the_fullest() -> None:
    sums = torch.tensor([[[4.0, 4.0], [0.0, 0.0], [0.0, 2.0]]])
    means = split_empty(sums, torch.tensor([[4.0, 0.0, 2.0]]), torch.full((1, 3, 2), 9.0))
    eps = 1 / 1024
    expected = torch.tensor([[[1 + eps, 1 - eps], [1 - eps, 1 + eps], [0.0, 1.0]]])
    torch.testing.assert_close(means, expected)
    alone = split_empty(
        torch.tensor([[[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]]), torch.tensor([[3.0, 0.0, 0.0]]), torch.full((1, 3, 2), 9.0)
    )
    assert sorted(alone[0, :, 0].tolist())[-1] == 9.0  # nothing left to share: it stays


def test_no_bucket_stays_empty_on_duplicated_points() -> None:
    points = blobs(heads=1, num_points=40).repeat(1, 20, 1)
    stats = partition_stats(points, batched_kmeans(points, 32, 20, seed=0))
    assert stats[0]["empty_buckets"] <= 3


def test_stats() -> None:
    points = torch.tensor([[[2.0, 0.0], [4.0, 0.0], [0.0, 3.0], [1.0, 0.0]]])
    centroids = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    (stats,) = partition_stats(points, centroids)
    assert stats == {"points": 4, "objective": 2.5, "empty_buckets": 1, "imbalance": 3 * (9 + 1) / 16}


def test_fit_uses_all_points_and_normalizes_when_asked() -> None:
    points = blobs(heads=1, num_points=2000)
    cfg = KMeansConfig(num_buckets=4, iterations=3, normalize_keys=True)
    centroids, (stats,) = fit_points(points, cfg, device=CPU, seed=0)
    assert centroids.shape == (1, 4, 16)
    assert stats["points"] == 2000  # 500 a bucket: Faiss alone would take 256
    assert 0 < stats["objective"] <= 1
    with pytest.raises(UserError, match=r"kmeans.num_buckets=11: .* at most as many as there are keys, 10"):
        fit_points(points[:, :10], KMeansConfig(num_buckets=11), device=CPU, seed=0)


@pytest.mark.gpu
def test_fit_on_a_gpu() -> None:
    points = blobs(heads=8, num_points=20000)
    _, stats = fit_points(points, KMeansConfig(num_buckets=64), device=torch.device("cuda"), seed=0)
    on_cpu = mean_objective(points, batched_kmeans(points, 64, 10, seed=0))
    assert sum(head["objective"] for head in stats) / 8 == pytest.approx(on_cpu, rel=0.01)


def test_without_faiss_the_cpu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install 'msattn\[cpu\]'"):
        faiss_kmeans(blobs(), 4, 1, 0)


@pytest.mark.parametrize("rope", [False, True])
def test_routing(rope: bool) -> None:
    centroids = normalize(torch.randn(2, 3, 7, 8), dim=-1)
    kmeans = KMeans(centroids, [1, 4], rope)
    before, after = torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    keys = after if rope else before
    buckets = kmeans.assign(4, before, after)
    assert buckets.dtype == torch.int32
    nearest = (keys[:, :, :, None] - centroids[1][:, None]).norm(dim=-1).argmin(-1)
    assert torch.equal(buckets.long(), nearest)

    q_before, q_after = torch.randn(2, 6, 1, 8), torch.randn(2, 6, 1, 8)
    queries = (q_after if rope else q_before)[:, :, 0].double()
    scores = kmeans.scores(1, q_before, q_after)
    expected = torch.stack([(queries[:, 2 * h : 2 * h + 2] @ centroids[0, h].double().T).sum(1) for h in range(3)], dim=1)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"layer=2: this router holds layers \[1, 4\]"):
        kmeans.scores(2, q_before, q_after)

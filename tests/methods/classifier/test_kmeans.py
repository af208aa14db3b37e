"""Spherical k-means: the batched engine against Faiss, k-means routing, and `fit-kmeans` on one and
two ranks.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from msattn.trainer import artifacts
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import FitKMeansConfig, KMeansConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Buckets
from msattn.trainer.methods.budgets import Probes
from msattn.trainer.methods.classifier.clustering import (
    batched_kmeans,
    faiss_kmeans,
    fit_centroids,
    flat_index,
    partition_stats,
    require_faiss,
    resolve_engine,
    split_fullest,
)
from msattn.trainer.methods.classifier.fit_kmeans import collect_keys, fit_kmeans
from msattn.trainer.methods.classifier.kmeans import FEW_KEYS, KMeans
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from tests.factory import random_partition, random_tokens, tiny_model
from tests.jobs import Job, prepare

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def blobs(heads: int = 2, num_points: int = 3000, modes: int = 24, seed: int = 0) -> Tensor:
    """Returns points around random directions, with random norms: ``[H, n, D]``."""
    dim, generator = 16, torch.Generator().manual_seed(seed)
    centers = normalize(torch.randn(heads, modes, dim, generator=generator), dim=-1)
    picked = torch.randint(0, modes, (heads, num_points), generator=generator)
    noise = 0.15 * torch.randn(heads, num_points, dim, generator=generator)
    lengths = 1 + torch.rand(heads, num_points, 1, generator=generator)
    return lengths * (centers[torch.arange(heads)[:, None], picked] + noise)


def mean_objective(points: Tensor, centroids: Tensor) -> float:
    stats = partition_stats(points, centroids)
    return sum(head["objective"] for head in stats) / len(stats)


@pytest.mark.parametrize("num_buckets", [8, 64])
def test_batched_objective_matches_faiss(num_buckets: int) -> None:
    points = blobs(heads=4)
    batched, faiss = (fit(points, num_buckets, 10, 0) for fit in (batched_kmeans, faiss_kmeans))
    assert batched.shape == faiss.shape == (4, num_buckets, 16)
    for centroids in (batched, faiss):
        torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(4, num_buckets))
    # Each seed ends in another local optimum, so that only the mean over heads is comparable.
    assert mean_objective(points, batched) == pytest.approx(mean_objective(points, faiss), rel=0.01)


@pytest.mark.parametrize("fit", [batched_kmeans, faiss_kmeans])
def test_as_many_points_as_buckets_are_unit_centroids(fit: Callable[..., Tensor]) -> None:
    points = blobs(num_points=8)
    torch.testing.assert_close(fit(points, 8, 2, 0).norm(dim=-1), torch.ones(2, 8))


def test_one_iteration_gives_the_normalized_mean_of_each_bucket() -> None:
    points = blobs(heads=1, num_points=500)
    start = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:10]
    first = normalize(points[0, start], dim=-1)
    buckets = (points[0] @ first.T).argmax(-1)
    expected = normalize(torch.stack([points[0, buckets == c].mean(0) for c in range(10)]), dim=-1)
    torch.testing.assert_close(
        batched_kmeans(points, 10, 1, seed=3)[0], expected, rtol=0, atol=1e-5
    )


EPS = 1 / 1024
HALVES = [[1 + EPS, 1 - EPS], [1 - EPS, 1 + EPS]]


@pytest.mark.parametrize(
    ("sums", "counts", "capacity", "expected"),
    [
        ([[4, 4], [0, 0], [0, 2]], [4, 0, 2], math.inf, [*HALVES, [0, 1]]),
        # no other full one is left to split
        ([[3, 3], [0, 0], [0, 0]], [3, 0, 0], math.inf, [HALVES[0], [9, 9], HALVES[1]]),
        ([[6, 6], [1, 0], [0, 4]], [6, 1, 2], 6, [[1, 1], [1, 0], [0, 2]]),
        ([[6, 6], [1, 0], [0, 4]], [6, 1, 2], 5.9, [*HALVES, [0, 2]]),
    ],
)
def test_the_fullest_bucket_is_split_for_an_empty_one_or_above_the_capacity(
    sums: list[list[int]], counts: list[int], capacity: float, expected: list[list[float]]
) -> None:
    means = split_fullest(
        torch.tensor([sums]).float(),
        torch.tensor([counts]).float(),
        torch.full((1, 3, 2), 9.0),
        capacity,
    )
    torch.testing.assert_close(means, torch.tensor([expected]).float())


@pytest.mark.parametrize("num_buckets", [16, 64])
def test_balanced_buckets_are_more_even_at_nearly_the_same_objective(num_buckets: int) -> None:
    """Half of the points are around one direction, so that dividing them takes centroids from the
    others.
    """
    points, crowded = blobs(heads=4), blobs(heads=4, modes=1, seed=1)
    points = torch.cat([points, crowded], 1)
    cfg = KMeansConfig(num_buckets=num_buckets, engine="batched")
    (plain, before), (balanced, after) = (
        fit_centroids(points, each, device=CPU, seed=0) for each in (cfg, replace(cfg, balance=1.5))
    )
    torch.testing.assert_close(balanced.norm(dim=-1), torch.ones(4, num_buckets))
    excess = [sum(head["imbalance"] - 1 for head in stats) for stats in (before, after)]
    assert excess[1] < 0.6 * excess[0]
    assert mean_objective(points, balanced) == pytest.approx(
        mean_objective(points, plain), rel=0.02
    )
    assert all(head["empty_buckets"] == 0 for head in after)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "faiss", "balance": 1.5},
            r"kmeans.balance=1.5: expected null with kmeans.engine=faiss",
        ),
        ({"balance": 1}, r"kmeans.balance=1: expected a number in \(1, 1e6\], or null"),
        (
            {"engine": "fais"},
            r"kmeans.engine=fais: expected auto, batched, faiss \(did you mean faiss\?\)",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KMeansConfig(**settings)


class GpuFaiss:
    """Stands in for a Faiss with ``gpus`` GPUs; an index on a GPU is a tuple of how it was made."""

    IndexFlatIP = staticmethod(lambda size: ("flat", size))
    StandardGpuResources = staticmethod(lambda: "resources")
    index_cpu_to_gpu = staticmethod(lambda *arguments: ("gpu", *arguments))

    def __init__(self, gpus: int) -> None:
        self.get_num_gpus = lambda: gpus


def test_faiss_uses_the_gpu_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = GpuFaiss(2)
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    assert require_faiss(CUDA) is faiss
    assert resolve_engine(KMeansConfig(engine="faiss"), CUDA) == "faiss"
    assert flat_index(faiss, 64, torch.device("cuda:1")) == ("gpu", "resources", 1, ("flat", 64))
    assert flat_index(faiss, 64, CPU) == flat_index(GpuFaiss(0), 64, CUDA) == ("flat", 64)


def test_non_finite_points_are_rejected() -> None:
    points = blobs(heads=1, num_points=50)
    points[0, 7, 3] = torch.inf
    for engine in ("batched", "faiss"):
        with pytest.raises(
            UserError, match="dtype=float32: some of the model's keys are not finite"
        ):
            fit_centroids(points, KMeansConfig(num_buckets=4, engine=engine), device=CPU, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gpu_objective_matches_the_cpu(dtype: torch.dtype) -> None:
    points = blobs(heads=8, num_points=20000).to(dtype)
    cfg = KMeansConfig(num_buckets=64)
    centroids, stats = fit_centroids(points, cfg, device=CUDA, seed=0)
    on_cpu = mean_objective(points, batched_kmeans(points, 64, 10, seed=0))
    assert sum(head["objective"] for head in stats) / 8 == pytest.approx(on_cpu, rel=0.01)
    assert torch.equal(fit_centroids(points, cfg, device=CUDA, seed=0)[0], centroids)


def test_auto_engine_progress_and_missing_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve_engine(KMeansConfig(), device) for device in (CPU, CUDA)] == [
        "faiss",
        "batched",
    ]
    assert resolve_engine(KMeansConfig(balance=1.5), CPU) == "batched"
    assert [
        resolve_engine(KMeansConfig(engine=engine), CPU) for engine in ("batched", "faiss")
    ] == ["batched", "faiss"]
    points, done = blobs(heads=3, num_points=200), []
    for engine, function in (("faiss", faiss_kmeans), ("batched", batched_kmeans)):
        cfg = KMeansConfig(num_buckets=4, iterations=3, engine=engine)
        centroids, _ = fit_centroids(points, cfg, device=CPU, seed=1, advance=done.append)
        assert torch.equal(centroids, function(points, 4, 3, 1))
    assert done == [1, 1, 1, 3]

    monkeypatch.setitem(sys.modules, "faiss", None)
    assert resolve_engine(KMeansConfig(), CUDA) == "batched"
    with pytest.raises(
        UserError,
        match=r"auto on a CPU\): .* pip install 'msattn\[cpu\]', or use kmeans.engine=batched",
    ):
        resolve_engine(KMeansConfig(), CPU)
    with pytest.raises(
        UserError,
        match=r"kmeans.engine=faiss: .* pip install 'msattn\[gpu\]', or use kmeans.engine=batched",
    ):
        resolve_engine(KMeansConfig(engine="faiss"), CUDA)
    with pytest.raises(UserError, match=r"kmeans.engine=faiss .* pip install 'msattn\[cpu\]'"):
        faiss_kmeans(points, 4, 1, 0)


@pytest.mark.parametrize("rope", [False, True])
def test_collected_keys_are_in_the_order_of_prompts(rope: bool) -> None:
    model, prompts = tiny_model(), random_tokens(3, 20)
    chunks = [{"input_ids": prompt} for prompt in prompts]
    everything = [torch.arange(1, 20)] * 3
    keys = collect_keys(model, chunks, [1], everything, rope=rope)
    assert list(keys) == [1]
    assert keys[1].shape == (2, 3 * 19, 16)
    for number, chunk in enumerate(chunks):
        alone = collect_keys(model, [chunk], [0, 1], everything[:1], rope=rope)
        assert torch.equal(keys[1][:, 19 * number : 19 * (number + 1)], alone[1])
    some = [torch.tensor([3, 19]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    sampled = collect_keys(model, chunks, [1], some, rope=rope)
    assert torch.equal(sampled[1], keys[1][:, [2, 18, 38]])


JOB = """
import sys, time
from msattn.trainer.commands.compose import compose
from msattn.trainer.methods.classifier import fit_kmeans as job

class Slow(job.FinishedParts):
    def save(self, *inputs):
        time.sleep(0.3)
        super().save(*inputs)

if sys.argv[-1] == "slowly":
    job.FinishedParts = Slow
    sys.argv.pop()
job.fit_kmeans(compose("fit-kmeans", sys.argv[1:]))
"""


def settings(folder: Path) -> list[str]:
    """Returns the overrides of a job on the embedded model."""
    text = folder / "text.txt"
    text.write_text(" ".join(f"word {i * i % 997}" for i in range(400)))
    shared = [
        "device=cpu",
        "data=text",
        f"data.path={text}",
        "data.seq_len=96",
        "tracker=none",
        f"outputs={folder}/outputs",
    ]
    return shared + [
        f"kmeans.{each}"
        for each in ("engine=batched", "num_buckets=8", "num_prompts=2", "iterations=3")
    ]


def start(folder: Path, *arguments: str) -> Job:
    """Starts the job in two processes."""
    return Job(JOB, folder, *settings(folder), *arguments, processes=2)


def written(folder: Path) -> artifacts.Artifact:
    return artifacts.read(folder / "outputs/tiny/base/kmeans")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> artifacts.Artifact:
    """Returns the artifact of one uninterrupted process."""
    prepare()
    folder = tmp_path_factory.mktemp("alone")
    cfg = compose("fit-kmeans", settings(folder))
    assert isinstance(cfg, FitKMeansConfig)
    fit_kmeans(cfg)
    return written(folder)


@pytest.mark.slow
def test_a_killed_job_of_two_ranks_resumes(tmp_path: Path, alone: artifacts.Artifact) -> None:
    """Finished layers are kept, and the result is that of one process that was not interrupted."""
    parts = tmp_path / "outputs/tiny/base/runs/kmeans/layers"
    running = start(tmp_path, "slowly")
    running.wait_for(lambda: list(parts.glob("*.safetensors")))
    running.kill()
    assert not (tmp_path / "outputs/tiny/base/kmeans").exists()
    kept = {path.stem: load_file(path)["centroids"].clone() for path in parts.glob("*.safetensors")}
    assert kept
    start(tmp_path, "resume=true").output()
    manifest = written(tmp_path).manifest
    assert all(manifest[name] == alone.manifest[name] for name in ("content_hash", "details"))
    lines = (tmp_path / "outputs/tiny/base/runs/kmeans/metrics.jsonl").read_text()
    assert lines.count('"step"') == len(manifest["details"]["layers"])
    centroids = alone.tensors["centroids"]
    assert all(
        torch.equal(part, centroids[int(name.removeprefix("layer_"))])
        for name, part in kept.items()
    )


@pytest.mark.parametrize("together", [1, FEW_KEYS])
def test_decoded_tokens_get_the_same_buckets_as_in_a_prompt(together: int, device: str) -> None:
    """A few tokens use a plain product, prompts the ``nearest_centroid`` operation."""
    kmeans = random_partition(40, layers=[2], heads=3, size=64).to(device)
    keys = torch.randn(2, 3, 2 * FEW_KEYS + 1, 64, device=device).bfloat16()
    prompt = kmeans.assign(2, keys, keys)
    tokens = [kmeans.assign(2, key, key) for key in keys.split(together, dim=2)]
    assert tokens[0].dtype == torch.int32
    assert torch.equal(torch.cat(tokens, dim=2), prompt)


@pytest.mark.parametrize("rope", [False, True])
def test_kmeans_routing_matches_plain_products(rope: bool) -> None:
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
    expected = torch.stack(
        [(queries[:, 2 * h : 2 * h + 2] @ centroids[0, h].double().T).sum(1) for h in range(3)],
        dim=1,
    )
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    flat, k = torch.zeros(1, 20, 0), before
    x = LayerInputs(1, q_after, k, k, q_before, k, Angles(flat, flat), Scoring(1.0))
    visited = kmeans.visit(x, Probes(2), Buckets(lambda: torch.zeros(2, 3, 7)))
    assert torch.equal(visited.long(), expected.topk(2).indices.sort(-1).values)
    head_expected = torch.stack(
        [queries[:, h] @ centroids[0, h // 2].double().T for h in range(6)], dim=1
    )
    torch.testing.assert_close(
        kmeans.head_scores(1, q_before, q_after).double(), head_expected, rtol=0, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"layer=2: this router holds layers \[1, 4\]"):
        kmeans.scores(2, q_before, q_after)


def test_fit_uses_all_points_and_normalizes_keys() -> None:
    points = blobs(heads=1, num_points=2000)
    cfg = KMeansConfig(num_buckets=4, iterations=3, normalize_keys=True)
    centroids, (stats,) = fit_centroids(points, cfg, device=CPU, seed=0)
    assert centroids.shape == (1, 4, 16)
    assert stats["points"] == 2000  # 500 per bucket, where Faiss uses 256 by default
    assert 0 < stats["objective"] <= 1

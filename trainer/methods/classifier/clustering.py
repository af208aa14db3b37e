"""Spherical k-means of the keys of one layer (SAAP, arXiv 2502.08246, sections 3 and 4).

There are two engines: :func:`batched_kmeans` clusters all heads at once through
:mod:`msattn.kernels.nearest_centroid`; :func:`faiss_kmeans` clusters them one after another.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from msattn.kernels.nearest_centroid import bucket_sums, nearest_centroid
from msattn.trainer.config import KMeansConfig
from msattn.trainer.errors import UserError

# relative distance by which the two centroids move apart when a full bucket is split
SPLIT_EPS = 1 / 1024


def batched_kmeans(
    points: Tensor, num_buckets: int, iterations: int, seed: int, *, balance: float | None = None
) -> Tensor:
    """Runs spherical k-means on ``H`` point sets at once, with the algorithm of
    ``faiss.Kmeans(spherical=True)``.

    ``points [H, n, D]``, ``n >= num_buckets``, are fp32, fp16 or bf16 on any device. The first
    centroids are random points, followed by ``iterations`` Lloyd iterations. Buckets with more than
    ``balance`` times the mean number of points are split during the first half of the iterations;
    the second half adapts the centroids to the new buckets. Returns unit centroids ``[H, C, D]``,
    fp32, bitwise reproducible for a seed on one kind of machine.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(points.shape[1], generator=generator)[:num_buckets].to(points.device)
    centroids = normalize(points[:, first].float(), dim=-1)
    for iteration in range(iterations):
        buckets = nearest_centroid(points[None], centroids).buckets
        sums, counts = (x[0] for x in bucket_sums(points[None], buckets, num_buckets=num_buckets))
        limit = math.inf if balance is None or iteration >= iterations // 2 else balance
        capacity = limit * points.shape[1] / num_buckets
        centroids = normalize(split_fullest(sums, counts, centroids, capacity), dim=-1)
    return centroids


def split_fullest(sums: Tensor, counts: Tensor, centroids: Tensor, capacity: float) -> Tensor:
    """Returns the means ``[H, C, D]`` of the buckets, after splitting the e-th fullest bucket to
    replace the e-th smallest one.

    The number of splits is the number of empty buckets or of buckets with more than ``capacity``
    points, whichever is larger. The points of a replaced bucket go to their next nearest centroid,
    as in ISODATA (Ball & Hall 1965). Empty buckets keep their ``centroids`` if there are more empty
    than full ones. ``sums [H, C, D]`` and ``counts [H, C]`` are the sum and the number of the
    points of each bucket.
    """
    empty = counts == 0
    means = torch.where(empty[..., None], centroids, sums / counts.clamp(min=1)[..., None])
    by_size = counts.argsort(dim=-1, descending=True, stable=True)  # empty buckets are last
    num_buckets = counts.shape[1]
    num_empty, num_over = (which.sum(-1, keepdim=True) for which in (empty, counts > capacity))
    splits = torch.minimum(num_empty, num_buckets - num_empty).maximum(
        num_over.clamp(max=num_buckets // 2)
    )
    donor = torch.arange(num_buckets, device=counts.device) < splits
    ordered = means.gather(1, by_size[..., None].expand_as(means))
    # the e-th bucket from the end takes the other half of the e-th fullest
    receiver = donor.flip(-1)
    sign = torch.where(
        torch.arange(means.shape[2], device=means.device) % 2 == 0, SPLIT_EPS, -SPLIT_EPS
    )
    moved = torch.where(donor[..., None], ordered * (1 + sign), ordered)
    moved = torch.where(receiver[..., None], ordered.flip(1) * (1 - sign), moved)
    return torch.empty_like(means).scatter_(1, by_size[..., None].expand_as(means), moved)


def faiss_kmeans(
    points: Tensor,
    num_buckets: int,
    iterations: int,
    seed: int,
    advance: Callable[[int], object] = lambda heads: None,
) -> Tensor:
    """Runs the spherical k-means of Faiss on ``points [H, n, D]``, one head after another.

    Uses the GPU of ``points`` if the installed Faiss supports GPUs. ``advance(1)`` is called after
    each head. Returns unit centroids ``[H, C, D]``, fp32. Raises UserError: Faiss is not installed.
    """
    faiss = require_faiss(points.device)
    _, num_points, size = points.shape
    settings = faiss.ClusteringParameters()
    # Faiss takes a signed int
    settings.niter, settings.seed, settings.spherical = iterations, seed % 2**31, True
    settings.min_points_per_centroid = 1
    # Faiss would silently keep 256
    settings.max_points_per_centroid = math.ceil(num_points / num_buckets)
    index, result = flat_index(faiss, size, points.device), []
    for head in points:
        clustering = faiss.Clustering(size, num_buckets, settings)
        clustering.train(head.float().cpu().numpy(), index)
        of_head = faiss.vector_float_to_array(clustering.centroids).reshape(num_buckets, size)
        result.append(torch.from_numpy(of_head).to(points.device))
        advance(1)
    centroids = torch.stack(result)
    # Faiss returns the points as they are
    return centroids if num_points > num_buckets else normalize(centroids, dim=-1)


def flat_index(faiss: Any, size: int, device: torch.device) -> Any:
    """Returns an index for products of vectors of ``size``, on the GPU ``device`` if this build of
    Faiss supports GPUs.
    """
    index = faiss.IndexFlatIP(size)
    if device.type != "cuda" or not faiss.get_num_gpus():
        return index
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device.index or 0, index)


def require_faiss(device: torch.device) -> Any:
    """Returns the ``faiss`` module; UserError with the extra for ``device`` and the other engine if
    it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        extra, chosen = (
            ("gpu", "") if device.type == "cuda" else ("cpu", " (the choice of auto on a CPU)")
        )
        raise UserError(
            f"kmeans.engine=faiss{chosen}: Faiss is not installed; pip install 'msattn[{extra}]', "
            f"or use kmeans.engine=batched"
        ) from error
    return faiss


def resolve_engine(cfg: KMeansConfig, device: torch.device) -> str:
    """Returns ``cfg.engine``; ``auto`` means ``batched`` on CUDA and for balanced buckets,
    otherwise ``faiss``.

    Raises UserError: the engine is Faiss and it is not installed.
    """
    engine = cfg.engine
    if engine == "auto":
        engine = "batched" if device.type == "cuda" or cfg.balance is not None else "faiss"
    if engine == "faiss":
        require_faiss(device)
    return engine


def fit_centroids(
    points: Tensor,
    cfg: KMeansConfig,
    *,
    device: torch.device,
    seed: int,
    advance: Callable[[int], object] = lambda heads: None,
) -> tuple[Tensor, list[dict[str, float]]]:
    """Clusters ``points [H, n, D]``, ``n >= cfg.num_buckets``, on ``device``.

    Returns the centroids, fp32 ``[H, C, D]`` on the CPU, and :func:`partition_stats` of each head.
    ``advance`` is called with the number of heads that were clustered since the previous call.
    Raises UserError if some points are not finite, or the engine is Faiss and it is not installed.
    """
    engine = resolve_engine(cfg, device)
    points = points.to(device)
    if not points.isfinite().all():
        name = str(points.dtype).removeprefix("torch.")
        raise UserError(
            f"dtype={name}: some of the model's keys are not finite; use a larger dtype, such as "
            f"float32"
        )
    if cfg.normalize_keys:
        points = normalize(points.float(), dim=-1).to(points.dtype)
    if engine == "faiss":
        centroids = faiss_kmeans(points, cfg.num_buckets, cfg.iterations, seed, advance)
    else:
        centroids = batched_kmeans(
            points, cfg.num_buckets, cfg.iterations, seed, balance=cfg.balance
        )
        advance(len(points))
    return centroids.cpu(), partition_stats(points, centroids)


def clustering_seconds(points: Tensor, cfg: KMeansConfig, num_points: int) -> float:
    """Returns about how long a head with ``num_points`` takes, from one iteration over its
    ``points [1, n, D]`` on the CPU.
    """
    began = time.perf_counter()
    fit_centroids(points, replace(cfg, iterations=1), device=points.device, seed=0)
    passes = time.perf_counter() - began  # two: an iteration, and the statistics
    return passes / 2 * (cfg.iterations + 1) * num_points / points.shape[1]


def partition_stats(points: Tensor, centroids: Tensor) -> list[dict[str, float]]:
    """Returns the number of points, objective, number of empty buckets and imbalance factor of each
    head.

    The objective is the mean product of a point and its centroid. The imbalance factor
    ``C sum_c n_c^2 / n^2`` is the expected size of a visited bucket relative to equal buckets, 1 at
    best.
    """
    buckets, products = (x[0] for x in nearest_centroid(points[None], centroids))
    (heads, num_buckets, _), num_points = centroids.shape, points.shape[1]
    flat = buckets + num_buckets * torch.arange(heads, device=buckets.device)[:, None]
    sizes = (
        torch.bincount(flat.flatten(), minlength=heads * num_buckets)
        .view(heads, num_buckets)
        .double()
    )
    objective = products.mean(1, dtype=torch.float64).tolist()
    imbalance = (num_buckets * (sizes**2).sum(1) / num_points**2).tolist()
    empty = (sizes == 0).sum(1).tolist()
    return [
        {
            "points": num_points,
            "objective": objective[h],
            "empty_buckets": empty[h],
            "imbalance": imbalance[h],
        }
        for h in range(heads)
    ]


def mean_stats(layers: list[list[dict[str, float]]]) -> dict[str, float]:
    """Averages :func:`partition_stats` over all heads of the given layers."""
    heads = [head for layer in layers for head in layer]
    return {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}

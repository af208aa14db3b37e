"""Spherical k-means of the keys of one layer (SAAP, arXiv 2502.08246, sections 3 and 4).

There are two engines: :func:`batched_kmeans` clusters all heads at once through :mod:`msattn.kernels.nearest_centroid`;
:func:`faiss_kmeans` clusters them one after another.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from msattn.kernels.nearest_centroid import bucket_sums, nearest_centroid
from msattn.trainer.config import KMeansConfig
from msattn.trainer.errors import UserError

SPLIT_EPS = 1 / 1024  # relative distance by which the two centroids move apart when a full bucket is split


def batched_kmeans(points: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """Runs spherical k-means on ``H`` point sets at once, with the algorithm of ``faiss.Kmeans(spherical=True)``.

    Parameters
    ----------
    points : Tensor
        ``[H, n, D]``, fp32, fp16 or bf16, on any device, ``n >= num_buckets``.
    num_buckets, iterations, seed : int
        Random points are the first centroids, followed by ``iterations`` Lloyd iterations.

    Returns
    -------
    Tensor : unit centroids ``[H, C, D]``, fp32. Bitwise reproducible for a seed on one kind of machine.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(points.shape[1], generator=generator)[:num_buckets].to(points.device)
    centroids = normalize(points[:, first].float(), dim=-1)
    for _ in range(iterations):
        buckets = nearest_centroid(points[None], centroids).buckets
        sums, counts = (x[0] for x in bucket_sums(points[None], buckets, num_buckets=num_buckets))
        centroids = normalize(split_empty(sums, counts, centroids), dim=-1)
    return centroids


def split_empty(sums: Tensor, counts: Tensor, centroids: Tensor) -> Tensor:
    """Returns the means ``[H, C, D]`` of the buckets, where the e-th fullest bucket is split to fill the e-th empty one.

    Empty buckets keep their ``centroids`` if there are more of them than full ones.

    Parameters
    ----------
    sums, counts : ``[H, C, D]`` and ``[H, C]``, sum and number of the points of each bucket.
    """
    empty = counts == 0
    means = torch.where(empty[..., None], centroids, sums / counts.clamp(min=1)[..., None])
    by_size = counts.argsort(dim=-1, descending=True, stable=True)  # empty buckets are last
    num_empty = empty.sum(-1, keepdim=True)
    rank = torch.arange(counts.shape[1], device=counts.device)
    donor = rank < torch.minimum(num_empty, counts.shape[1] - num_empty)
    ordered = means.gather(1, by_size[..., None].expand_as(means))
    receiver = donor.flip(-1)  # the e-th bucket from the end, an empty one, takes the other half of the e-th fullest
    sign = torch.where(torch.arange(means.shape[2], device=means.device) % 2 == 0, SPLIT_EPS, -SPLIT_EPS)
    moved = torch.where(donor[..., None], ordered * (1 + sign), ordered)
    moved = torch.where(receiver[..., None], ordered.flip(1) * (1 - sign), moved)
    return torch.empty_like(means).scatter_(1, by_size[..., None].expand_as(means), moved)


def faiss_kmeans(
    points: Tensor, num_buckets: int, iterations: int, seed: int, advance: Callable[[int], object] = lambda heads: None
) -> Tensor:
    """Runs the spherical k-means of Faiss on ``points [H, n, D]``, one head after another.

    Uses the GPU of ``points`` if the installed Faiss supports GPUs. ``advance(1)`` is called after each head.

    Returns
    -------
    Tensor : unit centroids ``[H, C, D]``, fp32.

    Raises
    ------
    UserError : Faiss is not installed.
    """
    faiss = require_faiss()
    _, num_points, size = points.shape
    settings = faiss.ClusteringParameters()
    settings.niter, settings.seed, settings.spherical = iterations, seed % 2**31, True  # Faiss takes a signed int
    settings.min_points_per_centroid = 1
    settings.max_points_per_centroid = math.ceil(num_points / num_buckets)  # Faiss would silently keep 256
    result = []
    for head in points:
        index = faiss.IndexFlatIP(size)
        if points.is_cuda and faiss.get_num_gpus():
            index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), points.device.index or 0, index)
        clustering = faiss.Clustering(size, num_buckets, settings)
        clustering.train(head.float().cpu().numpy(), index)
        centroids = faiss.vector_float_to_array(clustering.centroids).reshape(num_buckets, size)
        result.append(torch.from_numpy(centroids).to(points.device))
        advance(1)
    return torch.stack(result)


def require_faiss() -> Any:
    """Returns the ``faiss`` module; UserError with the alternatives if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "kmeans.engine=faiss (the choice of auto on a CPU): Faiss is not installed; pip install 'msattn[cpu]', or use "
            "kmeans.engine=batched"
        ) from error
    return faiss


def resolve_engine(engine: str, device: torch.device) -> str:
    """Returns the engine that ``auto`` stands for: ``batched`` on CUDA, else ``faiss``; UserError if it is not installed."""
    if engine == "auto":
        engine = "batched" if device.type == "cuda" else "faiss"
    if engine == "faiss":
        require_faiss()
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

    ``advance`` is called with the number of heads that were clustered since the previous call.

    Returns
    -------
    centroids : fp32 ``[H, C, D]``, on the CPU.
    stats : :func:`partition_stats` of each head.

    Raises
    ------
    UserError : some points are not finite, or the engine is Faiss and it is not installed.
    """
    engine = resolve_engine(cfg.engine, device)
    points = points.to(device)
    if not points.isfinite().all():
        name = str(points.dtype).removeprefix("torch.")
        raise UserError(f"dtype={name}: some of the model's keys are not finite; use a larger dtype, such as float32")
    if cfg.normalize_keys:
        points = normalize(points.float(), dim=-1).to(points.dtype)
    if engine == "faiss":
        centroids = faiss_kmeans(points, cfg.num_buckets, cfg.iterations, seed, advance)
    else:
        centroids = batched_kmeans(points, cfg.num_buckets, cfg.iterations, seed)
        advance(len(points))
    return centroids.cpu(), partition_stats(points, centroids)


def partition_stats(points: Tensor, centroids: Tensor) -> list[dict[str, float]]:
    """Returns the number of points, objective, number of empty buckets and imbalance factor of each head.

    The objective is the mean product of a point and its centroid. The imbalance factor ``C sum_c n_c^2 / n^2`` is the expected
    size of a visited bucket relative to equal buckets, 1 at best.
    """
    buckets, products = (x[0] for x in nearest_centroid(points[None], centroids))
    (heads, num_buckets, _), num_points = centroids.shape, points.shape[1]
    flat = buckets + num_buckets * torch.arange(heads, device=buckets.device)[:, None]
    sizes = torch.bincount(flat.flatten(), minlength=heads * num_buckets).view(heads, num_buckets).double()
    objective = products.mean(1, dtype=torch.float64).tolist()
    imbalance = (num_buckets * (sizes**2).sum(1) / num_points**2).tolist()
    empty = (sizes == 0).sum(1).tolist()
    return [
        {"points": num_points, "objective": objective[h], "empty_buckets": empty[h], "imbalance": imbalance[h]}
        for h in range(heads)
    ]


def mean_stats(layers: list[list[dict[str, float]]]) -> dict[str, float]:
    """Averages :func:`partition_stats` over all heads of the given layers."""
    heads = [head for layer in layers for head in layer]
    return {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}

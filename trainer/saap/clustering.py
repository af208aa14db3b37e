"""Spherical k-means of the keys of one layer (SAAP, arXiv 2502.08246, sections 3 and 4).

Two engines: :func:`batched_kmeans`, all heads at once through :mod:`msattn.kernels.nearest_centroid`; Faiss, head after head.
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

SPLIT_EPS = 1 / 1024  # an empty bucket takes half of a full one: both centroids move apart by this share


def batched_kmeans(points: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """Spherical k-means of ``H`` point sets at once, as ``faiss.Kmeans(spherical=True)`` does each of them.

    Parameters
    ----------
    points : Tensor
        ``[H, n, D]``, fp32, fp16 or bf16, on any device, ``n >= num_buckets``.
    num_buckets, iterations, seed : int
        Random points are the first centroids; then ``iterations`` of assigning and averaging.

    Returns
    -------
    Tensor : unit centroids ``[H, C, D]``, fp32; on one kind of machine bitwise the same for a seed.
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
    """Means ``[H, C, D]`` of the buckets; the e-th empty bucket and the e-th fullest share the latter's members.

    ``sums [H, C, D]``, ``counts [H, C]``. ``centroids`` stay where there is no full bucket left to share.
    """
    empty = counts == 0
    means = torch.where(empty[..., None], centroids, sums / counts.clamp(min=1)[..., None])
    by_size = counts.argsort(dim=-1, descending=True, stable=True)  # the empty ones come last
    num_empty = empty.sum(-1, keepdim=True)
    rank = torch.arange(counts.shape[1], device=counts.device)
    donor = rank < torch.minimum(num_empty, counts.shape[1] - num_empty)
    ordered = means.gather(1, by_size[..., None].expand_as(means))
    taker = donor.flip(-1)  # the e-th fullest gives to the e-th from the end
    sign = torch.where(torch.arange(means.shape[2], device=means.device) % 2 == 0, SPLIT_EPS, -SPLIT_EPS)
    moved = torch.where(donor[..., None], ordered * (1 + sign), ordered)
    moved = torch.where(taker[..., None], ordered.flip(1) * (1 - sign), moved)
    return torch.empty_like(means).scatter_(1, by_size[..., None].expand_as(means), moved)


def faiss_kmeans(
    points: Tensor, num_buckets: int, iterations: int, seed: int, advance: Callable[[int], object] = lambda heads: None
) -> Tensor:
    """The reference: Faiss, head after head; on the GPU that ``points [H, n, D]`` are on, if the installed Faiss has GPUs.

    Returns unit centroids ``[H, C, D]``, fp32. ``advance(1)`` is called after each head. UserError when Faiss is not installed.
    """
    faiss = require_faiss()
    _, num_points, size = points.shape
    settings = faiss.ClusteringParameters()
    settings.niter, settings.seed, settings.spherical = iterations, seed, True
    settings.min_points_per_centroid = 1
    settings.max_points_per_centroid = math.ceil(num_points / num_buckets)  # Faiss would keep 256 without a word
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
    """The module, or UserError with the ways out."""
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "kmeans.engine=faiss (which auto is on a CPU): Faiss is not installed; pip install 'msattn[cpu]', or "
            "kmeans.engine=batched"
        ) from error
    return faiss


def resolve_engine(engine: str, device: torch.device) -> str:
    """``auto`` is ``batched`` on CUDA, ``faiss`` elsewhere; UserError for a Faiss that is not installed."""
    if engine == "auto":
        engine = "batched" if device.type == "cuda" else "faiss"
    if engine == "faiss":
        require_faiss()
    return engine


def fit_points(
    points: Tensor,
    cfg: KMeansConfig,
    *,
    device: torch.device,
    seed: int,
    advance: Callable[[int], object] = lambda heads: None,
) -> tuple[Tensor, list[dict[str, float]]]:
    """Centroids ``[H, C, D]`` (on the CPU) of ``points [H, n, D]``, and for each head what :func:`partition_stats` says.

    ``n >= cfg.num_buckets``. ``advance`` is called with numbers of heads that are done. UserError: points that are not finite,
    no Faiss where it is to fit.
    """
    engine = resolve_engine(cfg.engine, device)
    points = points.to(device)
    if not points.isfinite().all():
        name = str(points.dtype).removeprefix("torch.")
        raise UserError(f"dtype={name}: some of the model's keys are not finite; accepted is one that holds them, as float32")
    if cfg.normalize_keys:
        points = normalize(points.float(), dim=-1).to(points.dtype)
    if engine == "faiss":
        centroids = faiss_kmeans(points, cfg.num_buckets, cfg.iterations, seed, advance)
    else:
        centroids = batched_kmeans(points, cfg.num_buckets, cfg.iterations, seed)
        advance(len(points))
    return centroids.cpu(), partition_stats(points, centroids)


def partition_stats(points: Tensor, centroids: Tensor) -> list[dict[str, float]]:
    """For each head: points used, objective, empty buckets, imbalance factor.

    The objective is the mean product of a point and its centroid. The imbalance factor is ``C sum_c n_c^2 / n^2``: how many
    times more points a visit meets than with equal buckets, 1 at best.
    """
    buckets, products = (x[0] for x in nearest_centroid(points[None], centroids))
    (heads, num_buckets, _), num_points = centroids.shape, points.shape[1]
    of_all = buckets + num_buckets * torch.arange(heads, device=buckets.device)[:, None]
    sizes = torch.bincount(of_all.flatten(), minlength=heads * num_buckets).view(heads, num_buckets).double()
    objective = products.mean(1, dtype=torch.float64).tolist()
    imbalance = (num_buckets * (sizes**2).sum(1) / num_points**2).tolist()
    empty = (sizes == 0).sum(1).tolist()
    return [
        {"points": num_points, "objective": objective[h], "empty_buckets": empty[h], "imbalance": imbalance[h]}
        for h in range(heads)
    ]


def mean_stats(layers: list[list[dict[str, float]]]) -> dict[str, float]:
    """:func:`partition_stats` averaged over the heads of some layers."""
    heads = [head for layer in layers for head in layer]
    return {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}

"""References of ``nearest_centroid`` and ``bucket_sums``, some keys at a time."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.reference.common import SCORES_AT_ONCE
from msattn.kernels.types import BucketSums, NearestCentroid


def nearest_centroid(k: Tensor, centroids: Tensor) -> NearestCentroid:
    """Reference of :func:`msattn.kernels.nearest_centroid.nearest_centroid`."""
    chunk = max(1, SCORES_AT_ONCE // (k.shape[0] * centroids.shape[0] * centroids.shape[1]))
    best = [(keys.to(centroids.dtype) @ centroids.mT).max(-1) for keys in k.split(chunk, dim=2)]
    buckets, products = (
        torch.cat([getattr(part, name) for part in best], dim=2) for name in ("indices", "values")
    )
    return NearestCentroid(buckets.int(), products)


def bucket_sums(k: Tensor, buckets: Tensor, *, num_buckets: int) -> BucketSums:
    """Reference of :func:`msattn.kernels.nearest_centroid.bucket_sums`."""
    batch, heads, _, head = k.shape
    sums = k.new_zeros((batch * heads * (num_buckets + 1), head), dtype=statistics_dtype(k))
    counts = buckets.new_zeros(len(sums))
    # The last row of a head collects the excluded keys.
    row = torch.where((buckets >= 0) & (buckets < num_buckets), buckets, num_buckets)
    row = row + (num_buckets + 1) * torch.arange(
        batch * heads, device=k.device, dtype=torch.int32
    ).view(batch, heads, 1)
    for keys, rows in zip(
        k.split(SCORES_AT_ONCE // head, dim=2),
        row.split(SCORES_AT_ONCE // head, dim=2),
        strict=True,
    ):
        sums.index_add_(0, rows.flatten(), keys.to(sums.dtype).flatten(0, 2))
        counts.index_add_(0, rows.flatten(), torch.ones_like(rows).flatten())
    shape = (batch, heads, num_buckets + 1)
    return BucketSums(
        sums.view(*shape, head)[:, :, :-1].contiguous(), counts.view(shape)[:, :, :-1].contiguous()
    )

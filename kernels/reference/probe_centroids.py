"""Reference of ``probe_centroids``."""

import torch
from torch import Tensor

from msattn.kernels.types import NearestCentroid


def probe_centroids(x: Tensor, centroids: Tensor, *, probes: int) -> NearestCentroid:
    """Reference of :func:`msattn.kernels.probe_centroids.probe_centroids`."""
    sums = x.to(centroids.dtype).unflatten(1, (len(centroids), -1)).sum(2)
    # a product that broadcasts would copy the centroids for each sequence
    scores = torch.einsum("bhnd,hcd->bhnc", sums, centroids)
    best = (
        scores.argmax(-1, keepdim=True)  # of equal ones the first
        if probes == 1
        else scores.topk(probes, dim=-1).indices.sort(-1).values
    )
    return NearestCentroid(best.int(), scores.gather(-1, best))

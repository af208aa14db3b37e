"""Density of buckets: the predicted attention of one of their keys, as a multiple of that of the
mean key.
"""

import torch
from torch import Tensor

# lower limit for the sum of a row's scores: rows of zeros get densities of 0 instead of NaN
SMALLEST_SUM = 1e-30


def bucket_densities(scores: Tensor, sizes: Tensor) -> Tensor:
    """Returns the predicted attention of a bucket's keys, as a multiple of that of the mean key:
    ``[..., C]``.

    ``scores [..., C]`` are probabilities up to a factor of each row, ``sizes [..., C]`` the numbers
    of keys. An empty bucket has density 0, as have all buckets of a row of zeros.
    """
    per_key = torch.where(sizes > 0, scores / sizes.clamp(min=1), 0)
    return per_key * (
        sizes.sum(-1, keepdim=True) / scores.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    )


def dense_buckets(densities: Tensor, threshold: float, most: int) -> Tensor:
    """Returns the buckets whose density reaches ``threshold``, at most the ``most`` densest: int32
    ``[..., min(most, C)]``.

    Free places hold -1.
    """
    densest = densities.topk(min(most, densities.shape[-1]), dim=-1, sorted=False)
    return densest.indices.masked_fill(densest.values < threshold, -1).to(torch.int32)

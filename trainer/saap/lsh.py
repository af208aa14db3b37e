"""Buckets by locality-sensitive hashing: the signs of random projections (SimHash, Charikar 2002)."""

import torch
from torch import Tensor

from msattn.trainer.saap.kmeans import KMeans


def sign_buckets(num_buckets: int, layers: list[int], kv_heads: int, head_dim: int, seed: int = 0) -> KMeans:
    """Returns a partition of the keys after RoPE by the signs of their products with orthogonal random vectors.

    The bucket of a key is the number whose bit i is set if product i is positive. Among the sums of the vectors with all signs,
    the one with these signs is the nearest, so the partition is a :class:`~msattn.trainer.saap.kmeans.KMeans` with the sums as
    centroids. A query visits the buckets in the order of its products with the centroids: multi-probe LSH with one table.

    Parameters
    ----------
    num_buckets : largest number of buckets; the result has the largest power of two up to it, and up to ``2 ** head_dim``.
    layers : indices of the routed layers. Each layer and key/value head has vectors of its own.
    kv_heads, head_dim : shape of the model's keys.
    seed : of the vectors.
    """
    bits = min(num_buckets.bit_length() - 1, head_dim)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(len(layers), kv_heads, head_dim, max(bits, 1), generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(normal).Q[..., :bits].mT  # [layers, Hkv, bits, D], orthonormal
    centroids = sign_patterns(bits) @ vectors / max(bits, 1) ** 0.5
    return KMeans(centroids.float(), layers, rope=True)


def sign_patterns(bits: int) -> Tensor:
    """Returns +1 or -1 for each bit of each number below ``2 ** bits``: fp64 ``[2 ** bits, bits]``."""
    numbers = torch.arange(2**bits)[:, None]
    return ((numbers >> torch.arange(bits)) & 1).double() * 2 - 1

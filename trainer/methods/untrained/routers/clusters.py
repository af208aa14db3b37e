"""Clusters of a sequence's own keys, which queries choose by the mean keys (ClusterKV, RetroInfer);
needs no training.
"""

import torch
from torch import Tensor

from msattn.kernels.nearest_centroid import bucket_sums
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.buckets import Buckets, bucket_sizes, queries_at
from msattn.trainer.methods.budgets import Budget
from msattn.trainer.methods.key_blocks import NOT_FAR, block_products
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.models.layer_attention import LayerInputs

SEGMENT = 1024  # keys that are clustered together; the cost of a key is proportional to it
ITERATIONS = 2


class KeyClusters(UntrainedBlocks):
    """Visits the clusters with the largest predicted attention to a key, summed over the query
    group.

    Keys after RoPE are clustered with k-means in segments of the sequence, so that clusters do not
    change when keys follow.
    The predicted attention to a key is that of the mean key of its cluster.
    """

    method = Method("key clusters", style={"color": "#8C564B", "marker": "D"})
    grouping = "clusters"
    block_size = 8  # mean number of keys of a cluster

    def cluster(self, k: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clusters keys after RoPE ``k [B, Hkv, N, D]``, of which those before ``start [B]`` are
        padding.

        Returns the cluster of each key, int32 ``[B, Hkv, N]``, -1 for padding, and their means
        ``[B, Hkv, P, D]``. A row does not depend on its padding.
        """
        position = torch.arange(k.shape[2], device=k.device)
        first = (
            torch.zeros(len(k), 1, dtype=torch.long, device=k.device)
            if start is None
            else start[:, None].long()
        )
        # int64 [B, N]: rows begin with their first key
        source = (position + first).clamp(max=k.shape[2] - 1)
        is_key = (position + first < k.shape[2])[:, None].expand(*k.shape[:3])
        keys = k if start is None else k.gather(2, source[:, None, :, None].expand_as(k))
        numbers, means, count = [], [], 0
        for segment, real in zip(keys.split(SEGMENT, 2), is_key.split(SEGMENT, 2), strict=True):
            nearest, centers = _k_means(segment, real, self.block_size)
            numbers.append(torch.where(nearest < 0, -1, nearest + count))
            means.append(centers.to(k.dtype))
            count += centers.shape[2]
        clusters = torch.cat(numbers, 2)
        if start is not None:
            back = (position - first)[:, None].expand(*k.shape[:3])
            clusters = clusters.gather(2, back.clamp(min=0)).masked_fill(back < 0, -1)
        return clusters, torch.cat(means, 2)

    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        if (means := buckets.summaries) is None:
            return super().visit(x, budget, buckets, by_head=by_head)
        return self.choose(self._densities(x, x.q, means, buckets.sizes(), by_head), budget)

    def buckets_of_keys(self, x: LayerInputs) -> tuple[Tensor, int]:
        clusters, means = self.cluster(x.k)
        return clusters, means.shape[2]

    def scores_at(
        self, x: LayerInputs, positions: Tensor, recent: int, *, by_head: bool = False
    ) -> Tensor:
        """Returns the scores of queries of a whole text; the means of a query's last segment are
        those of later keys, too.
        """
        clusters, means = self.cluster(x.k)
        far = bucket_sizes(clusters[0], positions - recent, means.shape[2])
        return self._densities(x, queries_at(x, positions)[1], means, far, by_head)

    def _densities(
        self, x: LayerInputs, q: Tensor, means: Tensor, sizes: Tensor, by_head: bool
    ) -> Tensor:
        """Returns the predicted attention to a key of each cluster, fp32 ``[B, Hkv, P]`` or
        ``[B, Hq, P]`` with ``by_head``.

        ``sizes [B, Hkv, P]`` are the numbers of keys in the clusters; empty ones are ``NOT_FAR``,
        whatever their ``means``.
        """
        # [B, Hkv, group, D]
        queries = q[:, :, -1].unflatten(1, (self.kv_heads, -1)).to(means.dtype)
        logits, empty = x.capped(block_products(queries, means) * x.scale), (sizes == 0)[:, :, None]
        mass = (logits + sizes[:, :, None].log()).masked_fill(empty, NOT_FAR).softmax(-1)
        density = (mass / sizes[:, :, None]).masked_fill(empty, NOT_FAR)
        return density.flatten(1, 2) if by_head else density.sum(2)


def _k_means(keys: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Clusters the ``real`` ones (bool ``[B, Hkv, N]``) of ``keys [B, Hkv, N, D]``, one cluster for
    ``size`` keys.

    Returns the cluster of each key, int32 ``[B, Hkv, N]``, -1 for others, and the means
    ``[B, Hkv, P, D]``. Every ``size``-th key is a first mean.
    """
    points = keys.to(torch.promote_types(keys.dtype, torch.float32))
    means, unused = points[:, :, ::size], ~real[:, :, None, ::size]
    nearest = real.int()
    for _ in range(ITERATIONS):
        # The nearest mean has the largest product less half its squared norm.
        half_norms = means.square().sum(-1)[:, :, None] / 2
        nearest = (points @ means.mT - half_norms).masked_fill(unused, NOT_FAR).argmax(-1)
        nearest = nearest.masked_fill(~real, -1).int()
        sums, counts = bucket_sums(points, nearest, num_buckets=means.shape[2])
        means = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp(min=1), means)
    return nearest, means


router = KeyClusters

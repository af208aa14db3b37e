"""The partition of the keys that SAAP routes over: what holds and serves it, and the job that makes it (arXiv 2502.08246).

Keys are taken before RoPE, a partition for each layer and key/value head; position 0, the attention sink, is left out. Under
``torchrun`` layers are shared out among the processes, and end the same as in one.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from msattn.kernels.nearest_centroid import nearest_centroid
from msattn.trainer import artifacts
from msattn.trainer.saap.index import slot_of, top_buckets

if TYPE_CHECKING:
    pass


class KMeans(nn.Module):
    """Centroids of each layer and key/value head; a training-free :class:`~msattn.trainer.saap.index.Router`.

    Parameters
    ----------
    centroids : Tensor
        fp32 ``[layers, Hkv, C, D]``, of unit length.
    layers : list of int
        The model's layers, in the order of ``centroids``.
    rope : bool
        Keys and queries are taken after RoPE (the baseline) instead of before.

    Attributes
    ----------
    artifact : Artifact or None
        What it was loaded from.
    """

    centroids: Tensor

    def __init__(self, centroids: Tensor, layers: list[int], rope: bool = False) -> None:
        super().__init__()
        self.register_buffer("centroids", centroids)
        self.layers = list(layers)
        self.rope = rope
        self.num_buckets = centroids.shape[2]
        self.artifact: artifacts.Artifact | None = None

    @classmethod
    def load(cls, path: str | Path) -> "KMeans":
        """The k-means artifact in a folder or on the Hub; UserError when it is missing, damaged or of another kind."""
        artifact = artifacts.read(path, kind="kmeans")
        details = artifact.manifest["details"]
        kmeans = cls(artifact.tensors["centroids"], details["layers"], details["rope"])
        kmeans.artifact = artifact
        return kmeans

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """The nearest centroid of each key: int32 ``[B, Hkv, N]`` for keys ``[B, Hkv, N, D]`` before and after RoPE."""
        keys = k if self.rope else k_nope
        if keys.shape[2] == 1:  # a decoded token: splitting the centroids would cost the operator more than its product
            return self._products(layer, keys).argmax(-1).to(torch.int32)
        return nearest_centroid(keys, self.centroids[slot_of(self.layers, layer)]).buckets

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Products of one token's queries ``[B, Hq, 1, D]`` and the centroids, summed over the query group: ``[B, Hkv, C]``."""
        return self.head_scores(layer, q_nope, q).unflatten(1, (self.centroids.shape[1], -1)).sum(2)

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Products of one token's queries ``[B, Hq, 1, D]`` and the centroids, each query's own: ``[B, Hq, C]``."""
        queries = (q if self.rope else q_nope)[:, :, -1].unflatten(1, (self.centroids.shape[1], -1))  # [B, Hkv, group, D]
        return self._products(layer, queries).flatten(1, 2)

    def probe(self, layer: int, q_nope: Tensor, q: Tensor, probes: int) -> Tensor:
        """The buckets with the highest :meth:`scores`: int32 ``[B, Hkv, probes]``."""
        return top_buckets(self.scores(layer, q_nope, q), probes)

    def _products(self, layer: int, rows: Tensor) -> Tensor:
        """Of ``rows [B, Hkv, n, D]`` and their head's centroids: fp32 ``[B, Hkv, n, C]``."""
        centroids = self.centroids[slot_of(self.layers, layer)]
        by_head = rows.transpose(0, 1).flatten(1, 2).to(centroids.dtype)  # a broadcast product would copy centroids B times
        return (by_head @ centroids.mT).unflatten(1, (len(rows), -1)).transpose(0, 1)

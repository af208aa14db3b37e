"""The k-means partition of the keys, which routes queries by their products with the centroids
(SAAP, arXiv 2502.08246).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.nearest_centroid import nearest_centroid
from msattn.kernels.probe_centroids import probe_centroids
from msattn.trainer import artifacts
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.buckets import (
    BucketRouter,
    Buckets,
    Router,
    RouterDetails,
    layer_index,
)
from msattn.trainer.methods.budgets import Budget, Probes
from msattn.trainer.models.families import check_shape, num_layers
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.storage.documents import checked

FEW_KEYS = 64  # keys of a sequence, or of all decoded tokens in a pass over pages


class KMeans(BucketRouter, artifacts.ArtifactModule):
    """Centroids of each layer and key/value head, which route by themselves.

    Parameters
    ----------
    centroids : fp32 ``[layers, Hkv, C, D]``, of unit length.
    layers : the model's layers, in the order of ``centroids``.
    rope : keys and queries are taken after RoPE (the baseline) instead of before.
    """

    centroids: Tensor

    method = Method("k-means", style={"color": "#CC79A7", "marker": "P"})

    def __init__(self, centroids: Tensor, layers: list[int], rope: bool = False) -> None:
        super().__init__()
        self.register_buffer("centroids", centroids)
        self.layers = list(layers)
        self.rope = rope
        self.kv_heads, self.num_buckets = centroids.shape[1:3]

    @classmethod
    def load(cls, path: str | Path) -> "KMeans":
        """Loads a k-means artifact from a folder or a Hub id; UserError if it is missing, damaged
        or of another kind.
        """
        artifact = artifacts.read(path, kind="kmeans")
        details, centroids = router_details(artifact, "centroids")
        artifacts.check_tensors(artifact, {"centroids": centroids})
        kmeans = cls(artifact.tensors["centroids"], details.layers, details.rope)
        kmeans.artifact = artifact
        return kmeans

    def shard(self, part: ModelShard) -> "KMeans":
        """Returns the partition of the layers and heads of a rank."""
        centroids = part.of(self.centroids[part.rows(self.layers)], 1)
        own = KMeans(centroids, part.own(self.layers), self.rope)
        own.artifact = self.artifact
        return own

    def assigns_like(self, other: Router) -> bool:
        same_kind = isinstance(other, KMeans) and self.rope == other.rope
        return self is other or (same_kind and torch.equal(self.centroids, other.centroids))

    def check_model(self, config: Any) -> None:
        layers, centroids = self.layers, self.centroids
        require(
            centroids.ndim == 4 and centroids.numel() > 0 and centroids.dtype == torch.float32,
            "qmodel.centroids",
            f"{centroids.dtype} {list(centroids.shape)}",
            "expected float32 [layers, key/value heads, buckets, size], none of them 0",
        )
        number = num_layers(config)
        fits = len(layers) == len(centroids) == len({*layers} & {*range(number)})
        require(
            fits,
            "qmodel.layers",
            layers,
            f"expected {len(centroids)} different layers from 0 to {number - 1}",
        )
        check_shape(
            "qmodel", {"num_kv_heads": centroids.shape[1], "head_dim": centroids.shape[3]}, config
        )
        super().check_model(config)

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Returns the nearest centroid of each key."""
        keys, centroids = k if self.rope else k_nope, self._centroids(layer)
        if keys.shape[2] <= FEW_KEYS:  # decoded tokens
            return probe_centroids(keys, centroids, probes=1).buckets.squeeze(-1)
        return nearest_centroid(keys, centroids).buckets

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns the products of queries and centroids."""
        # [B, Hkv, group, D]
        queries = (q if self.rope else q_nope)[:, :, -1].unflatten(1, (self.kv_heads, -1))
        centroids = self._centroids(layer)
        return torch.einsum("bhgd,hcd->bhgc", queries.to(centroids.dtype), centroids).flatten(1, 2)

    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        if by_head or not isinstance(budget, Probes):
            return super().visit(x, budget, buckets, window=window, by_head=by_head)
        queries = (x.q if self.rope else x.q_nope)[:, :, -1:]
        return probe_centroids(
            queries, self._centroids(x.layer), probes=budget.most
        ).buckets.squeeze(2)

    def _centroids(self, layer: int) -> Tensor:
        return self.centroids[layer_index(self.layers, layer)]


def router_details(
    artifact: artifacts.Artifact, name: str
) -> tuple[RouterDetails, tuple[int, ...]]:
    """Returns the checked details of a router's artifact, and the shape of its centroids, the
    tensor ``name``.

    Raises UserError for an entry with a wrong type, or one that contradicts the model that the
    artifact was made for.
    """
    where = f"artifact {artifact.path}"
    details = checked(artifact.manifest["details"], RouterDetails, f"{where}: details")
    model, centroids = artifact.manifest["model"], artifact.tensors.get(name)
    if details.layers[-1] >= model["num_layers"]:
        raise UserError(
            f"{where}: details.layers={details.layers}: the model has {model['num_layers']} layers"
        )
    if centroids is None or centroids.ndim != 4 or not centroids.shape[2]:
        raise UserError(
            f"{where}: expected a tensor {name} [layers, key/value heads, buckets, head size]"
        )
    buckets = centroids.shape[2]
    if (
        details.serving.probes > buckets
        or max(details.serving.dense_layers, default=0) >= model["num_layers"]
    ):
        raise UserError(
            f"{where}: details.serving asks for more than {buckets} buckets or "
            f"{model['num_layers']} layers"
        )
    return details, (len(details.layers), model["num_kv_heads"], buckets, model["head_dim"])

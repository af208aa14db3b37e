"""Routing: assigns keys to buckets and chooses the buckets that a query reads (SAAP, sections 4 and
5).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from msattn.kernels.common.densities import bucket_densities, dense_buckets
from msattn.kernels.types import BucketIndex
from msattn.trainer.artifacts import Artifact
from msattn.trainer.config.model import ModelPresets
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Method, check_finite
from msattn.trainer.methods.budgets import Budget, KeyShare, KeyThresholds, Probability, Probes
from msattn.trainer.models.families import attention_layers, check_shape, num_layers
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.parallel import ModelShard

MAX_ROUTED_TOKENS = 32  # new tokens of a pass that each read buckets; more are a prompt
PRESETS = ModelPresets()  # for routers whose manifest records nothing

Sizes = Callable[[], Tensor]  # returns the numbers of keys in the buckets, int32 [B, Hkv, C]


class Buckets(NamedTuple):
    """The buckets of a layer's cached keys, of which a router chooses some."""

    sizes: Sizes
    # of blocks [B or 1, Hkv, P, S], with free positions; None if the dense window holds every key
    summaries: Tensor | None = None
    index: BucketIndex | None = None  # of keys in one tensor


class RoutedQueries(NamedTuple):
    """Single queries that read buckets together."""

    x: LayerInputs  # one query in each row
    buckets: Buckets
    window: int | Tensor  # number of last keys that are always read, of all rows or int32 [B]


class Router(nn.Module, ABC):
    """Base class of routers, which score buckets of keys for a query and choose the buckets that it
    reads.

    Buckets are either formed by content, see :class:`BucketRouter`, or blocks of neighboring keys,
    see :class:`~msattn.trainer.methods.key_blocks.BlockRouter`. Queries belong to a single token.
    Serving and evaluation use only these attributes and methods of a router.
    """

    method: ClassVar[Method]
    # what a cache keeps of the keys
    grouping: ClassVar[Literal["buckets", "blocks", "clusters"]] = "buckets"
    # scores are, or become, probabilities, so that shares of keys are calibrated
    predicts_attention: ClassVar[bool] = False
    num_buckets: int  # buckets per key/value head
    block_size: int = 1  # keys of a bucket that are summarized together
    layers: list[int]  # indices of the model's routed layers
    kv_heads: int  # key/value heads of the model
    rope: bool = False  # a variant of the method that uses keys and queries after RoPE
    artifact: Artifact | None = None  # the loaded artifact; None for a newly created router
    # calibrated thresholds of a router that predicts attention
    thresholds: KeyThresholds | None = None
    routing_warning: str | None = None  # shown when the router is served or measured

    @property
    def assigner(self) -> "Router":
        """The router that gives keys their buckets."""
        return self

    def assigns_like(self, other: "Router") -> bool:
        """Returns True if ``other`` assigns each key to the same bucket and summarizes buckets in
        the same way.
        """
        return self is other

    def check_model(self, config: Any) -> None:
        """Raises UserError for a model with another shape or without the routed layers, and for
        weights that are not finite.
        """
        check_shape("qmodel", {"num_kv_heads": self.kv_heads}, config)
        fits = set(self.layers) <= set(range(num_layers(config)))
        require(
            fits,
            "qmodel.layers",
            self.layers,
            f"expected layers from 0 to {num_layers(config) - 1}",
        )
        for layer in attention_layers(config):
            kept = layer.kept is not None and layer.layer in self.layers
            require(not kept, "qmodel.layers", layer.layer, f"not accepted: {layer.kept}")
        check_finite("qmodel", self)

    def decode_numbers(
        self, given: Mapping[str, Any], presets: ModelPresets = PRESETS
    ) -> dict[str, Any]:
        """Returns ``probes``, ``recent``, ``sink`` and ``dense_layers``: as ``given``, else from
        the artifact or presets.
        """
        recorded = self.artifact.manifest["details"].get("serving", {}) if self.artifact else {}
        defaults = decode_defaults(presets, self.num_buckets)
        settings = {
            name: recorded.get(name, default) if given.get(name) is None else given[name]
            for name, default in defaults.items()
        }
        return settings | {"dense_layers": tuple(settings["dense_layers"])}

    def budget(
        self, *, probes: int = 0, keys: float | None = None, threshold: float | None = None
    ) -> Budget:
        """Returns the budget for ``threshold``, ``keys`` or else ``probes``; raises UserError if it
        is for another router.
        """
        if threshold is not None:
            raise UserError(
                f"threshold={threshold}: needs a decode gate; other routers read probes"
            )
        if keys is None:
            ok = 0 <= probes <= self.num_buckets
            require(
                ok, "probes", probes, f"expected 0 to {self.num_buckets:,}, the number of buckets"
            )
            return Probes(probes)
        if keys >= 1:
            raise UserError(
                f"keys={keys:g}: a number of keys needs a decode gate, whose blocks are equally "
                f"large"
            )
        if not self.predicts_attention:
            raise UserError(
                f"keys={keys:g}: needs a query classifier or a decode gate, which predict "
                f"attention; give probes"
            )
        if self.thresholds is None:
            raise UserError(
                f"keys={keys:g}: this router has no calibrated thresholds; train it again, or "
                f"give probes"
            )
        return self.thresholds.budget(keys, self.num_buckets)

    def mean_keys(self, budget: Budget) -> tuple[int, float]:
        """Returns how many keys in buckets a query reads on average: a fixed number, plus a share
        of all keys.
        """
        return 0, budget.share if isinstance(budget, KeyShare) else budget.most / self.num_buckets

    def shard(self, part: ModelShard) -> "Router":
        """Returns the router of the layers and heads of a rank. Only needed for tensor and pipeline
        parallelism.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.shard: tensor and pipeline parallelism need this method"
        )

    @abstractmethod
    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        """Returns the buckets that the newest token of each sequence reads: int32 ``[B, Hkv, L]``,
        -1 for none.

        The last ``window`` keys, ``[B]`` or one number for all sequences, are always read. With
        ``by_head`` each query head has its own buckets: ``[B, Hq, L]``.
        """

    @abstractmethod
    def buckets_of_keys(self, x: LayerInputs) -> tuple[Tensor, int]:
        """Returns the bucket of each key of a whole text, int32 ``[1, Hkv, M]``, and the number of
        buckets.
        """

    @abstractmethod
    def scores_at(
        self, x: LayerInputs, positions: Tensor, recent: int, *, by_head: bool = False
    ) -> Tensor:
        """Returns the bucket scores of the queries at ``positions [n]`` of a whole text:
        ``[n, Hkv, C]``.

        A query always reads the last ``recent`` keys, so block routers score only blocks before
        these. With ``by_head`` the result is ``[n, Hq, C]``.
        """

    def choose(self, scores: Tensor, budget: Budget, sizes: Sizes | None = None) -> Tensor:
        """Returns the buckets that queries with bucket ``scores [B, H, C]`` read: int32
        ``[B, H, L]``, -1 is none.

        ``L`` depends only on shapes. A :class:`KeyShare` needs ``sizes``.
        """
        if isinstance(budget, Probes):
            return self.best(scores, budget.most)
        predicted = self.probabilities(scores)
        if isinstance(budget, Probability):
            return dense_buckets(predicted, budget.least, budget.most)
        assert sizes is not None
        counts = sizes()
        counts = counts.repeat_interleave(scores.shape[1] // counts.shape[1], 1)
        return dense_buckets(bucket_densities(predicted, counts), budget.density, budget.most)

    def best(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the ``probes`` buckets (0 to C) with the highest ``scores [B, H, C]``, unordered:
        int32 ``[B, H, L]``.
        """
        return scores.topk(probes, dim=-1, sorted=False).indices.to(torch.int32)

    def ranked(self, scores: Tensor) -> Tensor:
        """Returns the buckets in the order in which probes visit them, by ``scores [B, H, C]``:
        ``[B, H, L]``, -1 is none.
        """
        return scores.argsort(-1, descending=True)

    def visited(self, far: Tensor, probes: Tensor) -> Tensor:
        """Returns how many of ``far`` buckets are visited with ``probes``; the shapes are
        broadcast.
        """
        return probes.minimum(far)

    def only_far(self, scores: Tensor, before_window: Tensor) -> Tensor:
        """Removes blocks from ``scores [B, H, C]`` that have no key among the first
        ``before_window [B]`` keys.
        """
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Returns the predicted attention to the buckets, up to a factor per row, from
        ``scores [B, H, C]``.
        """
        return scores


class BucketRouter(Router):
    """Base class of routers by content: ``KMeans``, ``QModel`` and ``RandomBuckets``.

    Keys and queries are given before and after RoPE (``nope``: before).
    """

    @abstractmethod
    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Returns the bucket of each key ``[B, Hkv, N, D]``: int32 ``[B, Hkv, N]``."""

    @abstractmethod
    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns the bucket scores of each query head ``[B, Hq, 1, D]``: fp32 ``[B, Hq, C]``."""

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns :meth:`head_scores` summed over each query group: fp32 ``[B, Hkv, C]``."""
        return self.head_scores(layer, q_nope, q).unflatten(1, (self.kv_heads, -1)).sum(2)

    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        score = self.head_scores if by_head else self.scores
        return self.choose(score(x.layer, x.q_nope, x.q), budget, buckets.sizes)

    def buckets_of_keys(self, x: LayerInputs) -> tuple[Tensor, int]:
        return self.assign(x.layer, x.k_nope, x.k), self.num_buckets

    def scores_at(
        self, x: LayerInputs, positions: Tensor, recent: int, *, by_head: bool = False
    ) -> Tensor:
        score = self.head_scores if by_head else self.scores
        return score(x.layer, *queries_at(x, positions))


def queries_at(x: LayerInputs, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the queries at ``positions [n]`` of one text, before and after RoPE, as single
    tokens: ``[n, Hq, 1, D]``.
    """
    q_nope, q = (
        queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q_nope, x.q)
    )
    return q_nope, q


LayerIndex = Annotated[int, Interval(ge=0, lt=10_000)]


@dataclass(frozen=True)
class DecodeDefaults:
    """Schema of the result of :func:`decode_defaults` in a manifest."""

    probes: Annotated[int, Ge(0)] = 0
    recent: Annotated[int, Interval(ge=1, lt=2**31)] = 1
    sink: Annotated[int, Interval(ge=0, lt=2**31)] = 0
    dense_layers: list[LayerIndex] = field(default_factory=list)


@dataclass(frozen=True)
class RouterDetails:
    """Schema of the manifest entries that loading a router needs."""

    layers: list[LayerIndex]
    rope: bool
    serving: DecodeDefaults = field(default_factory=DecodeDefaults)
    residual: bool = False
    thresholds: KeyThresholds | None = None  # of a classifier

    def __post_init__(self) -> None:
        if not self.layers or sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers={self.layers!s:.60} must be one or more and increase")


def decode_defaults(presets: "ModelPresets", num_buckets: int) -> dict[str, Any]:
    """Returns the default settings for serving a router; its manifest records them for
    ``msattn.attach``.
    """
    return {"probes": min(presets.probes, num_buckets), **decode_window(presets)}


def decode_window(presets: "ModelPresets") -> dict[str, Any]:
    """Returns the settings of :func:`decode_defaults` that do not depend on the buckets: the keys
    that are always read.
    """
    return {"recent": presets.recent, "sink": 1, "dense_layers": [0]}


def layer_index(layers: list[int], layer: int) -> int:
    """Returns the position of ``layer`` in the routed ``layers``; ValueError if it is not
    routed.
    """
    if layer not in layers:
        raise ValueError(f"layer={layer}: this router holds layers {layers}")
    return layers.index(layer)


def hash32(word: Any) -> Any:
    """Bijective 32-bit integer hash of an int or an int64 Tensor, exact on every device.

    The factors are below 2**32 and 2**27, so that no product overflows int64.
    """
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word


def bucket_sizes(buckets: Tensor, positions: Tensor, num_buckets: int) -> Tensor:
    """Returns the number of keys up to each of ``positions`` in each bucket: int64 ``[n, Hkv, C]``.

    ``buckets`` int32 ``[Hkv, N]`` are the keys' buckets, -1 for keys that do not count;
    ``positions`` int64 ``[n]`` increase.
    """
    keys = torch.arange(buckets.shape[1], device=buckets.device)
    first_query = torch.searchsorted(positions, keys)  # the first query that sees the key
    entries = first_query * (num_buckets + 1) + torch.where(buckets < 0, num_buckets, buckets)
    counts = entries.new_zeros(len(buckets), (len(positions) + 1) * (num_buckets + 1))
    counts.scatter_add_(1, entries, torch.ones_like(entries))
    return counts.unflatten(1, (-1, num_buckets + 1))[:, :-1, :-1].cumsum(1).transpose(0, 1)

"""Routing: assignment of keys to buckets, and choice of the buckets that a query reads (SAAP, sections 4 and 5)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from msattn.kernels.common.densities import bucket_densities, dense_buckets
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.budgets import Budget, Probability, Probes

if TYPE_CHECKING:
    from msattn.trainer.artifacts import Artifact
    from msattn.trainer.config.model import ModelPresets
    from msattn.trainer.models.parallel import HeadShard
    from msattn.trainer.models.tap import LayerInputs

MAX_ROUTED_TOKENS = 32  # new tokens of a pass that each read buckets; more are a prompt

Sizes = Callable[[], Tensor]  # returns the numbers of keys in the buckets


class Router(nn.Module, ABC):
    """Base class of routers, which score the buckets of keys for a query and choose those that it reads.

    Buckets are by content, see :class:`BucketRouter`, or blocks of neighbouring keys, see
    :class:`~msattn.trainer.methods.key_blocks.BlockRouter`. Queries are those of one token.
    """

    method: ClassVar[Method]
    num_buckets: int  # of each key/value head
    layers: list[int]  # indices of the model's routed layers
    kv_heads: int  # of the model
    artifact: "Artifact | None" = None  # that was loaded; None for a router that was created

    def shard(self, part: "HeadShard") -> "Router":
        """Returns the router of a part of the heads, for tensor parallelism; only a router that is served so needs it."""
        raise NotImplementedError(f"{type(self).__name__}.shard: tensor parallelism needs this method")

    @abstractmethod
    def visit(
        self, x: "LayerInputs", budget: Budget, sizes: Sizes, *, window: int | Tensor = 0, by_head: bool = False
    ) -> Tensor:
        """Returns the buckets that the newest token of each sequence reads: int32 ``[B, Hkv, L]``, -1 is none.

        ``sizes`` returns the numbers of keys in the buckets, ``[B, Hkv, C]``. The last ``window`` keys, ``[B]`` or the same
        number for all sequences, are read anyway. With ``by_head`` each query head has buckets of its own: ``[B, Hq, L]``.
        """

    @abstractmethod
    def buckets_of_keys(self, x: "LayerInputs") -> tuple[Tensor, int]:
        """Returns the bucket of each key of a whole text, int32 ``[1, Hkv, M]``, and the number of buckets."""

    @abstractmethod
    def scores_at(self, x: "LayerInputs", positions: Tensor, recent: int, *, by_head: bool = False) -> Tensor:
        """Returns the bucket scores of the queries at ``positions [n]`` of a whole text: ``[n, Hkv, C]``.

        ``recent`` is the number of last keys that a query always reads: of blocks, only those before are scored. With
        ``by_head`` the result is ``[n, Hq, C]``.
        """

    def choose(self, scores: Tensor, budget: Budget, sizes: Sizes | None = None) -> Tensor:
        """Returns the buckets that queries with bucket ``scores [B, H, C]`` read: int32 ``[B, H, L]``, -1 is none.

        ``L`` depends on shapes alone. A :class:`KeyShare` needs ``sizes``, see :meth:`visit`.
        """
        if isinstance(budget, Probes):
            return self.best(scores, budget.most)
        predicted = self.probabilities(scores)
        if isinstance(budget, Probability):
            return dense_buckets(predicted, budget.least, budget.most)
        assert sizes is not None
        held = sizes()
        held = held.repeat_interleave(scores.shape[1] // held.shape[1], 1)
        return dense_buckets(bucket_densities(predicted, held), budget.density, budget.most)

    def best(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the ``probes`` buckets (0 to C) with the highest ``scores [B, H, C]``: int32 ``[B, H, L]``."""
        return top_buckets(scores, probes)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Returns the predicted attention to the buckets, up to a factor of each row, from ``scores [B, H, C]``."""
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
        self, x: "LayerInputs", budget: Budget, sizes: Sizes, *, window: int | Tensor = 0, by_head: bool = False
    ) -> Tensor:
        score = self.head_scores if by_head else self.scores
        return self.choose(score(x.layer, x.q_nope, x.q), budget, sizes)

    def buckets_of_keys(self, x: "LayerInputs") -> tuple[Tensor, int]:
        return self.assign(x.layer, x.k_nope, x.k), self.num_buckets

    def scores_at(self, x: "LayerInputs", positions: Tensor, recent: int, *, by_head: bool = False) -> Tensor:
        score = self.head_scores if by_head else self.scores
        return score(x.layer, *queries_at(x, positions))


def queries_at(x: "LayerInputs", positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the queries at ``positions [n]`` of one text, before and after RoPE, as single tokens: ``[n, Hq, 1, D]``."""
    q_nope, q = (queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q_nope, x.q))
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

    def __post_init__(self) -> None:
        if not self.layers or sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers={self.layers!s:.60} must be one or more and increase")


def decode_defaults(presets: "ModelPresets", num_buckets: int) -> dict[str, Any]:
    """Returns the numbers with which a router is meant to be served; its manifest records them for ``msattn.attach``."""
    return {"probes": min(presets.probes, num_buckets), **decode_window(presets)}


def decode_window(presets: "ModelPresets") -> dict[str, Any]:
    """Returns the numbers of :func:`decode_defaults` that do not depend on the buckets: what is read of each text anyway."""
    return {"recent": presets.recent, "sink": 1, "dense_layers": [0]}


def layer_index(layers: list[int], layer: int) -> int:
    """Returns the position of ``layer`` in the routed ``layers``; ValueError if it is not routed."""
    if layer not in layers:
        raise ValueError(f"layer={layer}: this router holds layers {layers}")
    return layers.index(layer)


def top_buckets(scores: Tensor, probes: int) -> Tensor:
    """Returns the ``probes`` (0 to C) buckets with the highest ``scores [..., C]``, int32 ``[..., probes]``, unordered."""
    return scores.topk(probes, dim=-1, sorted=False).indices.to(torch.int32)


def hash32(word: Any) -> Any:
    """Bijective 32-bit integer hash of an int or an int64 Tensor, exact on every device.

    Both factors are below 2**31, so that no product overflows int64.
    """
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word


def bucket_sizes(buckets: Tensor, positions: Tensor, num_buckets: int) -> Tensor:
    """Returns the number of keys up to each of ``positions`` in each bucket: int64 ``[n, Hkv, C]``.

    ``buckets`` int32 ``[Hkv, N]`` are those of the keys, -1 for keys that do not count; ``positions`` int64 ``[n]`` increase.
    """
    keys = torch.arange(buckets.shape[1], device=buckets.device)
    first_query = torch.searchsorted(positions, keys)  # that sees the key
    entries = first_query * (num_buckets + 1) + torch.where(buckets < 0, num_buckets, buckets)
    counts = entries.new_zeros(len(buckets), (len(positions) + 1) * (num_buckets + 1))
    counts.scatter_add_(1, entries, torch.ones_like(entries))
    return counts.unflatten(1, (-1, num_buckets + 1))[:, :-1, :-1].cumsum(1).transpose(0, 1)

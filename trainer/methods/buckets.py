"""Routing: assignment of keys to buckets, and choice of the buckets that a query reads (SAAP, sections 4 and 5)."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from msattn.kernels.common.densities import bucket_densities, dense_buckets
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from msattn.trainer.config.model import ModelPresets
    from msattn.trainer.models.tap import LayerInputs


class Router(nn.Module):
    """Base class of routers by content: ``KMeans``, ``QModel``, and those without training.

    Queries are those of one token, keys and queries are given before and after RoPE (``nope``: before).
    """

    num_buckets: int  # of each key/value head
    layers: list[int]  # indices of the model's routed layers
    kv_heads: int  # of the model

    @abstractmethod
    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Returns the bucket of each key ``[B, Hkv, N, D]``: int32 ``[B, Hkv, N]``."""

    @abstractmethod
    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns the bucket scores of each query head ``[B, Hq, 1, D]``: fp32 ``[B, Hq, C]``."""

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns :meth:`head_scores` summed over each query group: fp32 ``[B, Hkv, C]``."""
        return self.head_scores(layer, q_nope, q).unflatten(1, (self.kv_heads, -1)).sum(2)

    def probe(self, layer: int, q_nope: Tensor, q: Tensor, probes: int) -> Tensor:
        """Returns the ``probes`` buckets (0 to C) with the highest :meth:`scores`: int32 ``[B, Hkv, probes]``."""
        return top_buckets(self.scores(layer, q_nope, q), probes)

    def probe_dense(self, layer: int, q_nope: Tensor, q: Tensor, sizes: Tensor, threshold: float, most: int) -> Tensor:
        """Returns the buckets whose density reaches ``threshold``, of a router whose scores are probabilities.

        The result is int32 ``[B, Hkv, most]``, -1 is none. ``sizes`` int32 ``[B, Hkv, C]`` are the numbers of keys in the
        buckets. Of more than ``most`` buckets, the densest are returned.
        """
        raise NotImplementedError


LayerIndex = Annotated[int, Interval(ge=0, lt=10_000)]


@dataclass(frozen=True)
class DecodeDefaults:
    """Schema of the result of :func:`serving` in a manifest."""

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
    return {"probes": min(presets.probes, num_buckets), "recent": presets.recent, "sink": 1, "dense_layers": [0]}


def layer_index(layers: list[int], layer: int) -> int:
    """Returns the position of ``layer`` in the routed ``layers``; ValueError if it is not routed."""
    if layer not in layers:
        raise ValueError(f"layer={layer}: this router holds layers {layers}")
    return layers.index(layer)


def top_buckets(scores: Tensor, probes: int) -> Tensor:
    """Returns the ``probes`` buckets with the highest ``scores [..., C]``, int32 ``[..., probes]``, unordered."""
    _check_probes(probes, scores.shape[-1])
    return scores.topk(probes, dim=-1, sorted=False).indices.to(torch.int32)


def route(router: Router, x: "LayerInputs", probes: int, *, by_head: bool = False) -> Tensor:
    """Returns the buckets that the newest token visits, int32 ``[B, Hkv, probes]``; none for ``probes=0``.

    ``x`` holds one query of each sequence. With ``by_head`` each query head has its own buckets: ``[B, Hq, probes]``. Raises
    UserError for more probes than there are buckets.
    """
    _check_probes(probes, router.num_buckets)
    if by_head:
        return top_buckets(router.head_scores(x.layer, x.q_nope, x.q), probes)
    return router.probe(x.layer, x.q_nope, x.q, probes)


def route_by_density(
    router: Router, x: "LayerInputs", sizes: Tensor, threshold: float, most: int, *, by_head: bool = False
) -> Tensor:
    """Returns the buckets whose density reaches ``threshold`` for the newest token: int32 ``[B, Hkv, most]``, -1 is none.

    ``x`` holds one query of each sequence. ``sizes`` int32 ``[B, Hkv, C]`` are the numbers of keys in the buckets. Each query
    head has its own buckets with ``by_head``: ``[B, Hq, most]``.
    """
    if not by_head:
        return router.probe_dense(x.layer, x.q_nope, x.q, sizes, threshold, most)
    scores = router.head_scores(x.layer, x.q_nope, x.q)
    sizes = sizes.repeat_interleave(scores.shape[1] // sizes.shape[1], 1)
    return dense_buckets(bucket_densities(scores, sizes), threshold, most)


def _check_probes(probes: int, num_buckets: int) -> None:
    if not 0 <= probes <= num_buckets:
        raise UserError(f"probes={probes}: accepted are 0 to {num_buckets}, the number of buckets")


def hash32(word: Any) -> Any:
    """Bijective 32-bit integer hash of an int or an int64 Tensor, exact on every device.

    Both factors are below 2**31, so that no product overflows int64.
    """
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word

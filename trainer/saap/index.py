"""Which keys each bucket holds, and which buckets a query visits (SAAP, arXiv 2502.08246, sections 4 and 5).

A :class:`Router` names the bucket of a key and scores the buckets for a query.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs


class Router(Protocol):
    """What :class:`~msattn.trainer.saap.kmeans.KMeans` and :class:`~msattn.trainer.saap.qmodel.QModel` have in common.

    Attributes
    ----------
    num_buckets : buckets of each key/value head.
    layers : the model's layers that are routed.
    """

    num_buckets: int
    layers: list[int]

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Bucket of each key: int32 ``[B, Hkv, N]`` for keys ``[B, Hkv, N, D]`` before and after RoPE."""
        ...

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Worth of each bucket for one token's query group: fp32 ``[B, Hkv, C]`` from queries ``[B, Hq, 1, D]``."""
        ...

    def probe(self, layer: int, q_nope: Tensor, q: Tensor, probes: int) -> Tensor:
        """The buckets with the highest scores: int32 ``[B, Hkv, probes]``, 0 to C of them."""
        ...

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Worth of each bucket for each query head on its own: fp32 ``[B, Hq, C]``."""
        ...


def slot_of(layers: list[int], layer: int) -> int:
    """Where ``layer`` stands among the routed ``layers``; ValueError when it is not routed."""
    if layer not in layers:
        raise ValueError(f"layer={layer}: this router holds layers {layers}")
    return layers.index(layer)


def top_buckets(scores: Tensor, probes: int) -> Tensor:
    """The ``probes`` buckets with the highest ``scores [..., C]``, int32 ``[..., probes]``, in no particular order.

    Raises
    ------
    UserError : ``probes`` is negative or more than there are buckets.
    """
    _check_probes(probes, scores.shape[-1])
    return scores.topk(probes, dim=-1, sorted=False).indices.to(torch.int32)


def route(router: Router, x: "LayerInputs", probes: int) -> Tensor:
    """Buckets that the newest token's query groups visit: int32 ``[B, Hkv, probes]``.

    ``x`` holds one query a sequence; ``probes=0`` visits none. UserError: ``probes`` is more than there are buckets.
    """
    _check_probes(probes, router.num_buckets)
    return router.probe(x.layer, x.q_nope, x.q, probes)


def _check_probes(probes: int, num_buckets: int) -> None:
    if not 0 <= probes <= num_buckets:
        raise UserError(f"probes={probes}: accepted are 0 to {num_buckets}, the number of buckets")

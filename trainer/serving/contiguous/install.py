"""Installation of an attached model's layers in a transformers cache, with checks that the cache
supports them.
"""

from collections.abc import Container, Sequence
from typing import Any

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router
from msattn.trainer.serving.contiguous.bucket_layers import (
    REBUILD_EVERY,
    BlockLayer,
    BucketLayer,
    ClusterLayer,
)
from msattn.trainer.serving.contiguous.layers import GrowingLayer

LAYERS: dict[str, type[BucketLayer]] = {
    "buckets": BucketLayer,
    "blocks": BlockLayer,
    "clusters": ClusterLayer,
}


def install_layers(
    cache: Cache,
    router: Router | None,
    *,
    num_layers: int,
    served: Sequence[int] | None = None,
    routed: Container[int] = (),
    rebuild_every: int = REBUILD_EVERY,
) -> None:
    """Replaces the layers of a cache and keeps their tokens.

    The layers ``routed`` become the class in ``LAYERS`` for the router's grouping of keys; others
    become :class:`GrowingLayer`. Only the layers ``served`` (None: all) are replaced. Raises
    UserError for caches without the full context on the model's device.
    """
    replaced = range(num_layers) if served is None else served
    check_cache(cache, replaced, num_layers)
    cache.layers += [DynamicLayer() for _ in range(num_layers - len(cache.layers))]
    for number in replaced:
        existing: Any = cache.layers[number]
        if router is None or number not in routed:
            fresh = GrowingLayer()
        else:
            fresh = LAYERS[router.grouping](router.assigner, rebuild_every)
        if isinstance(existing, type(fresh)):
            continue
        fresh.take_over(existing)
        cache.layers[number] = fresh


def check_cache(cache: Any, replaced: Sequence[int], num_layers: int) -> None:
    """Raises UserError for a cache whose layers ``replaced`` cannot be taken over by
    :func:`install_layers`.
    """
    if not isinstance(cache, DynamicCache | StaticCache):
        raise UserError(
            f"past_key_values: {type(cache).__name__} is not supported; expected a DynamicCache "
            f"or StaticCache"
        )
    if len(replaced) < num_layers and isinstance(cache, StaticCache):
        raise UserError(
            "past_key_values: expected a DynamicCache, because some layers keep the model's own "
            "attention"
        )
    existing = [cache.layers[number] for number in replaced if number < len(cache.layers)]
    other = sorted({type(layer).__name__ for layer in existing if not _is_replaceable(layer)})
    lazy = getattr(cache, "layer_class_to_replicate", None)
    if not cache.layers and lazy is not None and lazy is not DynamicLayer:
        other = [lazy.__name__]
    if other or cache.offloading:
        kind = (
            "an offloaded cache"
            if cache.offloading
            else f"{type(cache).__name__} with layers of type {', '.join(other)}"
        )
        raise UserError(
            f"past_key_values: {kind} cannot be read sparsely; expected a DynamicCache or "
            f"StaticCache"
        )


def can_crop(cache: Cache) -> bool:
    """Returns True if the last tokens can be removed.

    Layers whose window is full have dropped the tokens before it, and layers of linear attention
    keep a sum over all tokens.
    """
    layers: list[Any] = cache.layers
    return not any(
        isinstance(layer, LinearAttentionCacheLayerMixin)
        or (getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window)
        for layer in layers
    )


def _is_replaceable(layer: Any) -> bool:
    """Returns True if a cache layer holds all keys; a layer with a window does so until the window
    is full.
    """
    whole = type(layer) in (DynamicLayer, StaticLayer) or isinstance(layer, GrowingLayer)
    return whole or (
        type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window
    )

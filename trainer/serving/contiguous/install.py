"""Installation of an attached model's layers in a transformers cache, with checks that the cache
supports them, holds tokens of this model and has room for more.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
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
from msattn.trainer.serving.contiguous.buffers import grown_capacity
from msattn.trainer.serving.contiguous.layers import GrowingCache, GrowingLayer

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


class CacheShape(NamedTuple):
    """The shape of the caches of an attached model."""

    num_layers: int
    served: list[int]  # layers that are GrowingLayers
    kv_heads: int  # of this rank
    head_dim: int


def check_held(cache: GrowingCache, shape: CacheShape, batch: int, *, every_layer: bool) -> None:
    """Raises UserError unless a cache holds the keys and values of ``batch`` sequences of this
    model.

    Every layer is checked once for each cache; the first and the last layer show whether a pass was
    interrupted.
    """
    layers, served = cache.layers, shape.served
    if len(layers) != shape.num_layers:
        raise UserError(
            f"past_key_values: it has {len(layers)} layers; expected {shape.num_layers}, as in the "
            f"model"
        )
    length = layers[served[0]].get_seq_length()
    accepted = [batch, shape.kv_heads, length, shape.head_dim]
    for number in served if every_layer else (served[0], served[-1]):
        for buffer in (layers[number].key_buffer, layers[number].value_buffer):
            memory = buffer.memory if buffer.length else None
            held = accepted.copy() if memory is None else list(memory.shape)
            held[2] = min(buffer.length, held[2])
            if held != accepted:
                raise UserError(
                    f"past_key_values: it holds {held} [sequences, heads, tokens, size]; expected "
                    f"{accepted}"
                )


def check_memory(
    cache: GrowingCache,
    shape: CacheShape,
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises UserError if a static cache has no room for ``tokens`` more, or a GPU has too little
    free memory.
    """
    first, length = cache.layers[shape.served[0]], cache.get_seq_length()
    capacity, limit = first.key_buffer.capacity, first.max_cache_len
    if limit is not None and length + tokens > limit:
        raise UserError(
            f"past_key_values: max_cache_len={limit}: {length + tokens} tokens need as many "
            f"positions"
        )
    if device.type != "cuda" or length + tokens <= capacity:
        return
    num_layers = len(shape.served)
    size_of_token = 2 * batch * shape.kv_heads * shape.head_dim * dtype.itemsize * num_layers
    wanted, allocated = grown_capacity(length + tokens), size_of_token * capacity
    # layers grow in turn
    needed = (
        size_of_token * wanted - allocated + max(allocated, size_of_token * wanted) // num_layers
    )
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reusable
    if needed > free:
        raise UserError(
            f"past_key_values: a cache of {wanted:,} positions for {batch} sequences needs "
            f"{needed:,} bytes more, and {free:,} "
            "bytes are free; shorten the prompt or make the batch smaller"
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

"""KV caches of random keys and values, which speed is measured after instead of a prompt."""

from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer import models
from msattn.trainer.serving.cache import install_layers

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel


def random_cache(model: "PreTrainedModel", batch: int, length: int, *, new_tokens: int, seed: int) -> "Cache":
    """Returns a cache of ``length`` random keys and values of each sequence, with room for ``new_tokens`` more.

    An attached model takes it over without copying it. It grows where some layers keep the model's own attention.
    """
    from transformers import StaticCache

    config: Any = model.config
    if len(models.served_layers(config)) < models.num_layers(config):
        return random_dynamic_cache(model, batch, length, seed=seed)
    cache = StaticCache(config=config, max_cache_len=length + new_tokens)
    cache.early_initialization(
        batch_size=batch,
        num_heads=models.num_kv_heads(config),
        head_dim=models.head_dim(config),
        dtype=model.dtype,
        device=model.device,
    )
    generator = torch.Generator(model.device).manual_seed(seed)
    for each in cache.layers:
        layer: Any = each
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length.fill_(length)
    return cache


def with_growing_layers(model: "PreTrainedModel", cache: "Cache") -> "Cache":
    """Returns ``cache`` with layers that append a token without copying the others, also where nothing is attached."""
    config = model.config
    install_layers(cache, None, num_layers=models.num_layers(config), served=models.served_layers(config))
    return cache


def random_dynamic_cache(model: "PreTrainedModel", batch: int, length: int, *, seed: int) -> "DynamicCache":
    """Returns transformers' default cache with ``length`` random keys and values of each sequence."""
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    generator = torch.Generator(model.device).manual_seed(seed)
    size = batch, models.num_kv_heads(config), length, models.head_dim(config)
    for layer in range(models.num_layers(config)):
        k, v = (torch.randn(size, generator=generator, dtype=model.dtype, device=model.device) for _ in range(2))
        cache.update(k, v, layer)
    return cache

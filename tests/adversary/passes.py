"""Passes of a small model, alone and inside of attach: their phases, inputs and caches.

With every key read, an attached model must return what the model alone returns for the same input, or refuse it; and an input
that is refused must leave the cache as it was.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from msattn.trainer.serving.cache import install_layers
from tests.adversary.attached import LENGTH, ROUTER, model
from tests.factory import left_padded, random_tokens, tiny_config

Inputs = dict[str, Any]
PHASES = ("prompt", "chunk", "token", "step")  # a step is a token as a GPU decodes it


@cache
def _inputs_of(phase: str) -> Inputs:
    ids, mask = left_padded([random_tokens(1, length, seed=length)[0] for length in (2 * LENGTH, 2 * LENGTH - 3)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if phase == "prompt":
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    past = DynamicCache(config=model().config)
    with torch.no_grad():
        model()(ids[:, :LENGTH], attention_mask=mask[:, :LENGTH], position_ids=positions[:, :LENGTH], past_key_values=past)
    end = 2 * LENGTH if phase == "chunk" else LENGTH + 1
    part = {"input_ids": ids[:, LENGTH:end], "attention_mask": mask[:, :end], "position_ids": positions[:, LENGTH:end]}
    return {**part, "past_key_values": past}


def inputs_of(phase: str) -> Inputs:
    """Returns the inputs of a left-padded batch: a prompt, the chunk after cached tokens, or a single token."""
    return copy.deepcopy(_inputs_of(phase))


@torch.no_grad()
def run(base: Any, inputs: Inputs) -> Tensor:
    return base(**inputs).logits


def alone(call: Callable[[Any], Any]) -> Any:
    """Returns ``call(model)`` without attach; None if it raises."""
    try:
        return call(model())
    except Exception:
        return None


def with_id(number: int, row: int, column: int) -> Callable[[Tensor], Tensor]:
    def changed(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[row, column] = number
        return ids

    return changed


def cache_of(
    make: str,
    *,
    layers: int = 2,
    batch: int = 2,
    heads: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = (),
    values: slice = slice(None),
    device: str = "cpu",
) -> Any:
    """Returns a cache of random keys and values."""
    config = tiny_config(num_hidden_layers=layers, num_attention_heads=4 * heads, num_key_value_heads=heads, head_dim=size)
    found: Any = StaticCache(config=config, max_cache_len=3 * LENGTH) if make == "static" else DynamicCache(config=config)
    for layer in range(layers):
        length = lengths[layer] if lengths else LENGTH
        drawn = torch.randn(2, batch, heads, length, size, generator=torch.Generator().manual_seed(layer)).to(device, dtype)
        if length:
            found.update(drawn[0], drawn[1][:, :, values], layer)
    if make == "taken over":
        install_layers(found, ROUTER, num_layers=layers, dense_layers=())
    return found

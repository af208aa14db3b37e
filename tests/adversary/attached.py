"""A small model, artifacts for it, and calls inside of attach, which the hostile tests of attach share."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import msattn
from msattn.trainer.config import GateConfig
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.tap import NotCopied
from tests.factory import random_tokens, tiny_config, tiny_model

BLOCK, BUCKETS, LAYERS, VOCABULARY, LENGTH = 16, 6, 2, 128, 40


@cache
def model() -> Any:
    return tiny_model("llama")


def gate(**sizes: Any) -> Gate:
    return Gate.build(tiny_config("llama", **sizes), GateConfig(block_size=BLOCK)).requires_grad_(False)


def partition(
    *,
    heads: int = 2,
    buckets: int = BUCKETS,
    size: int = 16,
    layers: tuple[int, ...] = (0, 1),
    seed: int = 0,
    rope: bool = False,
) -> KMeans:
    drawn = torch.randn(len(layers), heads, buckets, size, generator=torch.Generator().manual_seed(seed))
    return KMeans(torch.nn.functional.normalize(drawn, dim=-1), list(layers), rope)


GATE, ROUTER = gate(), partition()
SCORES: dict[str, Any] = {"scores": "quest", "block_size": BLOCK}
SELECTED: dict[str, Any] = {"select": SCORES, "sparsity": 0.5}
ROUTED: dict[str, Any] = {"qmodel": ROUTER, "probes": 2, "recent": 5, "sink": 1, "dense_layers": ()}
EVERY_BLOCK: dict[str, Any] = {"select": {**SCORES, "sparsity": 0.0, "dense_below": 0}}
EVERY_BUCKET: dict[str, Any] = {**ROUTED, "probes": BUCKETS}
EVERYTHING: dict[str, Any] = {**EVERY_BLOCK, **EVERY_BUCKET}


def attached(options: Mapping[str, Any], use: Callable[[Any], Any], base: Any = None) -> Any:
    """Returns ``use(model)`` inside of attach, which must leave the model as it was."""
    base = model() if base is None else base
    try:
        with torch.no_grad(), msattn.attach(base, **options):
            return use(base)
    finally:
        check_restored(base)


def check_restored(base: Any) -> None:
    assert base.config._attn_implementation == "sdpa", "the model is still attached"
    hooks = [hook for each in base.modules() for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())]
    assert not any(isinstance(getattr(hook, "__self__", None), NotCopied) for hook in hooks), "hooks are left"
    assert not any("forward" in vars(each) for each in base.modules()), "replaced forward passes are left"


def logits(base: Any) -> Tensor:
    """Returns the logits of a prompt and of three greedy tokens."""
    ids, past = random_tokens(2, 3 * LENGTH), DynamicCache(config=base.config)
    found = [base(ids, past_key_values=past).logits]
    for _ in range(3):
        found.append(base(found[-1][:, -1:].argmax(-1), past_key_values=past).logits)
    return torch.cat(found, dim=1)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=2e-4, atol=2e-4)

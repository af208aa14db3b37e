"""A small model, artifacts for it, and passes alone and inside of attach.

With every key read, an attached model must return what the model alone returns for the same input,
or refuse it; and an input that is refused must leave the cache as it was.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import msattn
from msattn.trainer.config import GateConfig
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.replacement import NotCopied
from tests.factory import left_padded, random_partition, random_tokens, tiny_config, tiny_model

BLOCK, BUCKETS, LAYERS, VOCABULARY, LENGTH = 16, 6, 2, 128, 40


@cache
def model() -> Any:
    return tiny_model("llama")


def gate(**sizes: Any) -> Gate:
    return Gate.build(tiny_config("llama", **sizes), GateConfig(block_size=BLOCK)).requires_grad_(
        False
    )


GATE, ROUTER = gate(), random_partition()
SCORES: dict[str, Any] = {"scores": "quest", "block_size": BLOCK}
SELECTED: dict[str, Any] = {"select": SCORES, "sparsity": 0.5}
ROUTED: dict[str, Any] = {"qmodel": ROUTER, "probes": 2, "recent": 5, "sink": 1, "dense_layers": ()}
EVERY_BLOCK: dict[str, Any] = {"select": {**SCORES, "sparsity": 0.0}}
EVERY_BUCKET: dict[str, Any] = {**ROUTED, "probes": BUCKETS}
EVERYTHING: dict[str, Any] = {**EVERY_BLOCK, **EVERY_BUCKET}


def attached(options: Mapping[str, Any], use: Callable[[Any], Any], base: Any = None) -> Any:
    """Returns ``use(model)`` inside of attach, which must leave the model as it was."""
    base = model() if base is None else base
    config = base.config.to_dict(), sorted(vars(base.config))
    try:
        with torch.no_grad(), msattn.attach(base, **options):
            return use(base)
    finally:
        check_restored(base)
        assert (base.config.to_dict(), sorted(vars(base.config))) == config


def check_restored(base: Any) -> None:
    assert base.config._attn_implementation == "sdpa", "the model is still attached"
    hooks = [
        hook
        for each in base.modules()
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())
    ]
    assert not any(isinstance(getattr(hook, "__self__", None), NotCopied) for hook in hooks), (
        "hooks are left"
    )
    assert not any("forward" in vars(each) for each in base.modules()), (
        "replaced forward passes are left"
    )


def logits(base: Any) -> Tensor:
    """Returns the logits of a prompt and of three greedy tokens."""
    ids, past = random_tokens(2, 3 * LENGTH), DynamicCache(config=base.config)
    found = [base(ids, past_key_values=past).logits]
    for _ in range(3):
        found.append(base(found[-1][:, -1:].argmax(-1), past_key_values=past).logits)
    return torch.cat(found, dim=1)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=2e-4, atol=2e-4)


Inputs = dict[str, Any]
PHASES = ("prompt", "chunk", "token", "step")  # a step is a token as a GPU decodes it


@cache
def _inputs_of(phase: str) -> Inputs:
    ids, mask = left_padded(
        [random_tokens(1, length, seed=length)[0] for length in (2 * LENGTH, 2 * LENGTH - 3)]
    )
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if phase == "prompt":
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    past = DynamicCache(config=model().config)
    with torch.no_grad():
        model()(
            ids[:, :LENGTH],
            attention_mask=mask[:, :LENGTH],
            position_ids=positions[:, :LENGTH],
            past_key_values=past,
        )
    end = 2 * LENGTH if phase == "chunk" else LENGTH + 1
    part = {
        "input_ids": ids[:, LENGTH:end],
        "attention_mask": mask[:, :end],
        "position_ids": positions[:, LENGTH:end],
    }
    return {**part, "past_key_values": past}


def inputs_of(phase: str) -> Inputs:
    """Returns the inputs of a left-padded batch: a prompt, the chunk after cached tokens, or a
    single token.
    """
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

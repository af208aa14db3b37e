"""Runs of continuous batching, which the tests of paged serving share."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from msattn.trainer.methods.gate.attn_gate import pool_keys
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.attach import Sparse, attach
from msattn.trainer.serving.paged.state import PagedState, PromptChunk

NEW = 10
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
PAGE = 32


def alone(model: Any, prompt: list[int], new: int = NEW, **options: Any) -> list[int]:
    """Returns the tokens that ``generate`` gives for one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


def answer(manager: Any, prompt: list[int], new: int = NEW) -> Any:
    """Returns what a manager that runs generates for one prompt."""
    manager.add_request(prompt, max_new_tokens=new)
    return manager.get_result(timeout=20)


def together(
    model: Any,
    sparse: Sparse,
    prompts: list[list[int]],
    generation: GenerationConfig = GREEDY,
    **options: Any,
) -> list[list[int]]:
    """Returns the tokens that ``generate_batch`` gives for each prompt."""
    config = sparse.batching_config(
        **{"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 512, **options}
    )
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=config
    ).values()
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs]


def pooled_again(
    state: PagedState, x: LayerInputs, prompt: PromptChunk, rotation: Rotation | None
) -> Tensor:
    """Returns what ``PagedState.pool_keys`` does, from the cached keys alone."""
    assert state.gate is not None
    assert rotation is not None
    keys = state.keys(x.layer, prompt.table, 0, prompt.keys, x.k.dtype)
    before_rope = rotation.invert(keys, torch.arange(prompt.keys, device=keys.device)[None])
    return pool_keys(state.gate.cached_pools, before_rope, keys, block_size=state.block_size)


def served(
    model: Any, prompts: list[list[int]], attached: dict[str, Any], **options: Any
) -> tuple[list[list[int]], Any]:
    """Returns the tokens of an attached model for each prompt in batches, and its statistics."""
    with attach(model, **attached) as sparse:
        return together(model, sparse, prompts, **options), sparse.stats()


def one_by_one(
    model: Any, prompts: list[list[int]], attached: dict[str, Any], **options: Any
) -> list[list[int]]:
    """Returns the tokens that ``generate`` of an attached model gives for each prompt alone."""
    with attach(model, **attached):
        return [alone(model, prompt, **options) for prompt in prompts]

"""Runs of continuous batching, which the tests of paged serving share."""

from typing import Any

import torch
from transformers import GenerationConfig

from msattn.trainer.serving.attach import Sparse

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

"""Engines of vLLM over the embedded model, and their answers."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.entrypoints.llm import LLM
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.factory import random_tokens
from tests.house.modules import ROOT

MODEL = ROOT / "trainer/embedded/model"
NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 4096, "max_num_batched_tokens": 256, "block_size": 64}
EVERY_KEY = {"gate": "embedded", "qmodel": "embedded", "select": "topk", "sparsity": 0.0, "probes": 64, "dense_below": 0}


@contextmanager
def engine(msattn: Any = None, *, model: Any = MODEL, **options: Any) -> Iterator[LLM]:
    """Yields an engine whose prompts are chunked: vLLM's own, or with ``msattn`` as ``additional_config``."""
    if msattn is not None:
        options |= {"attention_backend": "MSATTN", "additional_config": {"msattn": msattn}}
    llm = LLM(model=str(model), **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def prompts_of(*lengths: int, prefix: int = 0) -> list[list[int]]:
    """Returns random prompts of these lengths, which begin with ``prefix`` equal tokens."""
    shared = random_tokens(1, prefix, seed=999)[0].tolist()
    return [(shared + random_tokens(1, n, seed=n)[0].tolist())[:n] for n in lengths]


def answers(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY, adapter: LoRARequest | None = None
) -> list[list[list[int]]]:
    """Returns the tokens of each answer to each prompt."""
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, sampling, use_tqdm=False, lora_request=adapter)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def save_adapter(folder: Path, rank: int = 8) -> LoRARequest:
    """Saves a random LoRA adapter of the embedded model's queries and keys in the format of PEFT."""
    shapes = {"q_proj": 256, "k_proj": 128}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer, (name, size) in product(range(6), shapes.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, 256) / 16
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, rank) / 4
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest("adapter", 1, str(folder))


def cached_tokens(llm: LLM, prompt: list[int]) -> int:
    """Returns the number of tokens of a prompt that are found in the cache."""
    (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    return output.num_cached_tokens or 0

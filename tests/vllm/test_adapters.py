"""Adapters (LoRA) of attention weights: keys and queries reach the backend with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from msattn.trainer.errors import ModelWarning
from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats
from tests.factory import prompts_of
from tests.vllm.engines import EVERY_KEY, GREEDY, MODEL, engine

RANK = 8
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK}
SPARSE = EVERY_KEY | {"sparsity": 0.7, "probes": 8, "recent": 64}


def test_tokens_with_an_adapter_are_those_of_dense_vllm(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(65, 600)]

    def tokens(llm, adapter):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
        return [list(output.outputs[0].token_ids) for output in outputs]

    adapters = None, LoRARequest("adapter", 1, str(tmp_path))
    with engine(**OPTIONS) as llm:
        plain, adapted = (tokens(llm, adapter) for adapter in adapters)
    assert adapted != plain
    with (
        pytest.warns(ModelWarning, match="enable_lora: gates and classifiers were trained without"),
        engine(EVERY_KEY, **OPTIONS) as llm,
    ):
        found = [tokens(llm, adapter) for adapter in adapters], *llm.collective_rpc(stats)
    answered, counted = found
    assert answered == [plain, adapted]
    assert (counted["sparsity"], counted["selectivity"], counted["dense_fallbacks"]) == (0, 1, 0)


def test_a_cached_prefix_serves_its_adapter_alone(tmp_path: Path) -> None:
    """Its chunks are read sparsely, with the same blocks as without the cache."""
    save_adapter(tmp_path)
    first, second = ({"prompt_token_ids": prompt} for prompt in prompts_of(532, 700, prefix=512))
    adapter = LoRARequest("adapter", 1, str(tmp_path))

    def answered(llm, prompt, own):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=own)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    with engine(SPARSE, enable_prefix_caching=False, **OPTIONS) as llm:
        adapted, plain = (answered(llm, second, own)[0] for own in (adapter, None))
    assert adapted != plain
    with engine(SPARSE, **OPTIONS) as llm:
        answered(llm, first, adapter)
        for own, found in ((adapter, (adapted, 512)), (None, (plain, 0))):
            llm.collective_rpc(clear_stats)
            assert answered(llm, second, own) == found
            (counted,) = llm.collective_rpc(stats)
            assert 0.4 < counted["sparsity"] < 0.8
            assert 0.05 < counted["selectivity"] < 0.5
            assert counted["dense_fallbacks"] == 0


def save_adapter(folder: Path) -> None:
    """Saves an adapter of all query and key projections."""
    config = json.loads((MODEL / "config.json").read_text())
    names = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in names.items():
            rows = config[heads] * config["head_dim"]
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, config["hidden_size"])), ("B", (rows, RANK))):
                weight = 0.05 * torch.randn(shape, generator=generator)
                tensors[f"{path}.lora_{part}.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    adapter |= {"target_modules": [*names], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))

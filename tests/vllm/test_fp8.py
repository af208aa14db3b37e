"""Caches in FP8 (e4m3): tokens are those of the stored numbers, from which the pooled keys and the
buckets are, too.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from msattn.kernels.common.fp8 import dequantize
from msattn.trainer import models
from msattn.trainer.config import ModelConfig
from msattn.trainer.methods.gate.attn_gate import pool_keys
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import keys_before_rope
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats
from msattn.trainer.serving.paged.passes import PagedPass
from tests.factory import prompts_of
from tests.house.modules import ROOT
from tests.vllm.engines import EVERY_KEY, MODEL, SPARSE, answers, cached_tokens, engine

IN_FP8 = {"kv_cache_dtype": "fp8"}


READ = SamplingParams(
    temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0
)


class Rounding(DynamicCache):
    """A cache of transformers that rounds as one in FP8 with these scales, one for each head or
    for all.
    """

    def __init__(self, k_scale: Tensor, v_scale: Tensor) -> None:
        super().__init__()
        self.scales = k_scale[:, None, None], v_scale[:, None, None]

    def update(self, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> Any:
        held = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((keys, values), self.scales, strict=True)
        ]
        return super().update(*held, *others, **named)


@pytest.mark.parametrize("by_head", [False, True], ids=["a scale", "a scale for each head"])
def test_every_key_is_read_as_it_is_stored(by_head: bool, tmp_path: Path) -> None:
    """Log-probabilities of a chunked prompt and of new tokens are those of transformers with such a
    cache, but for numbers that are rounded to the other side.
    """
    loaded = models.load(ModelConfig(name="tiny", path="embedded"), device="cpu")
    model: Any = loaded.model.float()
    tokens = loaded.tokenizer((ROOT / "kernels/types.py").read_text(encoding="utf-8"))["input_ids"]
    prompt = tokens[300:1000]
    k_scale, v_scale = torch.tensor([0.05, 0.2]), torch.tensor([0.3, 0.02])
    if not by_head:
        k_scale, v_scale = k_scale[:1], v_scale[:1]
    save_with_scales(tmp_path, k_scale, v_scale)
    with engine(EVERY_KEY, model=tmp_path, dtype="float32") as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt}, READ, use_tqdm=False)
        (counted,) = llm.collective_rpc(stats)
        for layer in layers_of(llm):
            assert layer.kv_cache.dtype == torch.uint8
            assert torch.equal(layer._k_scale.cpu(), k_scale)
    assert (counted["sparsity"], counted["selectivity"], counted["dense_fallbacks"]) == (0, 1, 0)
    (answer,) = output.outputs
    read = [*prompt, *answer.token_ids]
    found = [*output.prompt_logprobs[1:], *answer.logprobs]
    got = torch.tensor([each[t].logprob for each, t in zip(found, read[1:], strict=True)])
    want, unrounded = (
        log_probabilities(model, read, cache)
        for cache in (Rounding(k_scale, v_scale), DynamicCache())
    )
    for part in (slice(len(prompt)), slice(len(prompt), None)):
        error, effect = ((x[part] - want[part]).abs().mean() for x in (got, unrounded))
        assert error < effect / 4


def test_blocks_and_buckets_are_chosen_by_the_stored_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in chunks, of a prefix that is cached, and of new tokens; pooled keys are those
    that the cache would give.
    """
    first, second = prompts_of(640, 900, prefix=640)
    attend = Sparse.attend_pages
    layers = set()

    def checked(self: Sparse, current: PagedPass, x: LayerInputs) -> Tensor:
        state = current.state
        out = attend(self, current, x)
        held = state.caches[x.layer][0][current.pages, current.offsets].transpose(0, 1)
        scale = state.scales(x.layer)["k_scale"]
        assert torch.equal(x.k[0], dequantize(held, scale, x.k.dtype))
        assert self.rotation is not None
        assert state.gate is not None
        assert torch.equal(x.k_nope, self.rotation.undo(x.k, x.angles.cos, x.angles.sin))
        for item in (
            each for prompts in current.prompts if prompts.sparse for each in prompts.items
        ):
            keys = state.keys(x.layer, item.table, 0, item.keys, x.k.dtype)
            after = x.angles._replace(positions=torch.tensor([[item.keys]], device=x.k.device))
            stored = replace(x, k=keys, k_nope=keys[:, :, :0], angles=after)
            whole = keys_before_rope(stored, 0, self.rotation)
            pooled = pool_keys(state.gate.cached_pools, whole, keys, block_size=64)
            kept = state.pooled[x.layer].flatten(0, 1)[item.blocks].transpose(0, 1)[None]
            torch.testing.assert_close(kept, pooled[:, :, : kept.shape[2]], rtol=0, atol=0.01)
            layers.add(x.layer)
        return out

    with engine(SPARSE, enable_prefix_caching=False, **IN_FP8) as llm:
        expected = answers(llm, [first]), answers(llm, [second])
    monkeypatch.setattr(Sparse, "attend_pages", checked)
    with engine(SPARSE, **IN_FP8) as llm:
        for layer in layers_of(llm):
            layer._k_scale.fill_(1.0)
        assert answers(llm, [first]) == expected[0]
        llm.collective_rpc(clear_stats)
        assert answers(llm, [second]) == expected[1]
        (counted,) = llm.collective_rpc(stats)
        assert cached_tokens(llm, second) >= 640
    assert layers
    assert 0.5 < counted["sparsity"] < 0.95
    assert 0.05 < counted["selectivity"] < 0.5
    assert counted["dense_fallbacks"] == 0


def test_pages_take_half_of_the_memory() -> None:
    pages = []
    for options in ({}, IN_FP8):
        with engine(SPARSE, **options) as llm:
            pages.append(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    assert pages[1] // 2 == pages[0]


def log_probabilities(model: Any, tokens: list[int], cache: DynamicCache) -> Tensor:
    """Returns the log-probability of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def save_with_scales(folder: Path, k_scale: Tensor, v_scale: Tensor) -> None:
    """Saves the embedded model with a cache in FP8, as llm-compressor does."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme | {"strategy": "attn_head" if len(k_scale) > 1 else "tensor"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODEL / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name, scale in (("k", k_scale), ("v", v_scale)):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = scale.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def layers_of(llm: LLM) -> list[Any]:
    return [*llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]

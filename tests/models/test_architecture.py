"""Configurations as published models have them are accepted, and keep what the attention depends
on.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from msattn.trainer.errors import UserError
from msattn.trainer.models.architecture import generation_config, pretrained_config
from msattn.trainer.models.families import check_supported, rope_parameters, served_layers
from msattn.trainer.models.rope import inverse_frequencies
from msattn.trainer.storage.model_files import ModelFiles

LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
WRITTEN = {
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
}
SLIDING = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **WRITTEN,
    }


PHI4_MINI_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.5] * 24 + [40.0] * 24,
}
# with the number of layers that may be sparse, and of rotated channels
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "Llama-2-7b": ({
        **sizes(4096, 11008, 32, 32, 32, 32000), "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096, "rope_scaling": None, "pretraining_tp": 1,
    }, 32, 128),
    "Llama-3.1-8B-Instruct": ({
        **sizes(4096, 14336, 32, 32, 8, 128256), "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0,
        "eos_token_id": [128001, 128008, 128009],
    }, 32, 128),
    "Qwen2.5-7B with YaRN": ({
        **sizes(3584, 18944, 28, 28, 4, 152064), "model_type": "qwen2",
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        **SLIDING,
    }, 28, 128),
    "Qwen3-8B": ({
        **sizes(4096, 12288, 36, 32, 8, 151936), "model_type": "qwen3", "head_dim": 128,
        "attention_bias": False,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "sliding_window": None,
        "use_sliding_window": False,
    }, 36, 128),
    "SmolLM3-3B": ({
        **sizes(2048, 11008, 36, 16, 4, 128256), "model_type": "smollm3",
        "max_position_embeddings": 65536,
        "layer_types": ["full_attention"] * 36, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "mlp_bias": False,
    }, 36, 128),
    "Qwen3-30B-A3B": ({
        **sizes(2048, 6144, 48, 32, 4, 151936), "model_type": "qwen3_moe", "head_dim": 128,
        "max_position_embeddings": 40960, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "sliding_window": None,
        "use_sliding_window": False, "rope_theta": 1000000.0,
    }, 48, 128),
    "Phi-4-mini-instruct": ({
        **sizes(3072, 8192, 32, 24, 8, 200064), "model_type": "phi3",
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": PHI4_MINI_ROPE, "rope_theta": 10000.0, "sliding_window": 262144,
    }, 32, 96),
    "gemma-3-1b-it": ({
        **sizes(1152, 6912, 26, 4, 1, 262144), "model_type": "gemma3_text", "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "cache_implementation": "hybrid",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }, 4, 256),
    "Gemma 4 of 60 layers": ({
        **sizes(5376, 21504, 60, 32, 16, 262144), "model_type": "gemma4_text", "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144,
        "use_bidirectional_attention": "vision",
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }, 10, 512),
    "GLM-4.5-Air": ({
        **sizes(4096, 10944, 46, 96, 8, 151552), "model_type": "glm4_moe", "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
        "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072, "norm_topk_prob": True, "rope_theta": 1000000,
        "use_qk_norm": False,
    }, 46, 64),
    "Ministral-3-8B, text": ({
        **sizes(4096, 14336, 34, 32, 8, 131072), "model_type": "ministral3", "head_dim": 128,
        "sliding_window": None,
        "max_position_embeddings": 262144, "rope_parameters": {
            "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
            "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
            "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }, 34, 128),
    "Hunyuan-7B-Instruct": ({
        **sizes(4096, 14336, 32, 32, 8, 128167), "model_type": "hunyuan_v1_dense", "head_dim": 128,
        "eod_token_id": 127967,
        "max_position_embeddings": 32768, "use_qk_norm": True, "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    }, 32, 128),
    "Qwen3-Next-80B-A3B-Instruct": ({
        **sizes(2048, 5120, 48, 16, 2, 151936), "model_type": "qwen3_next", "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
    }, 12, 64),
}  # fmt: skip
# of Gemma 4
LAYERS_ALONE = {"head_dim", "num_key_value_heads", "global_head_dim", "num_global_key_value_heads"}


@pytest.mark.parametrize("name", MODELS)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    document, served, rotated = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(document))
    config: Any = pretrained_config(ModelFiles("model.path=a folder", tmp_path))
    check_supported(config)
    assert len(served_layers(config)) == served
    assert 2 * len(inverse_frequencies(config)[0]) == rotated
    changed = {
        *WRITTEN,
        *SLIDING,
        "model_type",
        "architectures",
        "auto_map",
        "use_cache",
        "full_attention_interval",
    }
    changed |= {
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
    }
    changed |= {"sliding_window_pattern"} | (
        LAYERS_ALONE if "global_head_dim" in document else set()
    )
    for key in {*document} - changed:
        assert getattr(config, key) == document[key], key
    scaling = document.get("rope_parameters") or document.get("rope_scaling") or {"type": "default"}
    scaling, found = scaling.get("full_attention", scaling), rope_parameters(config)
    base = scaling.get("rope_theta", document.get("rope_theta", 10000.0))
    if alpha := scaling.get("alpha"):
        assert found == {"rope_type": "default", "rope_theta": base * alpha ** (128 / 126)}
        return
    assert found["rope_type"] == scaling.get("rope_type", scaling.get("type"))
    assert found["rope_theta"] == base
    assert found.get("factor") == scaling.get("factor")


def test_a_generation_configuration(tmp_path: Path) -> None:
    written = {
        "do_sample": True,
        "eos_token_id": [2, 3],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (tmp_path / "generation_config.json").write_text(
        json.dumps(written | {"transformers_version": "4.42.0.dev0"})
    )
    loaded = generation_config(ModelFiles("model", tmp_path), LlamaConfig())
    assert {key: getattr(loaded, key) for key in written} == written


@pytest.mark.parametrize(
    ("model", "key"),
    [("Llama-3.1-8B-Instruct", "attention_bias"), ("Qwen3-8B", "use_sliding_window")],
)
def test_null_flags_are_false(tmp_path: Path, model: str, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model][0] | {key: None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": None}))
    files = ModelFiles("model", tmp_path)
    config = pretrained_config(files)
    assert getattr(config, key) is False
    assert generation_config(files, config).do_sample is False


def test_a_null_attention_factor_is_the_default(tmp_path: Path) -> None:
    described = dict(MODELS["Llama-3.1-8B-Instruct"][0])
    found = []
    for extra in ({}, {"attention_factor": None}):
        described["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8192,
            **extra,
        }
        (tmp_path / "config.json").write_text(json.dumps(described))
        config = pretrained_config(ModelFiles("model", tmp_path))
        check_supported(config)
        found.append(inverse_frequencies(config))
    assert torch.equal(found[0][0], found[1][0])
    # YaRN (2023), equation 22
    assert found[0][1] == found[1][1] == pytest.approx(0.1 * math.log(4) + 1)


def test_new_keys_reach_transformers(tmp_path: Path) -> None:
    """But none that would choose how the model runs, or replace a method of the configuration."""
    taken = {"a_key_of_tomorrow": 0.5, "pretraining_tp": 2, "layer_types": ["full_attention"] * 32}
    dropped = {
        "save_pretrained": "x",
        "_attn_implementation": "nobody/nothing",
        "use_cache": "x",
        "text_config": {"a": 1},
    }
    (tmp_path / "config.json").write_text(
        json.dumps(MODELS["Llama-2-7b"][0] | taken | dropped | {"num_labels": 2**40})
    )
    config: Any = pretrained_config(ModelFiles("model", tmp_path))
    assert {key: getattr(config, key) for key in taken} == taken
    assert callable(config.save_pretrained)
    assert config.get_text_config(decoder=True) is config
    assert (config.use_cache, config.num_labels, config._attn_implementation) == (True, 2, None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pretraining_tp", "hostile", "pretraining_tp"),
        (
            "num_hidden_layers",
            10**6,
            r"num_hidden_layers=1000000: Input should be less than or equal to 1024",
        ),
        ("compression_config", {"bits": 4}, "compression_config"),
        ("num_experts_per_tok", 9, "num_experts_per_tok=9: there are 8 experts"),
        ("moe_topk", [2, 9], r"moe_topk=\[2, 9\]: there are 8 experts"),
        ("is_causal", False, "is_causal=False: expected causal attention"),
        # PyTorch's SDPA raises a TypeError
        ("is_causal", 1, "is_causal=1: Input should be a valid boolean"),
    ],
)
def test_bad_values_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(MODELS["Llama-2-7b"][0] | {"num_experts": 8, key: value})
    )
    with pytest.raises(UserError, match=message):
        check_supported(pretrained_config(ModelFiles("model", tmp_path)))

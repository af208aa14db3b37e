"""Small random decoders, the inputs of their layers, and a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap

# whose layers are Llama's; they stand for all families in most tests
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
ROPE_TYPES = tuple(ROPES)
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, **ROPES["yarn"]}
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MANY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
BETWEEN_LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": PARTIAL,
}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {  # with the keys that their small models need
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {**MIXED, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
    "gemma3_text": {
        **MIXED,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "sliding_attention": DEFAULT,
        },
    },
    "mixtral": EXPERTS,
    "qwen3_moe": {**MANY_EXPERTS, "num_experts": 4},
    "phi3": {"rope_parameters": PARTIAL, "sliding_window": 256},
    "glm": {"rope_parameters": PARTIAL},
    "glm4": {"rope_parameters": PARTIAL},
    "llama4_text": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 24,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "floor_scale": 16,
        "num_experts_per_tok": 1,
    },
    "gemma2": {
        **MIXED,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {**MIXED, **EXPERTS, "rope_parameters": YARN},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "attention_k_eq_v": True,
        "per_layer_config": {
            layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("1", "3")
        },
        "vocab_size_per_layer_input": 4096,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": DEFAULT,
        },
    },
    "glm4_moe": {
        **MANY_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "rope_parameters": PARTIAL,
    },
    "ministral3": {
        "rope_parameters": YARN
        | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
    },
    "hunyuan_v1_dense": {
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 100.0,
            "factor": 1.0,
            "alpha": 8.0,
        }
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**MANY_EXPERTS, "num_experts": 4},
    "qwen3_next": {
        **BETWEEN_LINEAR,
        **MANY_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": BETWEEN_LINEAR,
    "qwen3_5_moe_text": {
        **BETWEEN_LINEAR,
        **MANY_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
}
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that attention is not uniform
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_architecture(
    family: str = "llama", rope: str = "default", **overrides: Any
) -> dict[str, Any]:
    """Returns the keys of a small ``config.json``; ``overrides`` replace any of them."""
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    sizes = {
        key: size
        for key, size in SIZES.items()
        if (family, key) != ("qwen3_5_moe_text", "intermediate_size")
    }
    window = {"sliding_window": None} if family == "mistral" else {}
    return {
        "model_type": family,
        **sizes,
        "rope_parameters": parameters,
        **window,
        **OTHER_FAMILIES.get(family, {}),
        **overrides,
    }


def tiny_config(family: str = "llama", rope: str = "default", **overrides: Any) -> PreTrainedConfig:
    architecture = tiny_architecture(family, rope, **overrides)
    return AutoConfig.for_model(architecture.pop("model_type"), **architecture)


def tiny_model(
    family: str = "llama", rope: str = "default", seed: int = 0, **overrides: Any
) -> Any:
    """Returns a frozen fp32 model in eval mode on the CPU; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # SDPA neither caps nor has sinks
        own = {"attn_implementation": "eager"} if family in ("gemma2", "gpt_oss") else {}
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, rope, **overrides), dtype=torch.float32, **own
        )
        for name, parameter in model.named_parameters():
            # the defaults 1 and 0 would hide a missing norm or bias
            if name.endswith(("norm.weight", "proj.bias")):
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=1.0, std=1.0)
    return model.eval().requires_grad_(False)


def random_tokens(batch: int, length: int, seed: int = 0, vocab_size: int = 128) -> Tensor:
    """Returns a LongTensor [batch, length] without token 0, the padding token."""
    return torch.randint(
        1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


@torch.no_grad()
def inputs_of_layers(model: Any, ids: Tensor, **inputs: Any) -> list[LayerInputs]:
    """Returns the inputs of the attention of each layer of ``model``."""
    recorded: list[LayerInputs] = []

    def recording_attention(x: LayerInputs) -> Tensor:
        recorded.append(x)
        return dense_attention(x)

    with tap(model, recording_attention):
        run_backbone(model, ids, **inputs)
    return recorded


def random_partition(
    buckets: int = 6,
    *,
    layers: Sequence[int] = (0, 1),
    heads: int = 2,
    size: int = 16,
    rope: bool = False,
    seed: int = 0,
) -> KMeans:
    """Returns random centroids, by default for :func:`tiny_model`."""
    drawn = torch.randn(
        len(layers), heads, buckets, size, generator=torch.Generator().manual_seed(seed)
    )
    return KMeans(torch.nn.functional.normalize(drawn, dim=-1), list(layers), rope)


def prompts_of(*lengths: int, prefix: int = 0) -> list[list[int]]:
    """Returns random prompts of these lengths, which begin with ``prefix`` equal tokens."""
    shared = random_tokens(1, prefix, seed=999)[0].tolist()
    return [(shared + random_tokens(1, n, seed=n)[0].tolist())[:n] for n in lengths]


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads rows [N_b] on the left; returns ``input_ids`` and ``attention_mask``, both [B, max
    N].
    """
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.cat((row.new_zeros(length - len(row)), row)) for row in rows])
    mask = torch.stack([(torch.arange(length) >= length - len(row)).long() for row in rows])
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """Returns the positions of left-padded tokens, int64 ``[B, N]``."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def save_tokenizer(folder: Path, vocab_size: int = 128) -> None:
    """Saves a word-level tokenizer with the vocabulary ``t0 t1 ...`` in transformers' format."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    words = Tokenizer(WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t0").save_pretrained(
        folder
    )


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """Loads the tokenizer of the model that ships with the package."""
    return PreTrainedTokenizerFast.from_pretrained(str(EMBEDDED_MODEL))


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif "
    "%}"
)

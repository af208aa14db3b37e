"""Small GGUF files, written with llama.cpp's own package from models of tests."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, RopeScalingType
from gguf.gguf_writer import GGUFWriter
from gguf.quants import quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.factory import tiny_model

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 8192}
SIZE = 272  # tokens: bytes, merges, three special ones, and unused ones
# of " the", blank lines and double spaces
MERGES = ["t h", "th e", "\u0120 the", "\u010a \u010a", "\u0120 \u0120"]
SPECIAL = ["<|start|>", "<|end|>", "<|unused|>"]
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_model(family: str = "llama", **overrides: Any) -> Any:
    """Returns a small model whose configuration a GGUF file can state: layers of Gemma alternate in
    a fixed pattern.
    """
    of_gemma: dict[str, Any] = {}
    if family == "gemma2":
        kinds = ["sliding_attention", "full_attention"]
        of_gemma = {"num_hidden_layers": 2, "layer_types": kinds, "query_pre_attn_scalar": 16}
    if family == "gemma3_text":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
        own = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        of_gemma = {
            "num_hidden_layers": 6,
            "layer_types": kinds,
            "query_pre_attn_scalar": 16,
            "rope_parameters": own,
        }
    return tiny_model(
        family, vocab_size=SIZE, bos_token_id=261, eos_token_id=262, **of_gemma | overrides
    )


def write_gguf(path: Path, model: Any, kind: str = "F32", **metadata: Any) -> Path:
    """Writes ``model`` with a byte-level tokenizer; ``metadata`` are further keys, with ``__`` for
    a dot; None removes one.

    Parameters
    ----------
    kind : type of the matrices, of ``gguf.GGMLQuantizationType``; other tensors are in single
        precision.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, 1, 2 / config.head_dim))
        writer.add_tensor(
            "rope_freqs.weight",
            (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32),
        )
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_tokenizer(writer)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key.replace("__", "."), None)
        if value is not None:
            add = {str: writer.add_string, int: writer.add_int64, bool: writer.add_bool}[
                type(value)
            ]
            add(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_stored(name, weight.float().numpy(), config, architecture)
        if values.ndim == 2 and kind != "F32":
            packed = quantize(values, GGMLQuantizationType[kind])
            writer.add_tensor(
                gguf_name(name, architecture), packed, raw_dtype=GGMLQuantizationType[kind]
            )
        else:
            writer.add_tensor(gguf_name(name, architecture), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str) -> str:
    for ours, theirs in (
        NAMES | (GEMMA_NORMS if architecture.startswith("gemma") else NORMS)
    ).items():
        name = name.replace(f"{ours}.", f"{theirs}.")
    return name


def _as_stored(
    name: str, values: np.ndarray[Any, Any], config: Any, architecture: str
) -> np.ndarray[Any, Any]:
    """Returns a weight as llama.cpp's converter stores it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if architecture == "llama" and heads is not None:
        values = (
            values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    return (
        values + 1
        if architecture.startswith("gemma") and name.endswith("norm.weight")
        else np.ascontiguousarray(values)
    )


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    # no merges lead to the first
    unused = ["zoo", *(f"[PAD{i}]" for i in range(len(tokens) + 1, SIZE))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + unused)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3 + [5] * len(unused))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(261)
    writer.add_eos_token_id(262)
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    )

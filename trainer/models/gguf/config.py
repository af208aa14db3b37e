"""The configuration of a model in a GGUF file, under the keys of transformers' ``config.json``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msattn.trainer.errors import UserError
from msattn.trainer.storage.gguf_file import GgufFile

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # by architecture
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
KEYS = {  # of each architecture's own metadata
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
SLIDING = ("gemma2", "gemma3")  # whose layers have the window; Qwen's files may name one that no layer uses
OF_HIDDEN = {("gemma2", 46), ("gemma3", 62)}  # 27B, by layers: scores are divided by the root of hidden size over heads
LOCAL_ROPE_BASE = 1e4  # of Gemma 3's sliding layers
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # of Llama 3.1's RoPE, in all its models


def gguf_config(file: GgufFile, where: str) -> dict[str, Any]:
    """Returns the keys of ``config.json`` for a GGUF file; their values are not checked.

    Parameters
    ----------
    where : beginning of error messages.

    Raises
    ------
    UserError : a part of a file, another architecture, experts, a RoPE that is not supported, or no embedding.
    """
    metadata, architecture = file.metadata, file.metadata.get("general.architecture")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UserError(f"{where}: one of {metadata['split.count']} parts: join them with llama-gguf-split --merge")
    if architecture not in FAMILIES:
        raise UserError(f"{where}: general.architecture={architecture!s:.60}: accepted in GGUF files are {', '.join(FAMILIES)}")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    if own.get("expert_count"):
        raise UserError(
            f"{where}: {architecture}.expert_count={own['expert_count']!s:.20}: accepted are models without experts"
        )
    if EMBEDDING not in file.tensors or not file.tensors[EMBEDDING].shape:
        raise UserError(f"{where}: there is no tensor {EMBEDDING}")
    config = {
        name: own[key] for key, name in KEYS.items() if key in own and (name != "sliding_window" or architecture in SLIDING)
    }
    config |= {name: metadata[f"tokenizer.ggml.{key}"] for key, name in TOKENS.items() if f"tokenizer.ggml.{key}" in metadata}
    config |= {
        "model_type": FAMILIES[architecture],
        "vocab_size": file.tensors[EMBEDDING].shape[0],  # may be padded beyond the tokens
        "tie_word_embeddings": HEAD not in file.tensors,
    }
    if architecture in SLIDING:
        config |= _of_gemma(architecture, config, own)
    if ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3_rope(file.floats(ROPE_FACTORS, where), config.get("rope_theta"), where)
    elif (kind := own.get("rope.scaling.type", "none")) != "none":
        config["rope_scaling"] = _rope_scaling(kind, own, where)
    return config


def _rope_scaling(kind: Any, own: Mapping[str, Any], where: str) -> dict[str, Any]:
    if kind not in ("linear", "yarn"):
        raise UserError(f"{where}: rope.scaling.type={kind!s:.40}: accepted in GGUF files are none, linear, yarn")
    scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length")
    return scaling


def _llama3_rope(factors: Sequence[float], base: Any, where: str) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's RoPE, of which a file has the divisors of the frequencies alone."""
    largest = max(factors, default=0.0)
    known = isinstance(base, float) and base > 1 and largest >= 1
    for i, found in enumerate(factors if known else ()):
        wavelength = 2 * math.pi * base ** (i / len(factors))
        smooth = min(max((ORIGINAL / wavelength - LOW) / (HIGH - LOW), 0.0), 1.0)
        known = known and math.isclose(found, 1 / ((1 - smooth) / largest + smooth), rel_tol=1e-3)
    if not known:
        raise UserError(f"{where}: {ROPE_FACTORS} has frequencies of another RoPE than Llama 3.1's")
    own = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": ORIGINAL}
    return {"rope_type": "llama3", "factor": largest, **own}


def _of_gemma(architecture: str, config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what llama.cpp knows of Gemma by its number of layers, and what its files call differently."""
    heads, size = config.get("num_attention_heads"), config.get("head_dim", 256)
    large = isinstance(heads, int) and heads > 0 and (architecture, config.get("num_hidden_layers")) in OF_HIDDEN
    found: dict[str, Any] = {"head_dim": size, "query_pre_attn_scalar": config["hidden_size"] // heads if large else size}
    if architecture == "gemma3":
        found["rope_local_base_freq"] = own.get("rope.freq_base_swa", LOCAL_ROPE_BASE)
    return found

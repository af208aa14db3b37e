"""Supported model families, and access to their configurations."""

from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def decoder(model: "PreTrainedModel") -> Any:
    """Returns the module with the embedding, ``layers`` and the final norm, also of a PEFT model."""
    return model.get_decoder()


def project_heads(attention: Any, hidden_states: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Returns queries ``[B, Hq, N, D]``, keys and values ``[B, Hkv, N, D]`` of an attention module before RoPE."""
    shape = (*hidden_states.shape[:2], -1, attention.head_dim)
    q, k, v = (getattr(attention, f"{name}_proj")(hidden_states).view(shape) for name in "qkv")
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def num_layers(config: "PreTrainedConfig") -> int:
    return config.num_hidden_layers


def num_heads(config: "PreTrainedConfig") -> int:
    return config.num_attention_heads


def num_kv_heads(config: "PreTrainedConfig") -> int:
    return getattr(config, "num_key_value_heads", None) or num_heads(config)


def head_dim(config: "PreTrainedConfig") -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // num_heads(config)


def max_length(config: "PreTrainedConfig") -> int:
    """Returns the longest sequence in tokens.

    Dynamic RoPE scales the context at run time; for the other types ``max_position_embeddings`` is already scaled.
    """
    rope, positions = config.rope_parameters, int(config.max_position_embeddings)
    return int(positions * rope["factor"]) if rope["rope_type"] == "dynamic" else positions


def check_length(config: "PreTrainedConfig", seq_len: int, given: str = "") -> None:
    """Checks that a sequence fits the model's positions.

    Parameters
    ----------
    given : the argument that asks for so many tokens, for the message; by default ``data.seq_len`` and its value.

    Raises
    ------
    UserError : ``seq_len`` exceeds :func:`max_length`.
    """
    longest = max_length(config)
    if seq_len > longest:
        raise UserError(
            f"{given or f'data.seq_len={seq_len}'}: the model has positions for {longest} tokens; "
            "shorten it, or extend the context with model.rope_scaling={rope_type: yarn, factor: ...}"
        )


def check_supported(config: "PreTrainedConfig") -> None:
    """Checks that the tap and the kernels support the model.

    Raises
    ------
    UserError : another family, soft-capped scores, sliding-window layers (the message names them), another RoPE type,
        unsupported head counts or head sizes.
    """
    if getattr(config, "attn_logit_softcapping", None):
        raise UserError(f"model: soft-capped scores (attn_logit_softcapping={config.attn_logit_softcapping}) are not supported")
    if config.model_type not in FAMILIES:
        raise UserError(f"model_type={config.model_type}: accepted are the decoders {', '.join(FAMILIES)}")
    sliding = sliding_layers(config)
    if sliding:
        raise UserError(
            f"model: layers {', '.join(map(str, sliding))} attend through a sliding window of {config.sliding_window} tokens; "
            "accepted are full-attention layers"
        )
    rope = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"rope_type={rope['rope_type']}: accepted are {', '.join(ROPE_TYPES)}")
    factor = rope.get("factor", 1.0 if rope["rope_type"] == "default" else None)
    if not isinstance(factor, int | float) or factor < 1:
        raise UserError(f"rope_type={rope['rope_type']}, factor={factor}: accepted are numbers of 1 or more")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor={rope['partial_rotary_factor']}: accepted is 1 (all channels rotate)")
    heads, kv_heads, size = num_heads(config), num_kv_heads(config), head_dim(config)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads={heads}: accepted are multiples of num_key_value_heads={kv_heads}")
    if size % 8 or not 8 <= size <= 256:
        raise UserError(f"head_dim={size}: accepted are multiples of 8 up to 256")


def sliding_layers(config: "PreTrainedConfig") -> list[int]:
    """Returns the indices of the layers with sliding-window attention."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:  # Mistral's model reads sliding_window alone
        return list(range(num_layers(config))) if getattr(config, "sliding_window", None) else []
    return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]

"""The check that the tap and the kernels support a model, with a reason by name for each one that they do not."""

from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError
from msattn.trainer.models.families.family import FAMILIES
from msattn.trainer.models.families.layers import CHUNKED, SLIDING, attention_layers, layer_kinds
from msattn.trainer.models.families.shape import ROPE_TYPES, head_dim, num_heads, num_kv_heads, rope_parameters, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_supported(config: "PreTrainedConfig") -> None:
    """Checks that the tap and the kernels support the model.

    Raises
    ------
    UserError : another family, attention that the kernels do not compute, no layer with full attention, another RoPE type,
        unsupported head counts or head sizes.
    """
    config = text_config(config)
    if reason := refusal(config):
        raise UserError(f"model: {reason}")
    if config.model_type not in FAMILIES:
        raise UserError(f"model_type={config.model_type}: accepted are the decoders {', '.join(FAMILIES)}")
    _check_rope(config)
    heads, kv_heads, size = num_heads(config), num_kv_heads(config), head_dim(config)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads={heads}: accepted are multiples of num_key_value_heads={kv_heads}")
    if size % 8 or not 8 <= size <= 256:
        raise UserError(f"head_dim={size}: accepted are multiples of 8 up to 256")
    for kind, key in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in layer_kinds(config) and not getattr(config, key, None):
            raise UserError(f"{key}={getattr(config, key, None)}: layers of type {kind} need a number of tokens")
    layers = attention_layers(config)
    if all(layer.kept for layer in layers):
        raise UserError(f"model: no layer can be sparse; of layer 0: {layers[0].kept}; accepted are full-attention layers")


def refusal(config: Any) -> str | None:
    """Returns the reason why the attention of a model is not supported, or None."""
    if getattr(config, "kv_lora_rank", None):
        return (
            f"model_type={config.model_type!s:.60}: multi-head latent attention (kv_lora_rank={config.kv_lora_rank!s:.20}) "
            "caches latent vectors; accepted are decoders that cache keys, which gates and buckets read"
        )
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention=True: accepted is causal attention"
    if not getattr(config, "is_causal", True):
        return "is_causal=False: accepted is causal attention"
    return None


def _check_rope(config: Any) -> None:
    """Raises UserError for RoPE that cannot be computed or inverted."""
    rope = rope_parameters(config)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"rope_type={rope['rope_type']}: accepted are {', '.join(ROPE_TYPES)}")
    factor = rope.get("factor", 1.0 if rope["rope_type"] in ("default", "longrope") else None)
    if not isinstance(factor, int | float) or factor < 1:
        raise UserError(f"rope_type={rope['rope_type']}, factor={factor}: accepted are numbers of 1 or more")
    share = rope.get("partial_rotary_factor", 1.0)
    rotated = share * head_dim(config)
    if rotated != int(rotated) or rotated % 2 or not 0 < share <= 1:
        raise UserError(f"partial_rotary_factor={share}: accepted are even numbers of {head_dim(config)} channels")
    for name in ("short_factor", "long_factor") if rope["rope_type"] == "longrope" else ():
        if len(rope[name]) != rotated // 2:
            raise UserError(f"rope_type=longrope: {name} has {len(rope[name])} numbers; accepted are {int(rotated // 2)}")

"""Model families: which decoders are supported, what distinguishes them, and access to their
configurations.

For models with images or audio, the text configuration counts. Other code calls these functions and
never compares family names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from msattn.kernels.common.checks import MAX_HEAD_SIZE
from msattn.trainer.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

# earlier versions page caches in another way, and build other tokenizers of GGUF files
TRANSFORMERS_NEEDED = (5, 23)
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class Family:
    """Differences of a family's decoders from Llama's, taken from the code of their attention
    modules.

    With ``llama_layers``, a layer computes the same as Llama's, up to biases and a norm of each
    query and key, so the fused modules and captured steps of :mod:`msattn.trainer.serving` can
    replace it.
    """

    llama_layers: bool = False
    # a sliding_window in the configuration holds for every layer; others list layer_types
    one_window: bool = False
    # the norms of queries and keys run on [B, H, N, D], not on the outputs of the projections
    heads_first: bool = False
    # RoPE rotates neighboring channels 2 i and 2 i + 1, not i and i + r / 2 of r rotated ones
    interleaved: bool = False
    # rotates a share of the channels, if the configuration says so; others would ignore that share
    partial_rope: bool = False
    # the rotary embedding returns each angle once, not for both channels of a pair
    half_angles: bool = False
    # softmax of scaled products and nothing else, so that SDPA computes it
    plain_scores: bool = True
    # RoPE is not given as cos and sin, so that only layers without RoPE are served
    complex_rope: bool = False
    # by norms or scales; queries and keys "before RoPE" are then the final ones, rotated back
    changed_after_rope: bool = False
    # "dynamic" RoPE with an alpha is ordinary RoPE with another base; other families ignore alpha
    fixed_alpha: bool = False
    # MLPs are mixtures of experts, whose size is another number than intermediate_size
    experts: bool = False
    # keys of the configuration that attention depends on besides those of all families
    hashed: tuple[str, ...] = ()

    def modules_before_rope(self, attention: Any) -> tuple[Any, Any]:
        """Returns the modules whose outputs are the queries and the keys before RoPE: norms,
        projections, or a joint one.
        """
        if hasattr(attention, "qkv_proj"):
            return attention.qkv_proj, attention.qkv_proj
        return getattr(attention, "q_norm", None) or attention.q_proj, getattr(
            attention, "k_norm", None
        ) or attention.k_proj

    def heads_before_rope(
        self, attention: Any, outputs: "tuple[Tensor, Tensor]", q: "Tensor"
    ) -> "tuple[Tensor, Tensor]":
        """Returns queries ``[B, Hq, N, D]`` and keys ``[B, Hkv, N, D]`` from the outputs of
        :meth:`modules_before_rope`.

        ``q`` are the queries after RoPE.
        """
        if self.heads_first:
            return outputs
        batch, heads, tokens, size = q.shape
        queries, keys = outputs
        if hasattr(attention, "qkv_proj"):
            queries, keys, _ = queries.tensor_split(
                (heads * size, (queries.shape[-1] + heads * size) // 2), dim=-1
            )
        q_nope, k_nope = (
            states.reshape(batch, tokens, -1, size).transpose(1, 2) for states in (queries, keys)
        )
        return q_nope, k_nope

    def cos_sin(self, position_embeddings: "tuple[Tensor, Tensor]") -> "tuple[Tensor, Tensor]":
        """Returns cos and sin of each rotated channel, ``[B or 1, N, r]``, from what the rotary
        embedding returned.
        """
        cos, sin = position_embeddings
        if self.half_angles:
            return cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        if self.interleaved:
            half = cos.shape[-1] // 2
            cos, sin = (values[..., :half].repeat_interleave(2, dim=-1) for values in (cos, sin))
        return cos, sin


MIXTURE = Family(one_window=True, experts=True, hashed=("sliding_window",))
GEMMA = ("hidden_activation", "query_pre_attn_scalar", "layer_types", "sliding_window")
GEMMA4 = (
    *(
        "hidden_activation",
        "layer_types",
        "sliding_window",
        "attention_k_eq_v",
        "num_kv_shared_layers",
    ),
    *("hidden_size_per_layer_input", "enable_moe_block"),
)
LLAMA4 = ("use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale")
LINEAR_HEADS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
BETWEEN_LINEAR = ("layer_types", "linear_conv_kernel_dim", *LINEAR_HEADS)
FAMILIES: dict[str, Family] = {
    "llama": Family(llama_layers=True),
    "mistral": Family(llama_layers=True, one_window=True),
    "qwen2": Family(llama_layers=True),
    "qwen3": Family(llama_layers=True),
    "granite": Family(
        hashed=("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    ),
    "smollm3": Family(hashed=("no_rope_layers", "layer_types", "sliding_window")),
    "olmo2": Family(),
    "olmo3": Family(hashed=("layer_types", "sliding_window")),
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE,
    "gemma2": Family(plain_scores=False, hashed=(*GEMMA, "attn_logit_softcapping")),
    "gemma3_text": Family(heads_first=True, hashed=GEMMA),
    "phi3": Family(one_window=True, partial_rope=True, hashed=("sliding_window",)),
    "glm": Family(interleaved=True, partial_rope=True),
    "glm4": Family(interleaved=True, partial_rope=True),
    "llama4_text": Family(
        complex_rope=True,
        experts=True,
        hashed=(*LLAMA4, "layer_types", "no_rope_layers", "attention_chunk_size"),
    ),
    "gpt_oss": Family(
        plain_scores=False, half_angles=True, experts=True, hashed=("layer_types", "sliding_window")
    ),
    "gemma4_text": Family(partial_rope=True, hashed=GEMMA4),
    "glm4_moe": Family(partial_rope=True, experts=True, hashed=("use_qk_norm",)),
    "ministral3": Family(one_window=True, changed_after_rope=True, hashed=("sliding_window",)),
    "hunyuan_v1_dense": Family(changed_after_rope=True, fixed_alpha=True),
    "hunyuan_v1_moe": Family(changed_after_rope=True, fixed_alpha=True, experts=True),
    "hy_v3": Family(heads_first=True, experts=True),
    "qwen3_next": Family(partial_rope=True, experts=True, hashed=BETWEEN_LINEAR),
    "qwen3_5_text": Family(partial_rope=True, hashed=BETWEEN_LINEAR),
    "qwen3_5_moe_text": Family(partial_rope=True, experts=True, hashed=BETWEEN_LINEAR),
}


def family_of(config: "PreTrainedConfig") -> Family:
    """Returns the family of a supported model."""
    return FAMILIES[text_config(config).model_type]


class LayerAttention(NamedTuple):
    """The attention of one layer."""

    layer: int
    rotates: bool  # has RoPE
    # the reason why it keeps the model's own attention; None if it is served and may be sparse
    kept: str | None


def attention_layers(config: "PreTrainedConfig") -> list[LayerAttention]:
    """Returns the attention of each layer of a supported model: whether it can be sparse, and if
    not, why.

    A window that is at least as long as the model's positions is ignored.
    """
    config = text_config(config)
    # 1 stands for a layer with RoPE
    rotates = getattr(config, "no_rope_layers", None) or [True] * num_layers(config)
    own_keys = num_layers(config) - (getattr(config, "num_kv_shared_layers", None) or 0)
    kept = [_kept(config, kind, rotates[i]) for i, kind in enumerate(layer_kinds(config))]
    kept[own_keys:] = [reason or "it reads the keys of another layer" for reason in kept[own_keys:]]
    return [LayerAttention(i, bool(rotates[i]), reason) for i, reason in enumerate(kept)]


def served_layers(config: "PreTrainedConfig") -> list[int]:
    """Returns the indices of the layers that may be sparse."""
    return [attention.layer for attention in attention_layers(config) if attention.kept is None]


def layer_kinds(config: "PreTrainedConfig") -> list[str]:
    """Returns the type of each layer."""
    if family_of(config).one_window:
        kind = FULL if getattr(config, "sliding_window", None) is None else SLIDING
        return [kind] * num_layers(config)
    return list(getattr(config, "layer_types", None) or [FULL] * num_layers(config))


def _kept(config: "PreTrainedConfig", kind: str, rotates: bool) -> str | None:
    """Returns the reason why layers of this type keep the model's own attention, or None."""
    if kind == FULL:
        return (
            "its RoPE multiplies complex numbers"
            if rotates and family_of(config).complex_rope
            else None
        )
    if kind == SLIDING:
        window = config.sliding_window
        whole = family_of(config).one_window and window >= max_length(config)
        return None if whole else f"it attends through a sliding window of {window} tokens"
    if kind == CHUNKED:
        return f"it attends within chunks of {config.attention_chunk_size} tokens"
    return (
        "it is linear attention, which caches no keys" if kind == LINEAR else f"its type is {kind}"
    )


def decoder(model: "PreTrainedModel") -> Any:
    """Returns the module with the embedding, ``layers`` and the final norm, also of a PEFT
    model.
    """
    model_decoder: Any = model.get_decoder()
    # Llama 4 returns the model with its head
    return model_decoder if hasattr(model_decoder, "layers") else model_decoder.model


def text_config(config: "PreTrainedConfig") -> Any:
    """Returns the configuration of the decoder of text; it is ``config`` itself for a language
    model.
    """
    return config.get_text_config(decoder=True)


def num_layers(config: "PreTrainedConfig") -> int:
    return text_config(config).num_hidden_layers


def num_heads(config: "PreTrainedConfig") -> int:
    return text_config(config).num_attention_heads


def num_kv_heads(config: "PreTrainedConfig") -> int:
    return getattr(full_attention_config(config), "num_key_value_heads", None) or num_heads(config)


def head_dim(config: "PreTrainedConfig") -> int:
    config = full_attention_config(config)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def full_attention_config(config: "PreTrainedConfig") -> Any:
    """Returns the configuration of full-attention layers, whose sizes differ from those of other
    layers in some models.

    Raises UserError if the full-attention layers differ from each other.
    """
    text = text_config(config)
    if not getattr(text, "is_heterogeneous", False):
        return text
    try:
        return text.per_layer_config[FULL]
    except ValueError as error:
        raise UserError(f"per_layer_config: {first_line(error)}") from error


def shape(config: "PreTrainedConfig") -> dict[str, int]:
    """Returns the numbers of layers and heads, and their size, as artifacts record them."""
    heads = {
        "num_heads": num_heads(config),
        "num_kv_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
    }
    return {"num_layers": num_layers(config), **heads}


def check_shape(name: str, made_for: Mapping[str, int], config: "PreTrainedConfig") -> None:
    """Raises UserError, which begins with ``name``, if a number of ``made_for`` is not that of the
    model.
    """
    model = shape(config)
    for field, value in made_for.items():
        if value != model[field]:
            raise UserError(
                f"{name}: it is for another model; its {field} is {value}, this model's is "
                f"{model[field]}"
            )


def rope_parameters(config: "PreTrainedConfig") -> dict[str, Any]:
    """Returns the RoPE parameters; if each layer type has its own, those of full-attention
    layers.
    """
    rope = text_config(config).rope_parameters
    rope = rope.get("full_attention", rope)
    if (
        rope["rope_type"] == "dynamic"
        and family_of(config).fixed_alpha
        and (alpha := rope.get("alpha"))
    ):
        size = head_dim(config)
        return {
            "rope_type": "default",
            "rope_theta": rope["rope_theta"] * alpha ** (size / (size - 2)),
        }
    return rope


def rotated_channels(config: "PreTrainedConfig") -> float:
    """Returns the number of rotated channels of a head; with "proportional" RoPE all, some of them
    by angle 0.
    """
    rope = rope_parameters(config)
    share = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    return share * head_dim(config)


def max_length(config: "PreTrainedConfig") -> int:
    """Returns the longest sequence in tokens.

    Dynamic RoPE scales the context at run time; for the other types ``max_position_embeddings`` is
    already scaled.
    """
    rope, positions = rope_parameters(config), int(text_config(config).max_position_embeddings)
    return int(positions * rope["factor"]) if rope["rope_type"] == "dynamic" else positions


def check_length(config: "PreTrainedConfig", seq_len: int, given: str = "") -> None:
    """Raises UserError if a sequence exceeds :func:`max_length`; ``given`` names the argument that
    asks for so many tokens.
    """
    longest = max_length(config)
    if seq_len > longest:
        raise UserError(
            f"{given or f'data.seq_len={seq_len}'}: the model has positions for {longest} tokens; "
            "shorten it, or extend the context with model.rope_scaling={rope_type: yarn, factor: "
            "...}"
        )


def output_logits(model: "PreTrainedModel", hidden: "Tensor") -> "Tensor":
    """Returns the logits ``[..., vocabulary]`` of the last hidden states ``[..., hidden]``, as the
    model's own head.
    """
    config, head = text_config(model.config), model.get_output_embeddings()
    assert head is not None
    logits = head(hidden)
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if softcap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = (logits / softcap).tanh() * softcap
    return logits


def check_transformers(where: str) -> None:
    """Raises UserError, which begins with ``where``, if transformers is too old for continuous
    batching and GGUF files.
    """
    import transformers

    installed, needed = transformers.__version__, ".".join(map(str, TRANSFORMERS_NEEDED))
    if tuple(map(int, installed.split(".")[:2])) < TRANSFORMERS_NEEDED:
        raise UserError(
            f"{where}: needs transformers {needed} or newer, {installed} is installed; pip "
            f"install -U 'transformers>={needed}'"
        )


def check_supported(config: "PreTrainedConfig", *, dense: bool = False) -> None:
    """Checks that the tap and the kernels support the model.

    Raises UserError for another family, attention that the kernels do not compute, another RoPE
    type, unsupported head counts or head sizes, and, unless the model is only served ``dense``, if
    no layer has full attention.
    """
    config = text_config(config)
    if reason := refusal(config):
        raise UserError(f"model: {reason}")
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model_type={config.model_type}: expected one of the decoders {', '.join(FAMILIES)}"
        )
    heads, kv_heads, size = num_heads(config), num_kv_heads(config), head_dim(config)
    if heads % kv_heads:
        raise UserError(
            f"num_attention_heads={heads}: expected a multiple of num_key_value_heads={kv_heads}"
        )
    if size % 8 or not 8 <= size <= MAX_HEAD_SIZE:
        raise UserError(f"head_dim={size}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")
    _check_rope(config)
    for kind, key in (
        (SLIDING, "sliding_window"),
        (CHUNKED, "attention_chunk_size"),
        (LINEAR, "linear_num_key_heads"),
    ):
        if kind in layer_kinds(config) and not getattr(config, key, None):
            raise UserError(
                f"{key}={getattr(config, key, None)}: layers of type {kind} need a number"
            )
    layers = attention_layers(config)
    if not dense and all(layer.kept for layer in layers):
        raise UserError(
            f"model: no layer can be sparse; layer 0: {layers[0].kept}; expected a full-attention "
            f"layer"
        )


def refusal(config: Any) -> str | None:
    """Returns the reason why the attention of a model is not supported, or None."""
    if getattr(config, "kv_lora_rank", None):
        return (
            f"model_type={config.model_type!s:.60}: multi-head latent attention "
            f"(kv_lora_rank={config.kv_lora_rank!s:.20}) caches latent vectors; expected a decoder "
            "that caches keys, which gates and buckets read"
        )
    # "vision": only for images
    if (scope := getattr(config, "use_bidirectional_attention", None)) and scope != "vision":
        return f"use_bidirectional_attention={scope!s:.20}: expected causal attention"
    if not getattr(config, "is_causal", True):
        return "is_causal=False: expected causal attention"
    return None


def _check_rope(config: Any) -> None:
    """Raises UserError for RoPE that cannot be computed or inverted."""
    rope = rope_parameters(config)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"rope_type={rope['rope_type']}: expected {', '.join(ROPE_TYPES)}")
    factor = rope.get(
        "factor", 1.0 if rope["rope_type"] in ("default", "longrope", "proportional") else None
    )
    if not isinstance(factor, int | float) or factor < 1:
        raise UserError(f"rope_type={rope['rope_type']}, factor={factor}: expected 1 or more")
    share, rotated = rope.get("partial_rotary_factor", 1.0), rotated_channels(config)
    if share != 1 and not family_of(config).partial_rope:
        raise UserError(
            f"partial_rotary_factor={share}: model_type={config.model_type} rotates all channels; "
            f"expected 1"
        )
    if rotated != int(rotated) or rotated % 2 or not 0 < share <= 1:
        raise UserError(
            f"partial_rotary_factor={share}: expected a share that gives an even number of the "
            f"{head_dim(config)} channels"
        )
    for name in ("short_factor", "long_factor") if rope["rope_type"] == "longrope" else ():
        if len(rope[name]) != rotated // 2:
            raise UserError(
                f"rope_type=longrope: {name} has {len(rope[name])} numbers; expected "
                f"{int(rotated // 2)}"
            )

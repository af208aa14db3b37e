"""Accepted values of the keys of ``config.json`` in which transformers accepts absurd values, of
which some give NaN, wrong numbers, or errors of their own in the model.

The keys of all families share one class, because a name has the same meaning in each family.
Defaults are transformers' own.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval
from pydantic import StringConstraints

Size = Annotated[int, Interval(ge=1, le=2**20)]
Vocabulary = Annotated[int, Interval(ge=1, le=2**24)]
Positions = Annotated[int, Interval(ge=1, le=2**30)]
TokenId = Annotated[int, Interval(ge=-1, lt=2**24)]  # -1 in old files: none
Base = Annotated[float, Interval(gt=1, le=1e12)]
Positive = Annotated[float, Interval(gt=0, le=1e6)]
Share = Annotated[float, Interval(ge=0, le=1)]
Experts = Annotated[int, Interval(ge=1, le=4096)]
FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$", max_length=255)]


@dataclass(frozen=True)
class Rope:
    """Parameters of RoPE; :func:`msattn.trainer.models.families.check_supported` checks the type.
    Defaults depend on it.
    """

    # a key that is ignored could mean other angles
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    rope_type: str = "default"
    type: str = "default"  # in older files
    rope_theta: Base = 1e4
    factor: Annotated[float, Interval(ge=1, le=1e6)] = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Positions = 8192
    attention_factor: Annotated[float, Interval(gt=0, le=100)] | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive = 1.0
    mscale_all_dim: Positive = 1.0
    truncate: bool = True
    partial_rotary_factor: Share = 1.0
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    alpha: Annotated[float, Interval(ge=1, le=1e6)] | None = None  # Hunyuan
    # Ministral 3, like the next one
    llama_4_scaling_beta: Annotated[float, Interval(ge=0, le=100)] | None = None
    max_position_embeddings: Positions | None = None
    # for models with images; text has equal positions in all sections
    mrope_section: list[Size] | None = None
    mrope_interleaved: bool = False
    finetuned: bool = False  # a note


@dataclass(frozen=True)
class RopeByLayer:
    """Parameters of RoPE for each type of layer."""

    full_attention: Rope
    sliding_attention: Rope


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer that differ from those of the model."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    head_dim: Annotated[int, Interval(ge=1, le=4096)] | None = None
    num_key_value_heads: Annotated[int, Interval(ge=1, le=4096)] | None = None


@dataclass(frozen=True)
class Architecture:
    """The checked keys; others transformers checks itself."""

    model_type: str
    vocab_size: Vocabulary
    hidden_size: Size
    num_hidden_layers: Annotated[int, Interval(ge=1, le=1024)]
    num_attention_heads: Annotated[int, Interval(ge=1, le=4096)]
    num_key_value_heads: Annotated[int, Interval(ge=1, le=4096)] | None = None
    head_dim: Annotated[int, Interval(ge=1, le=4096)] | None = None
    max_position_embeddings: Positions = 2048
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    # RoPE; some families have layers without it, or with RoPE of their own.
    rope_theta: Base = 1e4
    rope_local_base_freq: Base = 1e4
    rope_parameters: Rope | RopeByLayer | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Positions | None = None
    no_rope_layers: list[Annotated[int, Interval(ge=0, le=1)]] | None = None
    # Layers with other sizes, or with the keys of others.
    per_layer_config: dict[str, LayerSizes] | None = None
    global_head_dim: Annotated[int, Interval(ge=1, le=4096)] | None = None
    num_global_key_value_heads: Annotated[int, Interval(ge=1, le=4096)] | None = None
    num_kv_shared_layers: Annotated[int, Interval(ge=0, le=1024)] | None = 0
    vocab_size_per_layer_input: Vocabulary | None = None
    # Layers that attend within windows and chunks, and what is done to their scores.
    layer_types: (
        list[
            Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
        ]
        | None
    ) = None
    # every n-th layer; the others are linear attention
    full_attention_interval: Annotated[int, Interval(ge=1, le=1024)] = 4
    sliding_window: Positions | None = None
    sliding_window_pattern: Annotated[int, Interval(ge=1, le=1024)] = 6
    is_causal: bool = True
    attention_chunk_size: Positions | None = None
    floor_scale: Positions = 8192
    attn_scale: Share = 0.1
    query_pre_attn_scalar: Positive = 256.0
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0
    # Mixtures of experts.
    num_local_experts: Experts | None = None
    num_experts: Experts | None = None
    n_routed_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    moe_topk: Experts | list[Experts] | None = None
    decoder_sparse_step: Experts = 1
    swiglu_limit: Positive = 7.0
    quantization_config: dict[str, Any] | None = None
    # Other models, or other files, than the keys above describe.
    compression_config: None = None
    configuration_files: None = None
    transformers_weights: None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id} is not below vocab_size={self.vocab_size}"
            )
        if (
            self.vocab_size_per_layer_input is not None
            and self.vocab_size_per_layer_input < self.vocab_size
        ):
            raise ValueError(
                f"vocab_size_per_layer_input={self.vocab_size_per_layer_input} is below "
                f"vocab_size={self.vocab_size}"
            )
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} numbers for "
                f"{self.num_hidden_layers} layers"
            )
        experts = self.num_local_experts or self.num_experts or self.n_routed_experts
        for key in ("num_experts_per_tok", "moe_topk"):
            used = getattr(self, key)
            if experts is not None and any(
                count > experts for count in (used if isinstance(used, list) else [used or 0])
            ):
                raise ValueError(f"{key}={used}: there are {experts} experts")

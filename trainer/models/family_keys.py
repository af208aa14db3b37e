"""Keys of ``config.json`` that only some families have, beside those of ``config_keys``."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from msattn.trainer.models.config_keys import Activation, Architecture, Base, Flag, Positions, Positive, Rope, Share, Size

Experts = Annotated[int, Interval(ge=1, le=4096)]


@dataclass(frozen=True)
class RopeByLayer:
    """Parameters of RoPE for each type of layer."""

    full_attention: Rope
    sliding_attention: Rope


@dataclass(frozen=True)
class Granite(Architecture):
    """Granite scales embeddings, residuals, scores and logits."""

    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


@dataclass(frozen=True)
class SmolLM3(Architecture):
    """SmolLM3 has layers without RoPE; 1 in the list stands for a layer with it."""

    no_rope_layers: list[Annotated[int, Interval(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Annotated[int, Interval(ge=1, le=1024)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(f"no_rope_layers has {len(self.no_rope_layers)} numbers for {self.num_hidden_layers} layers")


@dataclass(frozen=True)
class Olmo3(Architecture):
    """OLMo 3 has sliding layers with a RoPE of their own."""

    rope_parameters: Rope | RopeByLayer | None = None  # pyrefly: ignore[bad-override]


@dataclass(frozen=True)
class Gemma3(Architecture):
    """Gemma 3 has sliding layers with a RoPE of their own."""

    rope_parameters: Rope | RopeByLayer | None = None  # pyrefly: ignore[bad-override]
    rope_local_base_freq: Base = 1e4
    sliding_window_pattern: Annotated[int, Interval(ge=1, le=1024)] = 6
    hidden_activation: Activation = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256.0
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: Flag = False


@dataclass(frozen=True)
class Mixture(Architecture):
    """Mixtures of experts."""

    num_local_experts: Experts | None = None
    num_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    moe_intermediate_size: Size | None = None
    decoder_sparse_step: Experts = 1
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        experts = self.num_local_experts or self.num_experts
        if experts is not None and self.num_experts_per_tok is not None and self.num_experts_per_tok > experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok}: there are {experts} experts")


@dataclass(frozen=True)
class Phi3(Architecture):
    """Phi-3 has dropout, which only training applies."""

    resid_pdrop: Share = 0.0
    embd_pdrop: Share = 0.0
    original_max_position_embeddings: Positions = 4096


FAMILY_KEYS: dict[str, type[Architecture]] = {
    "granite": Granite,
    "smollm3": SmolLM3,
    "olmo3": Olmo3,
    "gemma3_text": Gemma3,
    "mixtral": Mixture,
    "qwen3_moe": Mixture,
    "phi3": Phi3,
}

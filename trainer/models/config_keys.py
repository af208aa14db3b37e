"""The keys of ``config.json`` that matter in all families, their types, and the values that make sense."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, Lt

Size = Annotated[int, Interval(ge=1, le=2**20)]
Vocabulary = Annotated[int, Interval(ge=1, le=2**24)]
Positions = Annotated[int, Interval(ge=1, le=2**30)]
TokenId = Annotated[int, Interval(ge=-1, lt=2**24)]  # -1 in old files: none
Base = Annotated[float, Interval(gt=1, le=1e12)]
Positive = Annotated[float, Interval(gt=0, le=1e6)]
Share = Annotated[float, Interval(ge=0, le=1)]
Flag = bool | None  # null means False
Activation = Literal["silu", "swish", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"]


@dataclass(frozen=True)
class Rope:
    """Parameters of RoPE; :func:`msattn.trainer.models.families.check_supported` checks the type. Defaults depend on it."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # a key that is ignored could mean other angles
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
    finetuned: bool = False  # a note


@dataclass(frozen=True)
class Architecture:
    """The keys of ``config.json`` in all families. Defaults are transformers' own, which differ by family."""

    model_type: str
    vocab_size: Vocabulary
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Interval(ge=1, le=1024)]
    num_attention_heads: Annotated[int, Interval(ge=1, le=4096)]
    max_position_embeddings: Positions = 2048
    num_key_value_heads: Annotated[int, Interval(ge=1, le=4096)] | None = None
    head_dim: Annotated[int, Interval(ge=1, le=4096)] | None = None
    hidden_act: Activation = "silu"
    rms_norm_eps: Annotated[float, Interval(gt=0, le=0.1)] = 1e-6
    attention_bias: Flag = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    attention_dropout: Share | None = 0.0
    initializer_range: Share = 0.02
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    rope_theta: Base = 1e4
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Positions | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    use_sliding_window: Flag = False
    sliding_window: Positions | None = None
    max_window_layers: Annotated[int, Ge(0), Lt(2**20)] = 0
    attn_logit_softcapping: Annotated[float, Gt(0)] | None = None
    quantization_config: dict[str, Any] | None = None
    # Other models, or other files, than the keys above describe.
    configuration_files: None = None
    per_layer_config: None = None
    transformers_weights: None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id} is not below vocab_size={self.vocab_size}")

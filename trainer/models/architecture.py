"""``config.json`` and ``generation_config.json``: the keys that matter, their types, and the values that make sense.

Only these keys reach transformers. Others, such as an attention implementation or hints for training, change no result; those
that would are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, Lt

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.families import FAMILIES
from msattn.trainer.models.limited import limited
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
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
    finetuned: bool = False  # a note


@dataclass(frozen=True)
class Architecture:
    """The keys of ``config.json``. Defaults are transformers' own, which differ by family."""

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


@dataclass(frozen=True)
class Generation:
    """The keys of ``generation_config.json``."""

    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    do_sample: Flag = False
    temperature: Annotated[float, Interval(ge=0, le=100)] | None = None
    top_k: Annotated[int, Interval(ge=0, lt=2**24)] | None = None
    top_p: Share | None = None
    repetition_penalty: Annotated[float, Interval(gt=0, le=100)] | None = None


def pretrained_config(files: ModelFiles) -> "PreTrainedConfig":
    """Returns the configuration of a model, from the keys of :class:`Architecture`.

    Raises
    ------
    UserError : ``config.json`` is missing or damaged, describes another family, or has a value that makes no sense.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    document = files.config()
    family = document.get("model_type")
    if family not in FAMILIES and document.get("auto_map"):
        raise files.brings_code()
    if family not in FAMILIES:
        raise UserError(f"{files.name}: model_type={family!s:.60}: accepted are the decoders {', '.join(FAMILIES)}")
    keys = _known(document, Architecture, f"{files.name}: {CONFIG}")
    if quantization := keys.get("quantization_config"):
        limited(lambda: _check_quantization(quantization), f"{files.name}: {CONFIG}: quantization_config is not accepted")
    try:
        return AutoConfig.for_model(**keys, name_or_path=str(files.source))
    except (StrictDataclassError, ValueError, KeyError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise UserError(f"{files.name}: {CONFIG}: {first_line(reason)}") from error


def generation_config(files: ModelFiles, config: "PreTrainedConfig") -> "GenerationConfig":
    """Returns the model's generation configuration, from the keys of :class:`Generation`, or with the tokens of ``config``.

    Raises
    ------
    UserError : ``generation_config.json`` is damaged, or has a value that makes no sense.
    """
    from transformers import GenerationConfig

    document = files.json(GENERATION)
    if document is None:
        document = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**_known(document, Generation, f"{files.name}: {GENERATION}"))


def _check_quantization(quantization: dict[str, Any]) -> None:
    """Raises an error of any kind unless transformers knows the method and its keys."""
    from transformers.quantizers import AutoQuantizationConfig

    AutoQuantizationConfig.from_dict(quantization)


def _known(document: Mapping[str, Any], schema: type, where: str) -> dict[str, Any]:
    """Returns the keys of ``document`` that ``schema`` has, after a check of their values."""
    checked(document, schema, where)
    known = [item for item in fields(schema) if item.name in document]
    return {item.name: bool(document[item.name]) if item.type == Flag else document[item.name] for item in known}

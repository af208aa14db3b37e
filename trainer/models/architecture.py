"""``config.json`` and ``generation_config.json`` as transformers' configurations, after checks of
their values.

All keys of ``config.json`` except :data:`IGNORED` are passed to transformers. Of
``generation_config.json`` only the keys of :class:`GenerationKeys` are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from msattn.trainer.errors import UserError, first_line, library_errors
from msattn.trainer.models.config_keys import Architecture, Share, TokenId
from msattn.trainer.models.families import FAMILIES, refusal
from msattn.trainer.models.gguf import gguf_config
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
# how a model runs or is trained, which is decided elsewhere, and what other tasks and files need
IGNORED = {
    *(
        "attn_implementation",
        "distributed_config",
        "dtype",
        "experts_implementation",
        "gradient_checkpointing",
        "use_cache",
    ),
    *(
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "chunk_size_feed_forward",
        "transformers_version",
    ),
    *("architectures", "auto_map", "fusion_config", "id2label", "label2id", "problem_type"),
    # keys of models with several parts
    *("is_encoder_decoder", "decoder", "generator", "text_config", "text_encoder"),
}


@dataclass(frozen=True)
class GenerationKeys:
    """The keys of ``generation_config.json``."""

    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    do_sample: bool | None = False
    temperature: Annotated[float, Interval(ge=0, le=100)] | None = None
    top_k: Annotated[int, Interval(ge=0, lt=2**24)] | None = None
    top_p: Share | None = None
    repetition_penalty: Annotated[float, Interval(gt=0, le=100)] | None = None


def pretrained_config(files: ModelFiles) -> "PreTrainedConfig":
    """Returns the configuration of a model, from ``config.json`` or the metadata of a GGUF file.

    Raises UserError if it is missing or damaged, describes an unsupported family, or has an invalid
    value.
    """
    document = files.config() if files.gguf is None else gguf_config(files.gguf, files.name)
    family = str(document.get("model_type"))
    if family not in FAMILIES and document.get("auto_map"):
        raise files.brings_code()
    if family not in FAMILIES and (
        reason := refusal(SimpleNamespace(**{**document, "model_type": family}))
    ):
        raise UserError(f"{files.name}: {reason}")
    if family not in FAMILIES and isinstance(document.get("text_config"), dict):
        raise UserError(
            f"{files.name}: model_type={family!s:.60} is more than a language model: load it in "
            "Python and use msattn.attach, which serves its text decoder"
        )
    if family not in FAMILIES:
        raise UserError(
            f"{files.name}: model_type={family!s:.60}: expected one of the decoders "
            f"{', '.join(FAMILIES)}"
        )
    where = f"{files.name}: {CONFIG if files.gguf is None else 'its metadata'}"
    checked(document, Architecture, where)
    keys = _passed(document)
    if quantization := keys.get("quantization_config"):
        from transformers.quantizers import AutoQuantizationConfig

        with library_errors(f"{where}: quantization_config is not accepted"):
            AutoQuantizationConfig.from_dict(quantization)
    return build_config(family, keys | {"name_or_path": str(files.source)}, where)


def build_config(family: str, keys: Mapping[str, Any], where: str) -> "PreTrainedConfig":
    """Returns the configuration of a family with these keys; for bad values raises UserError that
    begins with ``where``.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(family, **keys)
    except (
        StrictDataclassError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        reason = (
            error.__cause__
            if isinstance(error, StrictDataclassError) and error.__cause__
            else error
        )
        raise UserError(f"{where}: {first_line(reason)}") from error


def _passed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``config.json`` for transformers, without those that would replace a
    method of its configuration.

    A null flag becomes False.
    """
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[document["model_type"]]
    kinds = {item.name: item.type for item in fields(config_class)} | {
        "rope_scaling": dict,
        "per_layer_config": dict,
    }
    return {
        key: False if value is None and kinds.get(key) is bool else value
        for key, value in document.items()
        if key not in IGNORED
        and not key.startswith("_")
        and (key in kinds or not hasattr(config_class, key))
    }


def generation_config(files: ModelFiles, config: "PreTrainedConfig") -> "GenerationConfig":
    """Returns the model's generation configuration, from the keys of :class:`GenerationKeys`, or
    with the tokens of ``config``.

    Raises UserError if ``generation_config.json`` is damaged or has an invalid value.
    """
    from transformers import GenerationConfig

    document = files.json(GENERATION)
    if document is None:
        document = {
            key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
    where = f"{files.name}: {GENERATION}"
    checked(document, GenerationKeys, where)
    known = {
        item.name: document[item.name] for item in fields(GenerationKeys) if item.name in document
    }
    if "do_sample" in known:
        known["do_sample"] = bool(known["do_sample"])  # null is False
    return GenerationConfig(**known)

"""``config.json`` and ``generation_config.json``: the keys that matter, their types, and the values that make sense.

Only these keys reach transformers. Others, such as an attention implementation or hints for training, change no result; those
that would are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.config_keys import Architecture, Flag, Share, TokenId
from msattn.trainer.models.families import FAMILIES, refusal
from msattn.trainer.models.family_keys import FAMILY_KEYS
from msattn.trainer.models.gguf import gguf_config
from msattn.trainer.models.limited import limited
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class GenerationKeys:
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
    """Returns the configuration of a model, from the keys of :class:`Architecture`, which a GGUF file has as metadata.

    Raises
    ------
    UserError : ``config.json`` is missing or damaged, describes another family, or has a value that makes no sense.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    document = files.config() if files.gguf is None else gguf_config(files.gguf, files.name)
    family = document.get("model_type")
    if family not in FAMILIES and document.get("auto_map"):
        raise files.brings_code()
    if family not in FAMILIES and (reason := refusal(SimpleNamespace(**{"model_type": None, **document}))):
        raise UserError(f"{files.name}: {reason}")
    if family not in FAMILIES and isinstance(document.get("text_config"), dict):
        raise UserError(
            f"{files.name}: model_type={family!s:.60} is more than a language model: load it in Python, and msattn.attach "
            "serves its decoder of text"
        )
    if family not in FAMILIES:
        raise UserError(f"{files.name}: model_type={family!s:.60}: accepted are the decoders {', '.join(FAMILIES)}")
    where = f"{files.name}: {CONFIG if files.gguf is None else 'its metadata'}"
    keys = _known(document, FAMILY_KEYS.get(family, Architecture), where)
    if quantization := keys.get("quantization_config"):
        limited(lambda: _check_quantization(quantization), f"{where}: quantization_config is not accepted")
    try:
        return AutoConfig.for_model(**keys, name_or_path=str(files.source))
    except (StrictDataclassError, ValueError, KeyError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise UserError(f"{where}: {first_line(reason)}") from error


def generation_config(files: ModelFiles, config: "PreTrainedConfig") -> "GenerationConfig":
    """Returns the model's generation configuration, from the keys of :class:`GenerationKeys`, or with the tokens of ``config``.

    Raises
    ------
    UserError : ``generation_config.json`` is damaged, or has a value that makes no sense.
    """
    from transformers import GenerationConfig

    document = files.json(GENERATION)
    if document is None:
        document = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**_known(document, GenerationKeys, f"{files.name}: {GENERATION}"))


def _check_quantization(quantization: dict[str, Any]) -> None:
    """Raises an error of any kind unless transformers knows the method and its keys."""
    from transformers.quantizers import AutoQuantizationConfig

    AutoQuantizationConfig.from_dict(quantization)


def _known(document: Mapping[str, Any], schema: type, where: str) -> dict[str, Any]:
    """Returns the keys of ``document`` that ``schema`` has, after a check of their values."""
    checked(document, schema, where)
    known = [item for item in fields(schema) if item.name in document]
    return {item.name: bool(document[item.name]) if item.type == Flag else document[item.name] for item in known}

"""Loading of language models and tokenizers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer.config import ModelConfig, nearest
from msattn.trainer.errors import UserError
from msattn.trainer.models.devices import resolve_device, resolve_dtype
from msattn.trainer.models.families import FAMILIES, ROPE_TYPES, check_supported
from msattn.trainer.models.identity import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = Path(__file__).parents[1] / "embedded" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Loaded:
    """A frozen model in eval mode, its tokenizer, and what identifies them in manifests (see :func:`fingerprint`)."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    fingerprint: dict[str, Any]


def load(cfg: ModelConfig, *, device: str = "auto", dtype: str = "auto", seed: int = 0) -> Loaded:
    """Bring up the model that ``model.*`` describes, frozen and in eval mode.

    Parameters
    ----------
    cfg : which model.
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``
    dtype : ``auto``, ``float32``, ``float16`` or ``bfloat16``
    seed : of ``model.init=random``; the same seed, device type and dtype give the same weights

    Raises
    ------
    UserError : nothing to load under ``model.path``, an architecture that is not served, missing weights, no GPU, or one
        without room for them.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    random = cfg.init == "random"
    config = random_config(cfg) if random else _pretrained_config(cfg)
    if cfg.rope_scaling is not None:
        _scale_rope(config, cfg.rope_scaling)
    check_supported(config)
    tokenizer = _tokenizer(cfg)
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"vocab_size={config.vocab_size}: the tokenizer has {len(tokenizer)} tokens")
    try:
        model = _random(config, place, kind, seed) if random else _pretrained(cfg, config, place, kind)
    except torch.OutOfMemoryError as error:
        raise UserError(f"model={cfg.name}: the GPU's memory does not hold its weights in {kind}") from error
    model.eval().requires_grad_(False)
    name = f"{cfg.name} (random weights, seed {seed})" if random else cfg.path
    return Loaded(model, tokenizer, fingerprint(model, tokenizer, id=name, revision=None if random else cfg.revision))


def random_config(cfg: ModelConfig) -> "PreTrainedConfig":
    """The configuration that ``model.architecture`` spells out; unknown keys are refused with the nearest named."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    architecture = dict(cfg.architecture or {})
    family = architecture.pop("model_type", None)
    if family not in FAMILIES:
        raise UserError(f"model.architecture.model_type={family}: accepted are {', '.join(FAMILIES)}")
    accepted = [*AutoConfig.for_model(family).to_dict(), "head_dim", "rope_theta", "rope_scaling"]
    for key in architecture:
        if key not in accepted:
            raise UserError(f"unknown key model.architecture.{key}{nearest(key, accepted)}")
    try:
        return AutoConfig.for_model(family, **architecture)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise UserError(f"model.architecture: {_one_line(reason)}") from error


def _random(config: "PreTrainedConfig", device: torch.device, dtype: torch.dtype, seed: int) -> "PreTrainedModel":
    """Weights drawn where they will live, in their final dtype: an 8B model is up in seconds and needs no second copy."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"model.architecture: {_one_line(error)}") from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without a line for each retry: what comes of them is said once, by the error."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Without transformers' progress bar: what lies on this disk is there in seconds."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _source(path: str) -> str | Path:
    """A local folder, or the Hub id as it is."""
    if path == "embedded":
        return EMBEDDED
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model.path={path}: no such folder")
    return path


def _pretrained_config(cfg: ModelConfig) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    source = _source(cfg.path)
    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise UserError(f"model.path={cfg.path}: the folder has no config.json, so it is no Hugging Face model")
    try:
        with _quiet_hub():
            return AutoConfig.from_pretrained(source, revision=cfg.revision)
    except (StrictDataclassError, OSError, ValueError, KeyError) as error:
        raise _not_loaded(cfg.path, source, error) from error


def _pretrained(cfg: ModelConfig, config: "PreTrainedConfig", device: torch.device, dtype: torch.dtype) -> "PreTrainedModel":
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = _source(cfg.path)
    try:
        with no_progress_bar() if isinstance(source, Path) else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, config=config, revision=cfg.revision, dtype=dtype, device_map={"": device}, output_loading_info=True
            )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_loaded(cfg.path, source, error) from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would go on with random values
        raise UserError(f"model.path={cfg.path}: the weights lack {', '.join(sorted(info['missing_keys'])[:3])}")
    return model


def _tokenizer(cfg: ModelConfig) -> "PreTrainedTokenizerBase":
    """The model's own; random weights without local tokenizer files take the embedded model's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    local = Path(cfg.path).expanduser()
    if cfg.path == "embedded" or (cfg.init == "random" and not (local / "tokenizer.json").is_file()):
        return PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    source = _source(cfg.path)
    if isinstance(source, Path) and not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"model.path={cfg.path}: the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    try:
        with _quiet_hub():
            return AutoTokenizer.from_pretrained(source, revision=cfg.revision)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(cfg.path, source, error) from error


def _scale_rope(config: "PreTrainedConfig", scaling: dict[str, Any]) -> None:
    """Override the RoPE parameters in place; a stretched context raises ``max_position_embeddings`` with it."""
    kind, factor = scaling.get("rope_type"), scaling.get("factor", 1.0)
    if kind not in ROPE_TYPES:
        raise UserError(f"model.rope_scaling.rope_type={kind}: accepted are {', '.join(ROPE_TYPES)}")
    try:
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaling}
        config.standardize_rope_params()
        if kind in ("linear", "llama3", "yarn"):
            original = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
            config.max_position_embeddings = int(original * float(factor))
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"model.rope_scaling={scaling}: {_one_line(error)}") from error


def _not_loaded(path: str, source: str | Path, error: Exception) -> UserError:
    if isinstance(source, Path):
        return UserError(f"model.path={path}: the files there cannot be loaded ({_one_line(error)})")
    return UserError(
        f"model.path={path}: no local folder, and the Hugging Face Hub did not give it ({_one_line(error)}); "
        "model.init=random takes the architecture's shape without a download"
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__

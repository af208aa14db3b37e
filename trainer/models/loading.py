"""Loading of language models and tokenizers, from checkpoints or with random weights."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from msattn.trainer.config import ModelConfig, nearest
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, first_line, only_errors
from msattn.trainer.models.architecture import build_config, generation_config, pretrained_config
from msattn.trainer.models.chat import answer_end
from msattn.trainer.models.checkpoint import check_loaded, checked_weights
from msattn.trainer.models.devices import resolve_device, resolve_dtype
from msattn.trainer.models.ends import unite_end_tokens
from msattn.trainer.models.families import FAMILIES, check_supported, family_of, text_config
from msattn.trainer.models.identity import config_fingerprint, fingerprint
from msattn.trainer.models.rope import scale_rope
from msattn.trainer.models.tokenizer import PROBE, VOCABULARY, load_tokenizer
from msattn.trainer.models.unpacked import (
    in_turn,
    is_complete,
    keep,
    no_progress_bar,
    unpacked_folder,
)
from msattn.trainer.progress import activity
from msattn.trainer.storage.model_files import ModelFiles, local_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = Path(__file__).parents[1] / "embedded" / "model"
# for a missing library, or a value of quantization_config
OF_QUANTIZERS = (ImportError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Loaded:
    """A frozen model in eval mode, its tokenizer and their :func:`fingerprint`."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    fingerprint: dict[str, Any]

    @property
    def config(self) -> "PreTrainedConfig":
        return self.model.config


@dataclass(frozen=True)
class Described:
    """A model before its weights are read: whatever configuration and tokenizer decide is checked
    first.

    ``fingerprint`` is without hashes of weights and tokenizer, ``load`` reads the weights.
    """

    config: "PreTrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    fingerprint: dict[str, Any]
    load: Callable[[], Loaded]


def load(
    cfg: ModelConfig,
    *,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    dense: bool = False,
) -> Loaded:
    """Loads the model that ``model.*`` describes, frozen and in eval mode.

    Equal seeds, device types and dtypes give equal weights with ``model.init=random``. Raises
    UserError like :func:`describe`, if weights are missing, or if the memory of the GPU is too
    small.
    """
    return describe(cfg, device=device, dtype=dtype, seed=seed, dense=dense).load()


def describe(
    cfg: ModelConfig,
    *,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    dense: bool = False,
) -> Described:
    """Reads the configuration and the tokenizer of the model that ``model.*`` describes.

    Raises UserError if ``model.path`` cannot be read, the architecture is not supported (``dense``:
    as in :func:`check_supported`), or there is no GPU.
    """
    with activity(f"reading the tokenizer of {cfg.name}"):
        target, files = resolve_device(device), _files(cfg)
        torch_dtype, unpacked = resolve_dtype(dtype, target), None
        if files.gguf is not None and cfg.cache is not None and cfg.init == "pretrained":
            unpacked = unpacked_folder(files.gguf, cfg.cache, torch_dtype)
        config, tokenizer = config_and_tokenizer(cfg, files, unpacked, dense=dense)
        of_template = answer_end(tokenizer)
        # the generation configuration comes with the model
        if cfg.init == "random" or cfg.trust_remote_code:
            unite_end_tokens(config, None, tokenizer, of_template)
        else:
            unite_end_tokens(config, generation_config(files, config), tokenizer, of_template)
    identity = {
        "id": _public_id(cfg, files, seed),
        "revision": None if cfg.init == "random" else cfg.revision,
    }

    def load() -> Loaded:
        with activity(f"loading the model {cfg.name}"):
            try:
                if cfg.init == "random":
                    model = _random(config, target, torch_dtype, seed)
                elif unpacked is not None:
                    model = _unpacked(unpacked, files, config, tokenizer, target, torch_dtype)
                else:
                    model = _pretrained(files, config, target, torch_dtype, cfg.trust_remote_code)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"model={cfg.name}: the weights in {torch_dtype} do not fit into the GPU's "
                    f"memory"
                ) from error
            model.config.name_or_path = config.name_or_path
            model.eval().requires_grad_(False)
            unite_end_tokens(model.config, model.generation_config, tokenizer, of_template)
            return Loaded(model, tokenizer, fingerprint(model, tokenizer, **identity))

    return Described(config, tokenizer, config_fingerprint(config, **identity), load)


def read_config(cfg: ModelConfig) -> "PreTrainedConfig":
    """Returns the configuration of a model without reading weights or code; :func:`check_supported`
    is not called.

    The configuration of a packaged model is in its YAML file, so nothing is downloaded.
    """
    in_yaml = cfg.architecture is not None and cfg.path != "embedded"
    return random_config(cfg) if in_yaml else pretrained_config(_files(cfg))


def config_and_tokenizer(
    cfg: ModelConfig,
    files: ModelFiles | None = None,
    unpacked: Path | None = None,
    *,
    dense: bool = False,
) -> "tuple[PreTrainedConfig, PreTrainedTokenizerBase]":
    """Returns the configuration of a supported model and its tokenizer, without reading weights.

    The tokenizer of a GGUF file comes from ``unpacked``, the folder in which it is kept, if that
    exists.
    """
    files = files or _files(cfg)
    config = random_config(cfg) if cfg.init == "random" else _config(files, cfg.trust_remote_code)
    if cfg.rope_scaling is not None:
        scale_rope(config, cfg.rope_scaling)
    check_supported(config, dense=dense)
    tokenizer = _tokenizer(cfg, files, config, unpacked)
    tokens = max(
        len(tokenizer),
        *(1 + token for token in (*tokenizer.get_vocab().values(), *tokenizer(PROBE).input_ids)),
    )
    if tokens > text_config(config).vocab_size:
        raise UserError(
            f"vocab_size={text_config(config).vocab_size}: the tokenizer has {tokens} tokens"
        )
    return config, tokenizer


def _public_id(cfg: ModelConfig, files: ModelFiles, seed: int) -> str:
    """Returns the id of a model in manifests and model cards, which may be published: never a local
    path.
    """
    if cfg.init == "random":
        return f"{cfg.name} (random weights, seed {seed})"
    if files.gguf is not None:
        return files.gguf.name
    return cfg.path if files.folder is None or cfg.path == "embedded" else cfg.name


def random_config(cfg: ModelConfig) -> "PreTrainedConfig":
    """Returns the configuration that ``model.architecture`` describes."""
    from transformers import AutoConfig

    architecture = dict(cfg.architecture or {})
    family = architecture.pop("model_type", None)
    if family not in FAMILIES:
        raise UserError(f"model.architecture.model_type={family}: expected {', '.join(FAMILIES)}")
    default = AutoConfig.for_model(family)
    accepted = [
        *default.to_dict(),
        *default.attribute_map,
        "head_dim",
        "rope_theta",
        "rope_scaling",
    ]
    for key in architecture:
        if key not in accepted:
            raise UserError(f"unknown key model.architecture.{key}{nearest(key, accepted)}")
    return build_config(family, architecture, "model.architecture")


def _random(
    config: "PreTrainedConfig", device: torch.device, dtype: torch.dtype, seed: int
) -> "PreTrainedModel":
    """Draws the weights on their device and in their final dtype: an 8B model takes seconds and no
    second copy in memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **_attention(config))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"model.architecture: {first_line(error)}") from error


def _attention(config: "PreTrainedConfig") -> dict[str, str]:
    """Returns the attention implementation to use if transformers' default would not modify scores
    as the model does.
    """
    return {} if family_of(config).plain_scores else {"attn_implementation": "eager"}


def _files(cfg: ModelConfig) -> ModelFiles:
    """Returns the files of the local folder, the GGUF file or the Hub model that ``model.path``
    names.
    """
    name = f"model.path={shown(cfg.path)}"
    folder = EMBEDDED if cfg.path == "embedded" else local_model(cfg.path, name)
    files = ModelFiles(name, folder or cfg.path, cfg.revision)
    if cfg.init == "random":
        return files
    if folder is None and (
        os.path.exists(cfg.path) or cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") > 1
    ):
        raise UserError(
            f"{name}: no such folder or GGUF file"
            + (f"; {cfg.obtained_by}" if cfg.obtained_by else "")
        )
    return files.at_one_commit()


def _config(files: ModelFiles, trust_remote_code: bool) -> "PreTrainedConfig":
    """Returns the configuration of a pretrained model, which trusted code may determine."""
    from transformers import AutoConfig

    if files.gguf is not None or not trust_remote_code:
        return pretrained_config(files)
    try:
        return AutoConfig.from_pretrained(
            files.source, revision=files.revision, trust_remote_code=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise files.error(error) from error


def _pretrained(
    files: ModelFiles,
    config: "PreTrainedConfig",
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, GgufConfig

    trust_remote_code = trust_remote_code and files.gguf is None
    own = None if trust_remote_code else generation_config(files, config)
    packed = (
        {"gguf_file": files.gguf.name, "quantization_config": GgufConfig(dequantize=True)}
        if files.gguf
        else {}
    )
    try:
        folder = checked_weights(files, config)
        # Of a GGUF file that does not fit, transformers would print a report; it is refused below.
        with (
            no_progress_bar(),
            nullcontext() if files.gguf is None else only_errors("transformers"),
        ):
            model, info = AutoModelForCausalLM.from_pretrained(
                # code is in other files, of the same commit
                files.source if trust_remote_code else folder,
                config=config,
                generation_config=own,
                revision=files.revision,
                trust_remote_code=trust_remote_code,
                dtype=dtype,
                device_map={"": device},
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                **_attention(config),
                **packed,
            )
    except (torch.OutOfMemoryError, UserError):
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError, *OF_QUANTIZERS) as error:
        raise files.error(error) from error
    check_loaded(files, model, info)
    if files.gguf is not None:
        model.generation_config = own  # transformers leaves it out of a model from a GGUF file
    return model


def _unpacked(
    folder: Path,
    files: ModelFiles,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    device: torch.device,
    dtype: torch.dtype,
) -> "PreTrainedModel":
    """Loads the model of a GGUF file from the ``folder`` in which it is kept, or from the file, and
    keeps it there.
    """
    with nullcontext(True) if is_complete(folder) else in_turn(folder) as kept:
        if is_complete(folder):
            model = _pretrained(
                ModelFiles(f"{files.name}: unpacked in {folder}", folder),
                config,
                device,
                dtype,
                False,
            )
            model.generation_config = generation_config(files, config)
            return model
        model = _pretrained(files, config, device, dtype, False)
        if kept:
            keep(model, _config(files, False), tokenizer, folder)
    return model


def _tokenizer(
    cfg: ModelConfig, files: ModelFiles, config: "PreTrainedConfig", unpacked: Path | None
) -> "PreTrainedTokenizerBase":
    """Returns the model's tokenizer, or the embedded model's for random weights without local
    tokenizer files.

    Random weights may have another architecture than the files.
    """
    from transformers import PreTrainedTokenizerFast

    absent = (
        cfg.init == "random"
        and files.gguf is None
        and (files.folder is None or files.locate(VOCABULARY) is None)
    )
    if absent or cfg.path == "embedded":
        return PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    if unpacked is not None and is_complete(unpacked):
        return PreTrainedTokenizerFast.from_pretrained(unpacked)
    return load_tokenizer(files, None if cfg.init == "random" else config, cfg.trust_remote_code)

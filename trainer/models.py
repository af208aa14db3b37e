"""The only place that loads a language model or a tokenizer, and that says which models are served."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msattn.trainer.config import ModelConfig, nearest
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
EMBEDDED = Path(__file__).parent / "embedded" / "model"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HASHED = (  # what decides the meaning of q, k and v, whatever version of transformers wrote the config
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "tie_word_embeddings",
)
SAMPLE = 4096  # values hashed of each sampled tensor


@dataclass(frozen=True)
class Loaded:
    """A frozen model in eval mode, its tokenizer, and what identifies them in manifests (see :func:`fingerprint`)."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    fingerprint: dict[str, Any]


def num_layers(config: "PreTrainedConfig") -> int:
    return config.num_hidden_layers


def num_heads(config: "PreTrainedConfig") -> int:
    return config.num_attention_heads  # pyright: ignore[reportReturnType]


def num_kv_heads(config: "PreTrainedConfig") -> int:
    return getattr(config, "num_key_value_heads", None) or num_heads(config)


def head_dim(config: "PreTrainedConfig") -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // num_heads(config)


def max_length(config: "PreTrainedConfig") -> int:
    """The longest sequence, in tokens; dynamic RoPE stretches on the fly, the others have stretched the config already."""
    rope, positions = config.rope_parameters, int(config.max_position_embeddings)
    return int(positions * rope["factor"]) if rope["rope_type"] == "dynamic" else positions


def check_length(config: "PreTrainedConfig", seq_len: int) -> None:
    """Refuse a sequence longer than the model's positions.

    Raises
    ------
    UserError
    """
    longest = max_length(config)
    if seq_len > longest:
        raise UserError(
            f"seq_len={seq_len}: the model has positions for {longest} tokens; "
            "shorten it, or stretch the model with model.rope_scaling={rope_type: yarn, factor: ...}"
        )


def check_supported(config: "PreTrainedConfig") -> None:
    """Refuse what the tap and the kernels would get wrong.

    Raises
    ------
    UserError : another family, soft-capped scores, sliding-window layers (named), another RoPE type, head counts or head sizes
        that do not fit.
    """
    if getattr(config, "attn_logit_softcapping", None):
        raise UserError(f"model: soft-capped attention scores (attn_logit_softcapping={config.attn_logit_softcapping})")
    if config.model_type not in FAMILIES:
        raise UserError(f"model_type={config.model_type}: accepted are the decoders {', '.join(FAMILIES)}")
    sliding = sliding_layers(config)
    if sliding:
        raise UserError(
            f"model: layers {', '.join(map(str, sliding))} attend through a sliding window of {config.sliding_window} tokens; "
            "accepted are full-attention layers"
        )
    rope = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"rope_type={rope['rope_type']}: accepted are {', '.join(ROPE_TYPES)}")
    factor = rope.get("factor", 1.0 if rope["rope_type"] == "default" else None)
    if not isinstance(factor, int | float) or factor < 1:
        raise UserError(f"rope_type={rope['rope_type']}, factor={factor}: accepted is a number of 1 or more")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor={rope['partial_rotary_factor']}: accepted is 1 (all channels rotate)")
    heads, kv_heads, size = num_heads(config), num_kv_heads(config), head_dim(config)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads={heads}: accepted are multiples of num_key_value_heads={kv_heads}")
    if size % 8 or not 8 <= size <= 256:
        raise UserError(f"head_dim={size}: accepted are multiples of 8 up to 256")


def sliding_layers(config: "PreTrainedConfig") -> list[int]:
    """Indices of the layers that attend through a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:  # Mistral's code looks at sliding_window alone
        return list(range(num_layers(config))) if getattr(config, "sliding_window", None) else []
    return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]


def resolve_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one; of several GPUs under ``torchrun``, the process's own.

    Raises
    ------
    UserError : ``cuda`` without a GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch sees no CUDA GPU; device=cpu works everywhere")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA, float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: accepted are auto, {', '.join(DTYPES)}{nearest(dtype, list(DTYPES))}")
    return DTYPES[dtype]


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
def no_bar() -> Iterator[None]:
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
        with no_bar() if isinstance(source, Path) else nullcontext():
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


def fingerprint(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    id: str = "",
    revision: str | None = None,
) -> dict[str, Any]:
    """What identifies a model in a manifest.

    Returns
    -------
    dict with ``id``, ``revision``, ``num_layers``, ``num_heads``, ``num_kv_heads``, ``head_dim``, ``rope``, ``config_hash``,
    ``weights_hash`` (of a sample; the same in every dtype that the checkpoint is loaded in) and ``tokenizer_hash`` (None
    without a tokenizer).
    """
    config = model.config
    shape = {key: getattr(config, key, None) for key in HASHED}
    return {
        "id": id,
        "revision": revision,
        "num_layers": num_layers(config),
        "num_heads": num_heads(config),
        "num_kv_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "rope": {key: value for key, value in sorted(config.rope_parameters.items()) if value is not None},
        "config_hash": _hash(json.dumps(shape, sort_keys=True).encode()),
        "weights_hash": _hash(*(_sample(tensor) for tensor in _sampled_tensors(model))),
        "tokenizer_hash": None if tokenizer is None else _hash(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()),
    }


def _sampled_tensors(model: "PreTrainedModel") -> list[Tensor]:
    base: Any = model.base_model
    layers = [base.layers[i] for i in sorted({0, len(base.layers) // 2, len(base.layers) - 1})]
    weights = [w for layer in layers for w in (layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight)]
    return [base.embed_tokens.weight, *weights, base.norm.weight]


def _sample(tensor: Tensor) -> bytes:
    """Some values, rounded so that a checkpoint loaded in another dtype gives the same bytes.

    Values below fp16's normal range count as 0: that is where fp16 is coarser than bfloat16.
    """
    values = tensor.detach().flatten()
    values = values[:: max(1, values.numel() // SAMPLE)].float()
    values = values.masked_fill(values.abs() < 1e-4, 0).bfloat16()
    return values.view(torch.int16).cpu().numpy().tobytes()


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]

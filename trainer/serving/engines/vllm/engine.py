"""The sparse attention that the configuration of a vLLM engine describes, and the checks that the
engine can serve it.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from msattn.trainer.config.values import require
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.models.families import check_supported, num_kv_heads
from msattn.trainer.models.identity import config_fingerprint
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.build import AttachOptions, ModelInfo, artifact_options, build_sparse
from msattn.trainer.serving.engines.generate_batch import unpaged
from msattn.trainer.serving.implementation import configured_options

SECTION = "msattn"  # key in additional_config
DRAFTS = ("ngram", "draft_model")  # methods of speculative decoding
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
PAGE_SIZES = (16, 32, 64, 128, 256)


def sparse_of(config: Any, device: torch.device, layers: Iterable[int]) -> Sparse:
    """Builds the sparse attention of the ``layers`` of an engine's rank; :func:`options_of` are
    parameters of ``msattn.attach``.

    Raises UserError if the engine, the model, an option or an artifact is not supported, or an
    artifact is for another model.
    """
    check_engine(config)
    model = config.model_config.hf_text_config
    check_supported(model)
    info = ModelInfo(
        config=model,
        dtype=config.model_config.dtype,
        fingerprint=partial(config_fingerprint, model),
        shard=partial(_shard, config, frozenset(layers)),
        to_device=partial(_to_device, device),
    )
    sparse = build_sparse(info, options_of(config))
    if reason := unpaged(model, sparse):
        raise UserError(f"vLLM: {reason}")
    if sparse.rotation is None:
        raise UserError(
            "vLLM: it hands over keys after RoPE, and dynamic and longrope RoPE cannot be inverted"
        )
    return sparse


def sparse_of_layers(config: Any, names: Collection[str], device: torch.device) -> Sparse:
    """Returns the sparse attention of a rank's layers. The first call builds it, and the layers
    keep it.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    layers = config.compilation_config.static_forward_context
    impls = [layers[name].impl for name in names]
    sparse = impls[0].sparse or sparse_of(config, device, map(extract_layer_index, names))
    for impl in impls:
        impl.sparse = sparse
    return sparse


def options_of(config: Any) -> AttachOptions:
    """Returns the options in ``additional_config`` of an engine, or else those in the model's
    ``config.json``.

    Raises UserError for an option with an unknown name or a wrong type.
    """
    additional = config.additional_config
    if not isinstance(additional, Mapping) or additional.get(SECTION) is None:
        return configured_options(config.model_config.hf_config)
    return artifact_options(additional[SECTION], f"additional_config.{SECTION}")


def check_engine(config: Any) -> None:
    """Raises UserError for parts of vLLM that the backend does not serve."""
    parallel, cache = config.parallel_config, config.cache_config
    require(
        cache.block_size in PAGE_SIZES,
        "block_size",
        cache.block_size,
        f"expected {', '.join(map(str, PAGE_SIZES))}",
    )
    method = getattr(config.speculative_config, "method", None)
    require(
        method in (None, *DRAFTS),
        "speculative_config.method",
        method,
        f"msattn verifies the drafts of {' and '.join(DRAFTS)}",
    )
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    refused = {
        "decode_context_parallel_size, prefill_context_parallel_size": (
            max(contexts) > 1,
            "use tensor_parallel_size or pipeline_parallel_size",
        ),
        "enable_dbo, ubatch_size": (parallel.use_ubatching, "leave them out"),
        f"kv_cache_dtype={cache.cache_dtype}": (
            cache.cache_dtype.startswith("fp8")
            and config.device_config.device_type == "cuda"
            and torch.cuda.get_device_capability() < (8, 9),
            "it needs a GPU of compute capability 8.9 or later; use auto",
        ),
        "kv_cache_dtype_skip_layers": (
            bool(getattr(cache, "kv_cache_dtype_skip_layers", None)),  # since vLLM 0.26
            "leave it out: all layers have one kv_cache_dtype",
        ),
        # it brings back the model's weights alone
        "enable_sleep_mode": (
            config.model_config.enable_sleep_mode,
            "leave it out, and stop the engine instead",
        ),
        "multi-head latent attention": (config.model_config.use_mla, "use another backend"),
    }
    for name, (is_used, instead) in refused.items():
        if is_used:
            raise UserError(f"vLLM: {name}: not supported by msattn; {instead}")
    if config.lora_config is not None:
        warnings.warn(
            "enable_lora: gates and classifiers were trained without adapters; those that change "
            "attention (q_proj, k_proj) may make them select worse",
            ModelWarning,
            stacklevel=2,
        )


def check_drafts(config: Any) -> None:
    """Raises UserError if a layer of this configuration is one of a draft model, for which no
    artifact is made.
    """
    drafts = config.speculative_config
    # drafts of n-grams have the model's own configuration
    has_model = drafts is not None and drafts.method == "draft_model"
    if has_model and config.model_config is drafts.draft_model_config:
        raise UserError(
            "speculative_config: msattn serves the model, not the draft model; give "
            '"attention_backend" one of vLLM\'s own in it'
        )


def drafts_of(config: Any) -> int:
    """Returns the most drafts that a request of an engine has in a pass."""
    return getattr(config.speculative_config, "num_speculative_tokens", None) or 0


def state_options(config: Any, sparse: Sparse) -> dict[str, Any]:
    """Returns the arguments of a state that say what an engine keeps."""
    return sparse.paged.state_options(
        config.model_config.hf_text_config,
        config.scheduler_config.max_num_seqs,
        drafts_of(config),
    )


def check_layer(**given: Any) -> None:
    """Raises UserError for what is ``given``: parts of a layer's attention that the kernels do not
    compute.
    """
    instead = {"kv_cache_dtype": f"msattn reads {', '.join(CACHE_DTYPES)}"}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"vLLM: {name}={value!s:.40} is not supported by msattn; "
                f"{instead.get(name, 'use another backend')}"
            )


def _shard(config: Any, layers: frozenset[int]) -> ModelShard:
    """Returns what this rank computes: its heads of its ``layers``."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    ranks, heads = (
        get_tensor_model_parallel_world_size(),
        num_kv_heads(config.model_config.hf_text_config),
    )
    require(
        heads % ranks == 0,
        "tensor_parallel_size",
        ranks,
        f"expected a divisor of the {heads} key/value heads",
    )
    in_stages = config.parallel_config.pipeline_parallel_size > 1
    return ModelShard(get_tensor_model_parallel_rank(), ranks, layers if in_stages else None)


def _to_device(device: torch.device, *modules: nn.Module | None) -> torch.device:
    for module in filter(None, modules):
        module.to(device)
    return device

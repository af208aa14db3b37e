"""Fingerprint of a model: shape, RoPE parameters, and hashes of configuration, weights and
tokenizer.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from msattn.trainer.models.families import decoder, family_of, rope_parameters, shape, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# the keys that q, k and v depend on in all families and that every version of transformers writes
HASHED_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps"),
    *("attention_bias", "tie_word_embeddings"),
)
SAMPLE_SIZE = 4096  # values of each sampled tensor that are hashed


def fingerprint(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    id: str = "",
    revision: str | None = None,
) -> dict[str, Any]:
    """Returns the fields that identify a model in a manifest.

    The ``weights_hash`` is of sampled values, independent of the dtype in which the checkpoint is
    loaded; None for quantized or offloaded weights. The ``tokenizer_hash`` is None without a
    tokenizer.
    """
    fields = config_fingerprint(model.config, id=id, revision=revision)
    tokens = (
        None
        if tokenizer is None
        else _hash(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    )
    return fields | {"weights_hash": _weights_hash(model), "tokenizer_hash": tokens}


def config_fingerprint(
    config: "PreTrainedConfig", *, id: str = "", revision: str | None = None
) -> dict[str, Any]:
    """Returns the :func:`fingerprint` of a model with unknown weights and tokenizer, whose hashes
    are None.
    """
    config = text_config(config)
    hashed = {key: getattr(config, key, None) for key in (*HASHED_KEYS, *family_of(config).hashed)}
    # GGUF files have it in single precision
    hashed["rms_norm_eps"] = float(f"{hashed['rms_norm_eps']:.6g}")
    return {
        "id": id,
        "revision": revision,
        **shape(config),
        "rope": {
            key: value
            for key, value in sorted(rope_parameters(config).items())
            if value is not None
        },
        "config_hash": _hash(json.dumps(hashed, sort_keys=True).encode()),
        "weights_hash": None,
        "tokenizer_hash": None,
    }


def _weights_hash(model: "PreTrainedModel") -> str | None:
    base = decoder(model)
    # others are linear attention
    attending = [layer for layer in base.layers if hasattr(layer, "self_attn")]
    layers = [attending[i] for i in sorted({0, len(attending) // 2, len(attending) - 1})]
    projections = [module for layer in layers for module in _projections(layer)]
    weights: list[Any] = [
        getattr(module, "weight", None) for module in (base.embed_tokens, *projections, base.norm)
    ]
    return _hash(*map(_sample, weights)) if all(map(has_values, weights)) else None


def _projections(layer: Any) -> tuple[Any, Any]:
    """Returns two projections of a layer: that of the queries, and that of the MLP (with experts,
    of the attention output).
    """
    attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
    queries = attention.q_proj if hasattr(attention, "q_proj") else attention.qkv_proj
    return queries, mlp.down_proj if hasattr(mlp, "down_proj") else attention.o_proj


def has_values(weight: Any) -> bool:
    """Returns False for weights of quantized modules (none, a method, or a tensor subclass) and for
    offloaded ones.
    """
    return type(weight) in (Tensor, Parameter) and weight.is_floating_point() and not weight.is_meta


def _sample(tensor: Tensor) -> bytes:
    """Returns sampled values, rounded so that a checkpoint gives the same bytes in every dtype.

    Values below fp16's normal range become 0, because there fp16 is coarser than bfloat16.
    """
    values = tensor.detach().flatten()
    values = values[:: max(1, values.numel() // SAMPLE_SIZE)].float()
    values = values.masked_fill(values.abs() < 1e-4, 0).bfloat16()
    return values.view(torch.int16).cpu().numpy().tobytes()


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]

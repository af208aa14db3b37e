"""Loading of artifacts, and checks that those that are attached fit the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msattn.trainer import artifacts
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import attention_layers, check_supported, num_kv_heads, num_layers, served_layers, shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOADERS = {"gate": Gate.load, "kmeans": KMeans.load, "qmodel": QModel.load, "decode_gate": DecodeGate.load}


def load(path: str | Path) -> Gate | KMeans | QModel | DecodeGate:
    """Loads an artifact of any kind, on the CPU.

    Parameters
    ----------
    path : folder of an artifact, or the id of a Hub repository.

    Raises
    ------
    UserError : the artifact is missing, damaged or of another format version.
    """
    return LOADERS[artifacts.read_kind(path)](path)


def load_router(path: str | Path) -> QModel | KMeans | DecodeGate:
    """Loads a query classifier or, in a folder without one, decode gates, or else a k-means, which routes by itself."""
    artifact = load(artifacts.find(path, "qmodel", "decode_gate", "kmeans"))
    if isinstance(artifact, Gate):
        raise UserError(f"qmodel={path}: this is a gate for prefill; accepted is a qmodel, a decode_gate or a kmeans artifact")
    return artifact


def check_model(model: Any) -> None:
    """Raises UserError for what is no model, and as :func:`msattn.trainer.models.families.check_supported`."""
    is_model = isinstance(model, nn.Module) and hasattr(model, "get_decoder") and hasattr(model, "config")
    require(is_model, "model", repr(model), "accepted is a causal language model of transformers")
    check_supported(model.config)


def check_selection(selection: Selection, config: "PreTrainedConfig") -> None:
    """Raises UserError for a selection whose parts are no policy or scorer, or that is for another model."""
    policy, scorer = selection.policy, selection.scorer
    policies = policy if isinstance(policy, Sequence) else [policy] * num_layers(config)
    ok = len(policies) == num_layers(config) and all(map(callable, policies))
    accepted = f"accepted is a policy, e.g. TopK(0.5), or one for each of {num_layers(config)} layers"
    require(ok, "select.policy", repr(policy), accepted)
    ok = callable(scorer) and isinstance(getattr(scorer, "block_size", None), int)
    require(ok, "select.scorer", repr(scorer), "accepted is a scorer, e.g. Quest()")
    if selection.gate is not None:
        check_gate(selection.gate, config)


def check_gate(gate: Gate, config: "PreTrainedConfig") -> None:
    """Raises UserError for gates of a model of another shape or of other layers, or with weights that are not finite."""
    _check_shape("gate", gate.model_shape(), config)
    served = served_layers(config)
    require(gate.layer_numbers == served, "gate.layer_numbers", gate.layer_numbers, f"accepted are the layers {served}")
    _check_finite("gate", gate)


def check_router(router: Router, config: "PreTrainedConfig") -> None:
    """Raises UserError for a router of a model of another shape, or with weights that are not finite."""
    if isinstance(router, DecodeGate):
        _check_shape("qmodel", router.model_shape(), config)
    elif isinstance(router, QModel | KMeans):
        _check_partition(router, config)
    else:
        _check_shape("qmodel", {"num_kv_heads": router.kv_heads}, config)
        fits = set(router.layers) <= set(range(num_layers(config)))
        require(fits, "qmodel.layers", router.layers, f"accepted are layers from 0 to {num_layers(config) - 1}")
        _check_served(router.layers, config)
    _check_finite("qmodel", router)


def _check_partition(router: QModel | KMeans, config: "PreTrainedConfig") -> None:
    partition = router.partition if isinstance(router, QModel) else router
    layers, centroids = partition.layers, partition.centroids
    require(
        centroids.ndim == 4 and centroids.numel() > 0 and centroids.dtype == torch.float32,
        "qmodel.centroids",
        f"{centroids.dtype} {list(centroids.shape)}",
        "accepted is float32 [layers, key/value heads, buckets, size], none of them 0",
    )
    fits = len(layers) == len(centroids) == len({*layers} & {*range(num_layers(config))})
    require(fits, "qmodel.layers", layers, f"accepted are {len(centroids)} different layers from 0 to {num_layers(config) - 1}")
    _check_served(layers, config)
    _check_shape("qmodel", {"num_kv_heads": centroids.shape[1], "head_dim": centroids.shape[3]}, config)
    if isinstance(router, QModel) and router.weight_in.shape[1] != num_kv_heads(config):
        _check_shape("qmodel", {"num_heads": router.weight_in.shape[1]}, config)


def _check_served(layers: Sequence[int], config: "PreTrainedConfig") -> None:
    """Raises UserError if one of ``layers`` keeps the model's own attention."""
    for layer in attention_layers(config):
        require(layer.kept is None or layer.layer not in layers, "qmodel.layers", layer.layer, f"not accepted: {layer.kept}")


def _check_shape(name: str, made_for: Mapping[str, int], config: "PreTrainedConfig") -> None:
    """Raises UserError if a number of ``made_for`` is not that of the model."""
    model = shape(config)
    for key, value in made_for.items():
        if value != model[key]:
            raise UserError(f"{name}: it is for another model; its {key} is {value}, this model's is {model[key]}")


def _check_finite(name: str, module: nn.Module) -> None:
    """Raises UserError if a weight is NaN or infinite."""
    for key, weight in module.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{name}: its {key} holds values that are not finite; accepted are numbers")

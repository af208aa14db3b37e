"""Checked reading of a repository of SeerAttention's authors: the family, the gates' RoPE and their
weights.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from msattn.trainer import models
from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError, library_errors
from msattn.trainer.models import rope
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS = ("attn_gate_weights.safetensors", "attn_gate_weights.pth")
POOLING = re.compile(r"max|min|avg")


def check_family(files: ModelFiles, accepted: tuple[str, ...]) -> None:
    """Raises UserError for a model of a family for which there are no gates."""
    if (family := files.config().get("model_type")) not in accepted:
        raise UserError(
            f"{files.name}: config.json: model_type={family!s:.60}: expected {', '.join(accepted)}"
        )


def gate_config(files: ModelFiles, **settings: Any) -> GateConfig:
    """Returns the configuration of our gates with ``settings``; UserError for settings that ours do
    not have.
    """
    try:
        return GateConfig(**settings)
    except UserError as error:
        raise UserError(
            f"{files.name}: config.json: the gates differ from ours: {error}"
        ) from error


def rotation_factor(files: ModelFiles, config: "PretrainedConfig", hidden: int) -> float:
    """Returns the scale factor of the RoPE of gates with width ``hidden``: YaRN's attention factor,
    otherwise 1.

    Raises UserError if their frequencies differ from those of msattn's gates.
    """
    if config.rope_parameters["rope_type"] == "dynamic":
        raise UserError(
            f"{files.name}: rope_type=dynamic: the angles of its gates depend on the length, "
            f"those of ours do not"
        )
    size = models.head_dim(config)
    if hidden != size and (
        config.model_type != "qwen2" or files.config().get("head_dim") is not None
    ):
        raise UserError(
            f"{files.name}: seerattn_gate_hidden_size={hidden}: its RoPE is that of heads of size "
            f"{size}, ours that of the gate"
        )
    return rope.inverse_frequencies(config, dim=hidden)[1]


def read_weights(
    files: ModelFiles, num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Tensor]]:
    """Returns the weights of each layer's gate in fp32, by the names in ``shapes``.

    Raises UserError if there is no file of weights, if it contains other objects, or if tensors
    have unexpected names, shapes or values that are not finite.
    """
    tensors = _load(files)
    names = [
        {part: f"model.layers.{layer}.self_attn.attn_gate.{part}.weight" for part in shapes}
        for layer in range(num_layers)
    ]
    expected = {name for layer in names for name in layer.values()}
    if different := sorted(expected ^ {*map(str, tensors)}):
        has = (
            "has no"
            if different[0] in expected
            else "has a tensor that its config.json does not ask for,"
        )
        raise UserError(f"{files.name}: the file of weights {has} {different[0]:.100}")
    return [
        {
            part: _weight(tensors[name], shapes[part], f"{files.name}: {name}")
            for part, name in layer.items()
        }
        for layer in names
    ]


def _load(files: ModelFiles) -> dict[str, Any]:
    """Returns the objects in the file of weights; no code in it runs."""
    name = next((name for name in WEIGHTS if files.find(name) is not None), None)
    path = None if name is None else files.find(name)
    if path is None:
        raise UserError(f"{files.name}: there are no gates; expected {' or '.join(WEIGHTS)}")
    where = f"{files.name}: {name} does not contain only weights"
    if path.suffix == ".safetensors" or name == WEIGHTS[0]:
        with library_errors(where):
            return load_file(path)
    with library_errors(where):
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise UserError(f"{where} (it is a {type(found).__name__})")
    return found


def _weight(tensor: Any, shape: tuple[int, ...], where: str) -> Tensor:
    """Returns a weight in fp32, checked."""
    if (
        not isinstance(tensor, Tensor)
        or not tensor.is_floating_point()
        or tensor.layout is not torch.strided
    ):
        raise UserError(f"{where} is no tensor of real numbers")
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{where} has the shape {list(tensor.shape)}, by config.json it is {list(shape)}"
        )
    values = tensor.float()
    if not values.isfinite().all():
        raise UserError(f"{where} has values that are not finite")
    return values

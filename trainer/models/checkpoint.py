"""Checks of a model's weights: of the files before loading, and of the model after loading."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Len
from safetensors import safe_open

from msattn.trainer.errors import UserError, library_errors
from msattn.trainer.models.config_keys import FileName
from msattn.trainer.models.families import (
    family_of,
    head_dim,
    num_heads,
    num_kv_heads,
    num_layers,
    served_layers,
    text_config,
)
from msattn.trainer.models.gguf import check_tensors
from msattn.trainer.models.identity import has_values
from msattn.trainer.storage.documents import check_regular, checked
from msattn.trainer.storage.model_files import INDEX, SAFETENSORS, WEIGHT_FILES, ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ADAPTER = "adapter_config.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-")  # transformers would read these files instead


@dataclass(frozen=True)
class Index:
    """The index file, which maps weights to files."""

    weight_map: Annotated[dict[str, FileName], Len(1)]
    metadata: dict[str, Any]


def checked_weights(files: ModelFiles, config: "PreTrainedConfig") -> Path:
    """Checks the weight files before a model of the size in ``config`` allocates memory, and
    returns their folder.

    Raises UserError if there are no weights, adapters or several checkpoints; if a file is missing,
    not regular, outside the folder, or contains code; if two files have the same weights; if the
    files are too small for the model's weights; or if a GGUF file has other weights.
    """
    if files.gguf is not None and not os.path.lexists(files.gguf.with_name(ADAPTER)):
        _check_size(files, config, 8 * files.gguf.stat().st_size)
        check_tensors(files.gguf, config, files.name)
        return files.gguf.parent
    # transformers would load the base model that it names
    if files.gguf is not None or files.locate(ADAPTER) is not None:
        raise _not_whole(files, ADAPTER)
    first = next((name for name in WEIGHT_FILES if files.locate(name) is not None), None)
    if first is None:
        raise UserError(
            f"{files.name}: the files there cannot be loaded (no weights: expected one of "
            f"{', '.join(WEIGHT_FILES)})"
        )
    names = _parts(files, first) if first.endswith(INDEX) else [first]
    files.download(names)
    parts = [_regular(files, name) for name in names]
    folder = parts[0].parent
    if distributed := sorted(filter(DISTRIBUTED.match, os.listdir(folder))):
        raise _not_whole(files, distributed[0])
    bits = 8 if is_quantized(config) else 1
    _check_size(files, config, bits * sum(part.stat().st_size for part in parts))
    if first.startswith("pytorch"):
        for part in parts:
            _check_pickle(part, f"{files.name}: {part.name} does not contain only weights")
    else:
        _check_headers(files, parts, quantized=is_quantized(config))
    return folder


def _not_whole(files: ModelFiles, name: str) -> UserError:
    return UserError(
        f"{files.name}: {name}: expected a whole model with its weights in {SAFETENSORS}, or in "
        f"parts"
    )


def _regular(files: ModelFiles, name: str) -> Path:
    """Returns the path of a weight file, which may be a link to anywhere."""
    path = files.locate(name)
    if path is None:
        raise UserError(f"{files.name}: {name} is missing")
    check_regular(path, f"{files.name}: {name}")
    return path


def check_loaded(files: ModelFiles, model: "PreTrainedModel", info: Mapping[str, Any]) -> None:
    """Raises UserError unless the files have exactly the model's weights, all finite; ``info`` is
    transformers' report.
    """
    if missing := sorted(info["missing_keys"]):  # transformers initialized them at random
        raise UserError(f"{files.name}: the checkpoint has no weights for {', '.join(missing[:3])}")
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{files.name}: {name} has the shape {list(shape)}, by its configuration it is "
            f"{list(expected)}"
        )
    left_over = sorted(info["unexpected_keys"])
    if left_over and not is_quantized(model.config):
        raise UserError(
            f"{files.name}: by its configuration the model has no {', '.join(left_over[:3])}, "
            f"which the checkpoint has"
        )
    for name, weight in model.named_parameters():
        if has_values(weight) and not torch.isfinite(weight).all():
            raise UserError(f"{files.name}: {name} has values that are not finite")


def is_quantized(config: "PreTrainedConfig") -> bool:
    return getattr(config, "quantization_config", None) is not None


def _parts(files: ModelFiles, index: str) -> list[str]:
    """Returns the names of the files in an index."""
    document = files.json(index)
    return sorted(set(checked(document or {}, Index, f"{files.name}: {index}").weight_map.values()))


def _check_headers(files: ModelFiles, parts: list[Path], quantized: bool) -> None:
    """Raises UserError if two files have weights with the same name, or if unquantized weights are
    not real numbers.
    """
    seen: dict[str, str] = {}
    for part in parts:
        with safe_open(part, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name in seen:
                    raise UserError(f"{files.name}: {name} is in {seen[name]} and in {part.name}")
                seen[name] = part.name
                dtype = opened.get_slice(name).get_dtype()
                if not quantized and not dtype.startswith(("F", "BF")):
                    raise UserError(
                        f"{files.name}: {name} has the dtype {dtype}, expected real numbers"
                    )


def _check_pickle(path: Path, where: str) -> None:
    """Raises UserError unless ``path`` contains only named tensors, without code or other
    objects.
    """
    with library_errors(where):
        content = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(content, dict):
        raise UserError(f"{where} (it is a {type(content).__name__})")
    for name, value in content.items():
        if (
            not isinstance(name, str)
            or not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
        ):
            raise UserError(f"{where} ({name!r:.80} is no tensor of real numbers)")


def _check_size(files: ModelFiles, config: "PreTrainedConfig", most: int) -> None:
    """Raises UserError if the model has more weights than ``most``: a quantized file's bits, or the
    bytes of others.
    """
    text, heads = text_config(config), num_heads(config) + num_kv_heads(config)
    inner = 0 if family_of(config).experts else text.intermediate_size
    attention = 2 * heads * head_dim(config) * len(served_layers(config))  # others may be smaller
    weights = text.hidden_size * (attention + 3 * inner * num_layers(config) + text.vocab_size)
    if weights > most:
        raise files.error(
            ValueError(f"{weights:,} weights by its configuration, at most {most:,} in the files")
        )

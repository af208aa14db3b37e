"""The layers of a model that msattn serves; the others keep the model's own attention and cache."""

from typing import TYPE_CHECKING, NamedTuple

from msattn.trainer.models.families.family import family_of
from msattn.trainer.models.families.shape import max_length, num_layers, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class LayerAttention(NamedTuple):
    """The attention of one layer.

    Attributes
    ----------
    layer : index of the layer.
    rotates : RoPE rotates its queries and keys.
    kept : the reason why the layer keeps the model's own attention; None if it is served and may be sparse.
    """

    layer: int
    rotates: bool
    kept: str | None


def attention_layers(config: "PreTrainedConfig") -> list[LayerAttention]:
    """Returns the attention of each layer of a supported model: which may be sparse, and why the others may not.

    A window that is at least as long as the model's positions is no window.
    """
    config = text_config(config)
    rotates = getattr(config, "no_rope_layers", None) or [True] * num_layers(config)  # 1 stands for a layer with RoPE
    return [LayerAttention(i, bool(rotates[i]), _kept(config, kind)) for i, kind in enumerate(layer_kinds(config))]


def served_layers(config: "PreTrainedConfig") -> list[int]:
    """Returns the indices of the layers that may be sparse."""
    return [each.layer for each in attention_layers(config) if each.kept is None]


def layer_kinds(config: "PreTrainedConfig") -> list[str]:
    """Returns the type of each layer."""
    if family_of(config).one_window:
        kind = FULL if getattr(config, "sliding_window", None) is None else SLIDING
        return [kind] * num_layers(config)
    return list(getattr(config, "layer_types", None) or [FULL] * num_layers(config))


def _kept(config: "PreTrainedConfig", kind: str) -> str | None:
    """Returns the reason why layers of this type keep the model's own attention, or None."""
    if kind == FULL:
        return None
    if kind == SLIDING:
        window = config.sliding_window
        whole = family_of(config).one_window and window >= max_length(config)
        return None if whole else f"it attends through a sliding window of {window} tokens"
    if kind == CHUNKED:
        return f"it attends within chunks of {config.attention_chunk_size} tokens"
    return f"its type is {kind}"

"""Context extension: replaces the RoPE parameters of a model's configuration (``model.rope_scaling``)."""

from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.families import ROPE_TYPES, rope_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ORIGINAL = "original_max_position_embeddings"  # tokens of pretraining, from which llama3 and yarn compute their frequency bands
WITH_ORIGINAL = ("llama3", "yarn")
STRETCHING = ("linear", "llama3", "yarn")  # types whose lowest frequencies are divided by a fixed factor


def scale_rope(config: "PreTrainedConfig", scaling: dict[str, Any]) -> None:
    """Replaces the RoPE parameters in place, and scales ``max_position_embeddings`` with them.

    Where types of layers have their own parameters, those of full-attention layers are replaced.

    The lowest frequencies are divided by the factor, so the positions grow by the ratio of the new factor to the one that the
    model has: Llama-3.1 has factor 8 and 131,072 positions, and factor 32 gives it 524,288. Only YaRN with an
    ``original_max_position_embeddings`` of its own has, by definition, so many times its factor. Where ``scaling`` gives none,
    that of the model stays.

    Raises
    ------
    UserError : a RoPE type that is not supported, or a missing or wrong parameter.
    """
    kind, before = scaling.get("rope_type"), rope_parameters(config)
    if kind not in ROPE_TYPES:
        raise UserError(f"model.rope_scaling.rope_type={kind}: accepted are {', '.join(ROPE_TYPES)}")
    try:
        unscaled = config.max_position_embeddings / _stretch(before)
        original = {ORIGINAL: before.get(ORIGINAL, round(unscaled))} if kind in WITH_ORIGINAL else {}
        positions = scaling[ORIGINAL] if kind == "yarn" and ORIGINAL in scaling else unscaled
        positions = round(positions * _stretch(scaling))
        kept = {key: before[key] for key in ("rope_theta", "partial_rotary_factor") if key in before}
        after = {**kept, **original, **scaling}
        by_layer = "full_attention" in config.rope_parameters
        config.rope_parameters = {**config.rope_parameters, "full_attention": after} if by_layer else after
        config.standardize_rope_params()
        config.max_position_embeddings = positions
        config.validate_rope()
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"model.rope_scaling={scaling}: {first_line(error)}") from error


def _stretch(rope: dict[str, Any]) -> float:
    """Returns the factor by which the lowest frequencies are divided; 1 if it is missing, which transformers refuses."""
    return float(rope.get("factor", 1.0)) if rope["rope_type"] in STRETCHING else 1.0

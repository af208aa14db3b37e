"""Rotary position embeddings as the model applies them, their inverse, and their extension to
longer contexts.

The first r channels of a head of size D rotate; r is D in most families, and 0 in layers without
RoPE. Channels ``d`` and ``d + r/2`` form a pair that is rotated by the angle ``p * inv_freq[d]`` at
position ``p`` (Su et al., RoFormer, in the half-split layout of transformers); in interleaved
layouts a pair is channels ``2 d`` and ``2 d + 1``. YaRN also scales cos and sin by a constant, so
the rotation is not orthogonal; :func:`msattn.kernels.unrotate.unrotate` inverts :func:`rotate`
including this factor.
"""

import copy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msattn.kernels.unrotate import unrotate
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.families import (
    ROPE_TYPES,
    family_of,
    full_attention_config,
    head_dim,
    rope_parameters,
    rotated_channels,
)
from msattn.trainer.models.layer_attention import LayerInputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# RoPE types whose angles depend on the length of the sequence at the time
LENGTH_DEPENDENT = ("dynamic", "longrope")
# tokens of pretraining, from which llama3 and yarn compute their frequency bands
ORIGINAL = "original_max_position_embeddings"
WITH_ORIGINAL = ("llama3", "yarn")
# types whose lowest frequencies are divided by a fixed factor
STRETCHING = ("linear", "llama3", "yarn", "proportional")


class KeysNotKnown(RuntimeError):
    """Raised if keys before RoPE cannot be recovered from cached keys."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of a model whose angles depend only on the position."""

    inv_freq: Tensor  # fp32 [r / 2], radians per token
    scaling: float  # factor of cos and sin
    interleaved: bool = False  # layout of the pairs

    @classmethod
    def of(cls, config: "PreTrainedConfig", device: torch.device) -> "Rotation | None":
        """Returns the rotation of a model; None if its angles depend on the length when a key was
        cached.
        """
        if rope_parameters(config)["rope_type"] in LENGTH_DEPENDENT:
            return None
        inv_freq, scaling = inverse_frequencies(config, device=device)
        return cls(inv_freq.to(device), scaling, family_of(config).interleaved)

    def invert(self, k: Tensor, positions: Tensor) -> Tensor:
        """Returns keys ``[B, H, N, D]`` before their rotation at integer ``positions [B | 1,
        N]``.
        """
        return self.undo(k, *self.angles(positions, k.dtype))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin ``[B | 1, N, r]`` at ``positions [B | 1, N]``, as a model of this
        ``dtype`` rounds them.
        """
        cos, sin = cos_sin(
            self.inv_freq.to(positions.device), positions, interleaved=self.interleaved
        )
        return (cos * self.scaling).to(dtype), (sin * self.scaling).to(dtype)

    def undo(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns queries or keys ``[B, H, N, D]`` before their rotation by :meth:`angles`."""
        # what keys are chosen by has no gradient
        return unrotate(x.detach(), cos, sin, interleaved=self.interleaved)


def keys_before_rope(
    x: LayerInputs, first: int, rotation: Rotation | None, end: int | None = None
) -> Tensor:
    """Returns the keys from index ``first`` up to ``end`` (M by default) before RoPE:
    ``[B, Hkv, end - first, D]``.

    Keys of the current pass are ``x.k_nope``; older keys are recovered from the cache. Raises
    KeysNotKnown if the ``rotation`` or the positions are not known.
    """
    end = x.num_keys if end is None else end
    if not x.rotates:
        return x.k[:, :, first:end]
    num_cached = x.num_keys - x.k_nope.shape[2]
    new = x.k_nope[:, :, max(first - num_cached, 0) : max(end - num_cached, 0)]
    if first >= num_cached:
        return new
    last = min(end, num_cached)
    if rotation is None or x.angles.positions is None:
        raise KeysNotKnown(
            f"layer {x.layer}: {last - first} cached keys were rotated by angles that are not known"
        )
    distance = num_cached - torch.arange(first, last, device=x.k.device)
    cached = rotation.invert(x.k[:, :, first:last], x.angles.positions[:, :1] - distance)
    return torch.cat([cached, new], dim=2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Applies RoPE to queries or keys ``[B, H, N, D]``.

    ``cos`` and ``sin`` are ``[B or 1, N, r]``, attention factor included. The channels after the
    first r stay.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:  # each pair (a, b) becomes (-b, a)
        turned = torch.stack((-first[..., 1::2], first[..., ::2]), dim=-1).flatten(-2)
    else:
        a, b = first.chunk(2, dim=-1)
        turned = torch.cat((-b, a), dim=-1)
    rotated = first * cos + turned * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def inverse_frequencies(
    config: "PreTrainedConfig", dim: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """Returns the angle per position by which the model's RoPE rotates each pair, in full-attention
    layers, and its scaling.

    The angles are fp32 ``[r / 2]``, in radians, for heads of size ``dim`` (by default the model's).
    The scaling is the factor of cos and sin, 1 except for YaRN and LongRoPE. LongRoPE has two sets
    of frequencies; these are those of long sequences.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, size = rope_parameters(config), head_dim(config)
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind}: expected {', '.join(ROPE_TYPES)}")
    dim = dim or size
    if kind == "default":
        rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    sized = copy.deepcopy(full_attention_config(config))
    sized.head_dim, sized.rope_parameters = dim, dict(rope)
    if kind == "longrope":  # a factor for each pair
        for name in ("short_factor", "long_factor"):
            sized.rope_parameters[name] = [
                rope[name][i * size // dim] for i in range(len(rope[name]) * dim // size)
            ]
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](sized, device, seq_len=sys.maxsize)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](sized, device)
    return inv_freq.float(), float(scaling)


def channel_pairs(config: "PreTrainedConfig") -> Tensor:
    """Returns the two channels of each pair, int64 ``[D / 2, 2]``: those that rotate, by frequency,
    then the others.
    """
    size, rotated = head_dim(config), int(rotated_channels(config))
    channels, rest = torch.arange(rotated), torch.arange(rotated, size)
    pairs = channels.view(-1, 2) if family_of(config).interleaved else channels.view(2, -1).T
    return torch.cat([pairs, rest.view(2, -1).T])


def cos_sin(
    inv_freq: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin at integer ``positions [..., T]``: fp32 ``[..., T, 2 * len(inv_freq)]``,
    without attention factor.
    """
    angles = positions.unsqueeze(-1).float() * inv_freq
    angles = (
        angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    )
    return angles.cos(), angles.sin()


def scale_rope(config: "PreTrainedConfig", scaling: dict[str, Any]) -> None:
    """Replaces the RoPE parameters in place, and scales ``max_position_embeddings`` with them.

    If layer types have separate parameters, those of full-attention layers are replaced.

    The lowest frequencies are divided by the factor, so the number of positions grows by the ratio
    of the new factor to the model's factor: Llama-3.1 has factor 8 and 131,072 positions, and
    factor 32 gives it 524,288. Only YaRN with its own ``original_max_position_embeddings`` has, by
    definition, that number times its factor. If ``scaling`` has no such number, the model's is
    kept.
    """
    kind, before = scaling.get("rope_type"), rope_parameters(config)
    if kind not in ROPE_TYPES:
        raise UserError(f"model.rope_scaling.rope_type={kind}: expected {', '.join(ROPE_TYPES)}")
    if before["rope_type"] == "proportional" != kind:  # others rotate other pairs of channels
        raise UserError(
            f"model.rope_scaling.rope_type={kind}: expected proportional, the model's own"
        )
    try:
        unscaled = config.max_position_embeddings / _stretch(before)
        original = (
            {ORIGINAL: before.get(ORIGINAL, round(unscaled))} if kind in WITH_ORIGINAL else {}
        )
        positions = scaling[ORIGINAL] if kind == "yarn" and ORIGINAL in scaling else unscaled
        positions = round(positions * _stretch(scaling))
        kept = {
            key: before[key] for key in ("rope_theta", "partial_rotary_factor") if key in before
        }
        after = {**kept, **original, **scaling}
        by_layer = "full_attention" in config.rope_parameters
        config.rope_parameters = (
            {**config.rope_parameters, "full_attention": after} if by_layer else after
        )
        config.standardize_rope_params()
        config.max_position_embeddings = positions
        config.validate_rope()
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"model.rope_scaling={scaling}: {first_line(error)}") from error


def _stretch(rope: dict[str, Any]) -> float:
    """Returns the factor by which the lowest frequencies are divided; 1 if it is missing, which
    transformers refuses.
    """
    return float(rope.get("factor", 1.0)) if rope["rope_type"] in STRETCHING else 1.0

"""Rotary position embeddings as the model applies them, and their inverse.

Channels ``d`` and ``d + D/2`` of a head of size D form a pair that is rotated by the angle ``p * inv_freq[d]`` at position
``p`` (Su et al., RoFormer, in the half-split layout of transformers). YaRN also scales cos and sin by a constant, so the
rotation is not orthogonal; :func:`unrotate` inverts :func:`rotate` including this factor.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.models.families import ROPE_TYPES, head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from msattn.trainer.models.tap import LayerInputs


class KeysNotKnown(RuntimeError):
    """Keys before RoPE cannot be recovered from cached ones."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of a model whose angles depend on the position alone.

    Attributes
    ----------
    inv_freq : fp32 ``[D / 2]``, radians per token.
    scaling : factor of cos and sin.
    """

    inv_freq: Tensor
    scaling: float

    @classmethod
    def of(cls, config: "PreTrainedConfig", device: torch.device) -> "Rotation | None":
        """Returns the rotation of a model; None for dynamic RoPE, whose angles depend on the length when a key was cached."""
        if config.rope_parameters["rope_type"] == "dynamic":
            return None
        inv_freq, scaling = inverse_frequencies(config, device=device)
        return cls(inv_freq.to(device), scaling)

    def invert(self, k: Tensor, positions: Tensor) -> Tensor:
        """Returns keys ``[B, H, N, D]`` before their rotation at integer ``positions [B | 1, N]``."""
        cos, sin = cos_sin(self.inv_freq.to(k.device), positions)
        cos, sin = ((each * self.scaling).to(k.dtype).float() for each in (cos, sin))  # rounded as in the model
        return unrotate(k.float(), cos, sin).to(k.dtype)


def keys_before_rope(x: "LayerInputs", first: int, rotation: Rotation | None, end: int | None = None) -> Tensor:
    """Returns the keys from index ``first`` up to ``end`` (M by default) before RoPE: ``[B, Hkv, end - first, D]``.

    Those of the current pass are ``x.k_nope``. Older ones are recovered from the cache.

    Raises
    ------
    KeysNotKnown : older keys are needed, but the ``rotation`` or the positions are not known.
    """
    end = x.num_keys if end is None else end
    num_cached = x.num_keys - x.k_nope.shape[2]
    new = x.k_nope[:, :, max(first - num_cached, 0) : max(end - num_cached, 0)]
    if first >= num_cached:
        return new
    last = min(end, num_cached)
    if rotation is None or x.positions is None:
        raise KeysNotKnown(f"layer {x.layer}: {last - first} cached keys were rotated by angles that are not known")
    distance = num_cached - torch.arange(first, last, device=x.k.device)
    cached = rotation.invert(x.k[:, :, first:last], x.positions[:, :1] - distance)
    return torch.cat([cached, new], dim=2)


def _rotate_half(x: Tensor) -> Tensor:
    """Maps each pair ``(a, b)`` to ``(-b, a)``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to queries or keys.

    Parameters
    ----------
    x : Tensor [B, H, N, D]
    cos, sin : Tensor [B or 1, N, D]
        As transformers' rotary embedding returns them (both halves filled, attention factor included).

    Returns
    -------
    Tensor [B, H, N, D]
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + _rotate_half(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverts :func:`rotate`, with the same shapes; the division also removes an attention factor."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos - _rotate_half(x) * sin) / (cos * cos + sin * sin)


def inverse_frequencies(
    config: "PreTrainedConfig", dim: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """Returns the angle per position by which the model's RoPE rotates each pair.

    Parameters
    ----------
    config : the model's configuration
    dim : int, optional
        Head size to compute the frequencies for, with the model's base and scaling; default: the model's head size.
    device : device of the result

    Returns
    -------
    inv_freq : Tensor [dim / 2] fp32, radians per token
    attention_scaling : float
        Factor that the model multiplies cos and sin by (1 except for YaRN).

    Raises
    ------
    ValueError : a RoPE type other than default, linear, dynamic, llama3, yarn.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: dict = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind}: accepted are {', '.join(ROPE_TYPES)}")
    dim = dim or head_dim(config)
    if kind == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    sized = copy.deepcopy(config)
    sized.head_dim = dim
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](sized, device)
    return inv_freq.float(), float(scaling)


def cos_sin(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin at integer ``positions [..., T]``: fp32 ``[..., T, 2 * len(inv_freq)]``, without attention factor."""
    angles = positions.unsqueeze(-1).float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()

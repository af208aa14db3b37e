"""Rotary position embeddings as the model applies them, and their inverse.

A head of size D is split in halves: channel ``d`` and ``d + D/2`` form a pair that position ``p`` turns by the angle
``p * inv_freq[d]`` (Su et al., RoFormer, in the half-split layout of transformers). Some scalings (YaRN) also stretch cos and
sin by a constant, so that a rotation is not quite orthogonal; :func:`unrotate` undoes exactly what :func:`rotate` did.
"""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.models.families import ROPE_TYPES, head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _rotate_half(x: Tensor) -> Tensor:
    """Each pair ``(a, b)`` becomes ``(-b, a)``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys to their positions.

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
    """The inverse of :func:`rotate`, same shapes; the division undoes an attention factor too."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos - _rotate_half(x) * sin) / (cos * cos + sin * sin)


def inverse_frequencies(
    config: "PreTrainedConfig", dim: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """The angles a position that the model's RoPE turns each pair by.

    Parameters
    ----------
    config : the model's configuration
    dim : int, optional
        Head size to compute them for, from the same base and scaling; None takes the model's own.
    device : where the result lives

    Returns
    -------
    inv_freq : Tensor [dim / 2] fp32, radians a token
    attention_scaling : float
        What the model multiplies cos and sin with (1 but for YaRN).

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
    """Cosines and sines of integer ``positions [..., T]``: each fp32 ``[..., T, 2 * len(inv_freq)]``, no attention factor."""
    angles = positions.unsqueeze(-1).float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()

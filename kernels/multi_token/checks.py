"""Checks of Multi-Token Attention's weights and mask; see :mod:`msattn.kernels.common.checks`."""

from typing import get_args

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_device
from msattn.kernels.types import ConvMask

MAX_CONV_SIZE = 32


def check_convolution(weight: Tensor, mask: str, q: Tensor) -> None:
    """Checks ``weight [Hq, c_q, c_k]``, kernels of at most 32 x 32, and the name of the mask."""
    sizes = weight.shape[1:] if weight.dim() == 3 else (0,)
    if (
        weight.dim() != 3
        or weight.shape[0] != q.shape[1]
        or not 1 <= min(sizes) <= max(sizes) <= MAX_CONV_SIZE
    ):
        raise ValueError(
            f"weight.shape={tuple(weight.shape)}: expected [{q.shape[1]}, c_q, c_k], one kernel "
            f"for each of q's heads, of 1 to {MAX_CONV_SIZE} queries and keys"
        )
    if mask not in get_args(ConvMask):
        raise ValueError(f"mask={mask!r}: expected one of {', '.join(get_args(ConvMask))}")
    _check_dtype_and_device(weight, q)


def check_head_weight(weight: Tensor, q: Tensor) -> None:
    """Checks ``weight [Hq, Hq]``: q's dtype or fp32, q's device."""
    if weight.shape != (q.shape[1], q.shape[1]):
        raise ValueError(
            f"weight.shape={tuple(weight.shape)}: expected {(q.shape[1],) * 2}, a row for each of "
            f"q's heads"
        )
    _check_dtype_and_device(weight, q)


def key_taps_before(weight: Tensor) -> int:
    """Returns the number of taps before the current key, ``(c_k - 1) // 2``."""
    return (weight.shape[2] - 1) // 2


def key_taps_after(weight: Tensor) -> int:
    """Returns the number of taps after the current key."""
    return weight.shape[2] - 1 - key_taps_before(weight)


def _check_dtype_and_device(weight: Tensor, q: Tensor) -> None:
    if weight.dtype not in (q.dtype, torch.float32):
        raise ValueError(
            f"weight.dtype={weight.dtype}: expected q's dtype, {q.dtype}, or torch.float32"
        )
    check_device("weight", weight, "q", q)

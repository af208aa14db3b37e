"""Argument checks of dense decoding and of merging; see :mod:`.checks`."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import FLOATS, check_device, check_per_sequence, check_qkv, check_tensor, statistics_dtype
from msattn.kernels.common.mta_checks import check_convolution
from msattn.kernels.types import ScoreMod


def check_flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    score_mod: ScoreMod | None,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    splits: int | None,
) -> None:
    """Checks the arguments of ``flash_decode``, among them the score_mod's tensors."""
    check_qkv(q, k, v)
    check_per_sequence("kv_start", kv_start, q)
    check_per_sequence("kv_len", kv_len, q)
    if variant not in ("partial", "global"):
        raise ValueError(f"variant={variant!r}: expected 'partial' or 'global'")
    _check_splits(splits)
    for n, x in enumerate(score_mod.tensors if score_mod else ()):
        check_device(f"score_mod.tensors[{n}]", x, "q", q)
    if score_mod and score_mod.built_in == "alibi" and score_mod.tensors[0].shape != q.shape[1:2]:
        raise ValueError(f"score_mod: alibi has {len(score_mod.tensors[0])} slopes, expected {q.shape[1]}, one per head")


def check_conv_decode(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    mask: str,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    splits: int | None,
) -> None:
    """Checks the arguments of ``conv_decode``; the window has the kernel's c_q rows."""
    check_qkv(q_window, k, v)
    check_convolution(weight, mask, q_window)
    check_per_sequence("kv_start", kv_start, q_window)
    check_per_sequence("kv_len", kv_len, q_window)
    if q_window.shape[2] != weight.shape[1]:
        raise ValueError(
            f"q_window.shape={tuple(q_window.shape)}: expected {weight.shape[1]} queries, as weight.shape={tuple(weight.shape)}"
        )
    _check_splits(splits)


def check_states(outs: Tensor, lses: Tensor) -> None:
    """Checks ``outs [S, B, H, N, D]`` and ``lses [S, B, H, N]`` of ``merge_states``."""
    if outs.dim() != 5 or min(outs.shape) < 1 or outs.dtype not in (*FLOATS, torch.float64):
        raise ValueError(
            f"outs is {outs.dtype} {tuple(outs.shape)}: expected a floating-point [parts, batch, heads, tokens, head size], "
            "each size at least 1"
        )
    check_tensor("lses", lses, statistics_dtype(outs), outs.shape[:4], "outs", outs)


def _check_splits(splits: int | None) -> None:
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r}: expected an integer of at least 1, or None")

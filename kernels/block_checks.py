"""Checks of arguments of what scores and selects blocks: metadata only, as in :mod:`msattn.kernels.checks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from msattn.kernels.checks import check_block_size, check_tokens
from msattn.kernels.types import Backend

POOLINGS = ("avg", "max", "min")
MAX_COLUMNS = 2**15  # of a row that one program holds


def check_pool_blocks(x: Tensor, poolings: Sequence[str], block_size: int, start: Tensor | None) -> None:
    """``x [B, H, N, D]``, ways to pool, each once, and ``start`` of one or all sequences on x's device; else ValueError."""
    check_tokens("x", x)
    check_block_size(block_size)
    if not poolings or not set(poolings) <= set(POOLINGS) or len(set(poolings)) < len(poolings):
        raise ValueError(f"poolings={poolings!r}: expected one or more of {', '.join(POOLINGS)}, each once")
    if start is None:
        return
    if start.dtype not in (torch.int32, torch.int64) or start.dim() != 1 or len(start) not in (1, x.shape[0]):
        raise ValueError(f"start is {start.dtype} {tuple(start.shape)}: expected int32 or int64, ({x.shape[0]},) or (1,)")
    if start.device != x.device:
        raise ValueError(f"start.device={start.device}: expected x's device, {x.device}")


def check_block_softmax(logits: Tensor, visible: Tensor, backend: Backend) -> None:
    """``logits [B, H, Tr, Tc]`` with rows that the backend takes, and ``visible`` that fits; else ValueError."""
    _check_scores("logits", logits, backend)
    _check_rows("visible", visible, logits, torch.bool, logits.shape[3])


def check_best_blocks(scores: Tensor, counts: Tensor, visible: Tensor, always: Tensor, backend: Backend) -> None:
    """``scores [B, H, Tr, Tc]`` with rows that the backend takes, and counts and masks that fit; else ValueError."""
    _check_scores("scores", scores, backend)
    _check_rows("counts", counts, scores, torch.int32, 1)
    _check_rows("visible", visible, scores, torch.bool, scores.shape[3])
    _check_rows("always", always, scores, torch.bool, scores.shape[3])


def _check_scores(name: str, x: Tensor, backend: Backend) -> None:
    if x.dim() != 4 or min(x.shape) < 1 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected fp32 (or fp64) [batch, heads, row blocks, columns]")
    if backend == "triton" and x.shape[3] > MAX_COLUMNS:
        raise ValueError(f"{name} has {x.shape[3]} columns: the Triton kernels take up to {MAX_COLUMNS}")
    _check_contiguous(name, x)


def _check_rows(name: str, x: Tensor, scores: Tensor, dtype: torch.dtype, cols: int) -> None:
    batch, _, rows, _ = scores.shape
    if x.dtype != dtype or tuple(x.shape) not in ((1, 1, rows, cols), (batch, 1, rows, cols)):
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected} [{batch} or 1, 1, {rows}, {cols}]")
    if x.device != scores.device:
        raise ValueError(f"{name}.device={x.device}: expected that of the scores, {scores.device}")
    _check_contiguous(name, x)


def _check_contiguous(name: str, x: Tensor) -> None:
    if x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"{name}.stride()={x.stride()}: expected rows that are contiguous")

"""Checks of arguments of what scores and selects blocks: metadata only, as in :mod:`msattn.kernels.common.checks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_block_size, check_per_sequence, check_qkv, check_tokens, statistics_dtype
from msattn.kernels.types import Backend

POOLINGS = ("avg", "max", "min")
MAX_COLUMNS = 2**15  # of a row that one program holds


def check_pool_blocks(x: Tensor, poolings: Sequence[str], block_size: int, start: Tensor | None) -> None:
    """``x [B, H, N, D]``, ways to pool, each once, and ``start`` of one or all sequences on x's device; else ValueError."""
    check_tokens("x", x)
    check_block_size(block_size)
    _check_poolings("poolings", poolings)
    if start is None:
        return
    if start.dtype not in (torch.int32, torch.int64) or start.dim() != 1 or len(start) not in (1, x.shape[0]):
        raise ValueError(f"start is {start.dtype} {tuple(start.shape)}: expected int32 or int64, ({x.shape[0]},) or (1,)")
    if start.device != x.device:
        raise ValueError(f"start.device={start.device}: expected x's device, {x.device}")


def check_gate_scores(
    q: Tensor,
    k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    q_pool: Sequence[str],
    k_pool: Sequence[str],
    block_size: int,
    kv_start: Tensor | None,
) -> None:
    """Queries and keys of one model, and contiguous weights of gate heads that share them evenly; else ValueError."""
    check_qkv(q, k, k)
    check_block_size(block_size)
    check_per_sequence("kv_start", kv_start, q)
    _check_poolings("q_pool", q_pool)
    _check_poolings("k_pool", k_pool)
    heads, hidden = query_weight.shape[:2] if query_weight.dim() == 3 else (0, 0)
    if heads < 1 or q.shape[1] % heads or heads % k.shape[1] or hidden < 2 or hidden % 2:
        raise ValueError(
            f"query_weight.shape={tuple(query_weight.shape)}: expected [gate heads, hidden, pooled], hidden even, for"
            f" {q.shape[1]} query heads and {k.shape[1]} key/value heads"
        )
    head_size, dtype = q.shape[3], statistics_dtype(q)
    _check_weight("query_weight", query_weight, dtype, (heads, hidden, q.shape[1] // heads * len(q_pool) * head_size), q)
    _check_weight("key_weight", key_weight, dtype, (heads, hidden, len(k_pool) * head_size), q)
    if inv_freq is not None:
        _check_weight("inv_freq", inv_freq, torch.float32, (hidden // 2,), q)


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


def _check_poolings(name: str, poolings: Sequence[str]) -> None:
    if not poolings or not set(poolings) <= set(POOLINGS) or len(set(poolings)) < len(poolings):
        raise ValueError(f"{name}={poolings!r}: expected one or more of {', '.join(POOLINGS)}, each once")


def _check_weight(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != q.device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}: expected {dtype} {shape} on {q.device},"
            " contiguous"
        )

"""Argument checks of operations on blocks of tokens; see :mod:`.checks`."""

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_device, check_per_sequence, check_tokens, statistics_dtype
from msattn.kernels.types import Backend, Pool

BLOCK_SIZES = (16, 32, 64, 128)
ZOOMS = (1, 2, 4, 8)
POOLINGS = ("avg", "max", "min")
POOLS = get_args(Pool)
MAX_COLUMNS = 2**15  # columns of a score row: one program holds a whole row


def check_block_size(block_size: int) -> None:
    """Checks that ``block_size`` is a power of two from 16 to 128, a tile length."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}")


def check_pool(pool: str) -> None:
    """Checks that ``pool`` is one of ``POOLS``."""
    if pool not in POOLS:
        raise ValueError(f"pool={pool!r}: expected one of {', '.join(POOLS)}")


def check_block_mask(block_mask: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """Checks bool ``block_mask [B | 1, Hq | Hkv | 1, Tr, Tc]`` and ``block_size``."""
    _check_block_map("block_mask", block_mask, torch.bool, q, k, block_size)


def check_zoom(zoom: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """Checks uint8 ``zoom [B | 1, Hq | Hkv | 1, Tr, Tc]`` and ``block_size``."""
    _check_block_map("zoom", zoom, torch.uint8, q, k, block_size)


def _check_block_map(name: str, x: Tensor, dtype: torch.dtype, q: Tensor, k: Tensor, block_size: int) -> None:
    check_block_size(block_size)
    row_blocks, col_blocks = ((tokens + block_size - 1) // block_size for tokens in (q.shape[2], k.shape[2]))
    check_map_shape(name, x, dtype, [(q.shape[0], 1), (q.shape[1], k.shape[1], 1), (row_blocks,), (col_blocks,)])
    check_device(name, x, "q", q)


def check_map_shape(name: str, x: Tensor, dtype: torch.dtype, accepted: Sequence[tuple[int, ...]]) -> None:
    """Checks the dtype of a block map and each of its four sizes against the accepted ones."""
    if x.dtype != dtype or x.dim() != 4:
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected} [batch, heads, row blocks, column blocks]")
    for size, sizes, what in zip(x.shape, accepted, ("batch", "heads", "row blocks", "column blocks"), strict=True):
        if size not in sizes:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: {what} must be {' or '.join(map(str, sizes))}")


def check_pool_blocks(
    x: Tensor, poolings: Sequence[str], block_size: int, start: Tensor | None, rotated: Tensor | None
) -> None:
    """Checks the arguments of ``pool_blocks``: ``x [B, H, N, D]``, ``start [B | 1]``, ``rotated`` like x."""
    check_tokens("x", x)
    check_block_size(block_size)
    _check_poolings("poolings", poolings)
    _check_rotated("rotated", rotated, "x", x)
    if start is None:
        return
    if start.dtype not in (torch.int32, torch.int64) or start.dim() != 1 or len(start) not in (1, x.shape[0]):
        raise ValueError(f"start is {start.dtype} {tuple(start.shape)}: expected int32 or int64, ({x.shape[0]},) or (1,)")
    check_device("start", start, "x", x)


def check_gate_scores(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    q_pool: Sequence[str],
    num_keys: int,
    block_size: int,
    kv_start: Tensor | None,
    q_rope: Tensor | None,
    mean_weight: float,
) -> None:
    """Checks the arguments of ``gate_scores``; gate heads must share heads evenly."""
    check_tokens("q", q)
    check_block_size(block_size)
    check_per_sequence("kv_start", kv_start, q)
    _check_poolings("q_pool", q_pool)
    _check_rotated("q_rope", q_rope, "q", q)
    head_size, dtype, blocks = q.shape[3], statistics_dtype(q), (num_keys + block_size - 1) // block_size
    pools = pooled_k.shape[3] // head_size - (q_rope is not None) if pooled_k.dim() == 4 else 0
    kv_heads = pooled_k.shape[1] if pools > 0 else 0
    if not kv_heads or pooled_k.shape != (len(q), kv_heads, blocks, (pools + (q_rope is not None)) * head_size):
        raise ValueError(
            f"pooled_k.shape={tuple(pooled_k.shape)}: expected [{len(q)}, key/value heads, {blocks}, poolings * {head_size}],"
            " the last pooling that of q_rope, if it is given"
        )
    heads, hidden = query_weight.shape[:2] if query_weight.dim() == 3 else (0, 0)
    if heads < 1 or q.shape[1] % heads or heads % kv_heads or hidden < 2 or hidden % 2:
        raise ValueError(
            f"query_weight.shape={tuple(query_weight.shape)}: expected [gate heads, hidden, pooled]: gate heads a divisor of"
            f" {q.shape[1]} query heads and a multiple of {kv_heads} key/value heads, hidden even"
        )
    if pooled_k.dtype != dtype or pooled_k.device != q.device:
        raise ValueError(f"pooled_k is {pooled_k.dtype} on {pooled_k.device}: expected {dtype} on {q.device}")
    _check_weight("query_weight", query_weight, dtype, (heads, hidden, q.shape[1] // heads * len(q_pool) * head_size), q)
    _check_weight("key_weight", key_weight, dtype, (heads, hidden, pools * head_size), q)
    if inv_freq is not None:
        _check_weight("inv_freq", inv_freq, torch.float32, (hidden // 2,), q)
    if not math.isfinite(mean_weight) or (mean_weight and q_rope is None):
        raise ValueError(f"mean_weight={mean_weight}: expected a finite number, and q_rope unless it is 0")


def _check_rotated(name: str, x: Tensor | None, of: str, like: Tensor) -> None:
    """Checks an optional tensor of the same tokens as ``like``, after RoPE."""
    if x is None:
        return
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {like.dtype} {tuple(like.shape)}, as {of}")
    check_device(name, x, of, like)


def check_block_softmax(logits: Tensor, visible: Tensor, backend: Backend) -> None:
    """Checks the arguments of ``block_softmax``."""
    _check_scores("logits", logits, backend)
    _check_rows("visible", visible, logits, torch.bool, logits.shape[3])


def check_best_blocks(scores: Tensor, counts: Tensor, visible: Tensor, always: Tensor, backend: Backend) -> None:
    """Checks the arguments of ``best_blocks``."""
    _check_scores("scores", scores, backend)
    _check_rows("counts", counts, scores, torch.int32, 1)
    _check_rows("visible", visible, scores, torch.bool, scores.shape[3])
    _check_rows("always", always, scores, torch.bool, scores.shape[3])


def _check_scores(name: str, x: Tensor, backend: Backend) -> None:
    if x.dim() != 4 or min(x.shape) < 1 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected float32 (or float64) [batch, heads, row blocks, column blocks], "
            "each size at least 1"
        )
    if backend == "triton" and x.shape[3] > MAX_COLUMNS:
        raise ValueError(f"{name} has {x.shape[3]} columns: the Triton kernels accept at most {MAX_COLUMNS}")
    _check_contiguous_rows(name, x)


def _check_rows(name: str, x: Tensor, scores: Tensor, dtype: torch.dtype, cols: int) -> None:
    batch, _, rows, _ = scores.shape
    if x.dtype != dtype or tuple(x.shape) not in ((1, 1, rows, cols), (batch, 1, rows, cols)):
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected} [{batch} or 1, 1, {rows}, {cols}]")
    check_device(name, x, "scores", scores)
    _check_contiguous_rows(name, x)


def _check_contiguous_rows(name: str, x: Tensor) -> None:
    if x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"{name}.stride()={x.stride()}: expected contiguous rows (a last stride of 1)")


def _check_poolings(name: str, poolings: Sequence[str]) -> None:
    if not poolings or not set(poolings) <= set(POOLINGS) or len(set(poolings)) < len(poolings):
        raise ValueError(f"{name}={poolings!r}: expected one or more of {', '.join(POOLINGS)}, each once")


def _check_weight(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != q.device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}: expected {dtype} {shape} on {q.device},"
            " contiguous"
        )

"""Argument checks of the operations on a gate, ``gate_scores`` and ``gate_blocks``."""

import math
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.best_of_row import MAX_COLUMNS
from msattn.kernels.common.block_checks import check_poolings, check_rotated, resolve_key_block_size
from msattn.kernels.common.checks import (
    check_device,
    check_per_sequence,
    check_tokens,
    resolve_backend,
    statistics_dtype,
)
from msattn.kernels.common.gate_rows import GateArguments
from msattn.kernels.types import Backend


def check_gate(
    *,
    q: Tensor,
    q_pool: list[str],
    block_size: int,
    key_block_size: int | None,
    backend: Backend | None,
    **others: Any,
) -> tuple[GateArguments, Backend]:
    """Checks the arguments of :func:`~msattn.kernels.gate_scores.gate_scores`; returns those of its
    operator.
    """
    backend = resolve_backend(backend, q)
    check_tokens("q", q)
    gate = GateArguments(
        q=q,
        q_pool=",".join(q_pool),
        block_size=block_size,
        key_block_size=resolve_key_block_size(block_size, key_block_size),
        **others,
    )
    check_per_sequence(gate.q, kv_start=gate.kv_start)
    check_poolings("q_pool", q_pool)
    check_rotated("q_rope", gate.q_rope, "q", gate.q)
    blocks = -(-gate.num_keys // gate.key_block_size)
    if backend == "triton" and blocks > MAX_COLUMNS:
        raise ValueError(
            f"num_keys={gate.num_keys} are {blocks} blocks: the Triton kernels accept at most "
            f"{MAX_COLUMNS}"
        )
    _check_projection(gate, len(q_pool), blocks)
    if not -math.inf < gate.mean_weight < math.inf or (gate.mean_weight and gate.q_rope is None):
        raise ValueError(
            f"mean_weight={gate.mean_weight}: expected a finite number, and q_rope unless it is 0"
        )
    _check_given_scores(gate)
    return gate, backend


def _check_projection(gate: GateArguments, q_pools: int, blocks: int) -> None:
    """Checks pooled keys, weights and frequencies."""
    q, pooled_k, query_weight = gate.q, gate.pooled_k, gate.query_weight
    head_size, dtype, rotated = q.shape[3], statistics_dtype(q), int(gate.q_rope is not None)
    pools = pooled_k.shape[3] // head_size - rotated if pooled_k.dim() == 4 else 0
    kv_heads = pooled_k.shape[1] if pools > 0 else 0
    if not kv_heads or pooled_k.shape != (len(q), kv_heads, blocks, (pools + rotated) * head_size):
        raise ValueError(
            f"pooled_k.shape={tuple(pooled_k.shape)}: expected [{len(q)}, key/value heads, "
            f"{blocks}, poolings * {head_size}], the last pooling that of q_rope, if it is given"
        )
    heads, hidden = query_weight.shape[:2] if query_weight.dim() == 3 else (0, 0)
    if heads < 1 or q.shape[1] % heads or heads % kv_heads or hidden < 2 or hidden % 2:
        raise ValueError(
            f"query_weight.shape={tuple(query_weight.shape)}: expected [gate heads, hidden, "
            f"pooled]: gate heads a divisor of {q.shape[1]} query heads and a multiple of "
            f"{kv_heads} key/value heads, hidden even"
        )
    if pooled_k.dtype != dtype or pooled_k.device != q.device:
        raise ValueError(
            f"pooled_k is {pooled_k.dtype} on {pooled_k.device}: expected {dtype} on {q.device}"
        )
    widths = q.shape[1] // heads * q_pools * head_size, pools * head_size
    _check_exactly("query_weight", query_weight, dtype, (heads, hidden, widths[0]), q)
    _check_exactly("key_weight", gate.key_weight, dtype, (heads, hidden, widths[1]), q)
    if gate.inv_freq is not None:
        _check_exactly("inv_freq", gate.inv_freq, torch.float32, (hidden // 2,), q)


def _check_given_scores(gate: GateArguments) -> None:
    """Checks the scores of columns and of the last rows."""
    batch, heads, rows, cols = gate.map_shape
    dtype, columns, last_rows = statistics_dtype(gate.q), gate.columns, gate.last_rows
    for name, x in (("columns", columns), ("last_rows", last_rows)):
        if x is not None and gate.last_queries:
            raise ValueError(f"{name}: expected None with last_queries=True")
    if columns is not None:
        _check_exactly("columns", columns, dtype, (batch, heads, cols), gate.q)
    if last_rows is not None:
        count = min(rows, max(1, last_rows.shape[2])) if last_rows.dim() == 4 else 1
        _check_exactly("last_rows", last_rows, dtype, (batch, heads, count, cols), gate.q)
    if gate.whole is not None:
        count = 0 if last_rows is None else last_rows.shape[2]
        if gate.whole.dtype != torch.bool or tuple(gate.whole.shape) not in (
            (1, count),
            (batch, count),
        ):
            raise ValueError(
                f"whole is {gate.whole.dtype} {tuple(gate.whole.shape)}: expected bool "
                f"[{batch} or 1, {count}], the rows of last_rows"
            )
        check_device("whole", gate.whole, "q", gate.q)


def _check_exactly(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor
) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != q.device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}: expected "
            f"{dtype} {shape} on {q.device}, contiguous"
        )

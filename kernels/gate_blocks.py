"""Selection of key blocks by SeerAttention's gate, for inference.

    gate_blocks(...)[r, c] = best_blocks(gate_scores(...))[r, c], where the blocks that a row must
                             read are its first ``sink_blocks`` and those from ``local[r]`` on

A prompt of 131,072 tokens has 2 GB of scores in a layer with 32 heads and blocks of 16 keys. Here
they exist for a slab of rows at a time, and what remains is a bit for each block. The kernels are
those of :mod:`msattn.kernels.common.gate_rows`, which also serve ``gate_scores``: both use the same
probabilities. ``block_sparse_attention`` takes the bits as they are.
"""

import math
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common import gate_rows
from msattn.kernels.common.block_bits import num_words
from msattn.kernels.common.checks import check_device
from msattn.kernels.common.gate_checks import check_gate
from msattn.kernels.common.gate_rows import Choice, GateArguments
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import gate_blocks as reference
from msattn.kernels.types import Backend


def gate_blocks(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
    counts: Tensor,
    local: Tensor,
    q_pool: list[str],
    num_keys: int,
    block_size: int = 64,
    key_block_size: int | None = None,
    kv_start: Tensor | None = None,
    q_rope: Tensor | None = None,
    mean_weight: float = 0.0,
    last_queries: bool = False,
    columns: Tensor | None = None,
    last_rows: Tensor | None = None,
    whole: Tensor | None = None,
    sink_blocks: int = 0,
    threshold: float = math.inf,
    exponent: float = 0.0,
    edge_exponent: float = 0.0,
    above: float = 0.0,
    backend: Backend | None = None,
) -> Tensor:
    """Selects the blocks of keys that each row block and gate head reads, as bits.

    The result is that of ``best_blocks`` for the scores of ``gate_scores``, without holding them.

    Parameters
    ----------
    q, pooled_k, query_weight, key_weight, inv_freq, q_pool, num_keys, block_size, key_block_size, \
    kv_start, q_rope, mean_weight, last_queries, columns, last_rows, whole
        As for :func:`~msattn.kernels.gate_scores.gate_scores`.
    counts : Tensor int32 ``[B | 1, 1, ceil(N / block), 1]``
        Number of blocks per row, 0 or more. A row with fewer visible blocks selects them all; a row
        with more that it must read selects all of those.
    local : Tensor int32 ``[B | 1, 1, ceil(N / block), 1]``
        The visible blocks that a row must read: those from this one on, in addition to the first
        ``sink_blocks``.
    sink_blocks : int
        First blocks that every row must read.
    threshold, exponent, edge_exponent, above : float
        As in ``best_blocks``: a row with ``v > above`` visible blocks also selects those with a
        score of at least ``threshold * v ** exponent * (1 - above / v) ** edge_exponent``.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        int32 ``[B, Hg, ceil(N / block), ceil(T / 32)]`` for the T blocks of keys: block c is bit
        ``c % 32``, from the lowest, of word ``c // 32``. What a row does not see is 0.

    Raises
    ------
    ValueError
        If an argument is invalid.
    """
    gate, backend = check_gate(
        q=q, pooled_k=pooled_k, query_weight=query_weight, key_weight=key_weight, inv_freq=inv_freq,
        q_pool=q_pool, num_keys=num_keys, block_size=block_size, key_block_size=key_block_size,
        kv_start=kv_start, q_rope=q_rope, mean_weight=mean_weight, last_queries=last_queries,
        columns=columns, last_rows=last_rows, whole=whole, backend=backend,
    )  # fmt: skip
    batch, _, rows, _ = gate.map_shape
    for name, x in (("counts", counts), ("local", local)):
        if x.dtype != torch.int32 or tuple(x.shape) not in ((1, 1, rows, 1), (batch, 1, rows, 1)):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 [{batch} or 1, 1, {rows}, 1]"
            )
        check_device(name, x, "q", q)
    if sink_blocks < 0:
        raise ValueError(f"sink_blocks={sink_blocks}: expected 0 or more")
    choice = Choice(counts, local, sink_blocks, threshold, exponent, edge_exponent, above)
    return _operator(*gate, *choice, backend)


def launch(gate: GateArguments, choice: Choice) -> Tensor:
    """Launches the kernels."""
    return gate_rows.launch(gate, choice)


def _empty(*arguments: Any) -> Tensor:
    *shape, cols = (given := GateArguments(*arguments[: len(GateArguments._fields)])).map_shape
    return given.q.new_empty((*shape, num_words(cols)), dtype=torch.int32)


def _reference(q_pool: str, **others: Any) -> Tensor:
    return reference.gate_blocks(q_pool=q_pool.split(","), **others)


_operator = register_op("gate_blocks", launch, _reference, _empty)

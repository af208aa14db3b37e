"""Block probabilities of SeerAttention's gate, for inference.

    gq_r, gk_c   = rope(W pool(block r or c), position of its first token)
    mq_r, mk_c   = mean(block r or c) after the model's RoPE
    logit[r, c]  = gq_r . gk_c / sqrt(hidden) + mean_weight mq_r . mk_c
    scores[r, c] = exp(logit[r, c]) / sum over the visible c' of exp(logit[r, c'])

Gates pool queries and keys before RoPE (section 3.1 of the paper); the second term, with
``mean_weight``, is not in the paper, nor is ``last_queries``. Keys come pooled, as caches keep
them. The kernels are those of :mod:`msattn.kernels.common.gate_rows`. To select blocks without
holding their scores, use :mod:`msattn.kernels.gate_blocks`.
"""

from typing import Any

from torch import Tensor

from msattn.kernels.common import gate_rows
from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.common.gate_checks import check_gate
from msattn.kernels.common.gate_rows import GateArguments
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import gate_scores as reference
from msattn.kernels.types import Backend


def gate_scores(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
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
    backend: Backend | None = None,
) -> Tensor:
    """Computes the gate's causal block probabilities of each row block and gate head.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries before RoPE, at the last N of M positions.
    pooled_k : Tensor fp32 (fp64 for fp64 queries) ``[B, Hkv, ceil(M / key block), pools * D]``
        Pooled blocks of keys before RoPE, of :func:`~msattn.kernels.pool_blocks.pool_blocks`; with
        ``q_rope`` also the means after it, D more channels.
    query_weight : Tensor ``[Hg, hidden, Hq // Hg * len(q_pool) * D]``
        fp32 (fp64 for fp64 inputs), contiguous. A gate head reads the concatenated poolings of its
        query heads; Hg divides Hq and is a multiple of Hkv.
    key_weight : Tensor ``[Hg, hidden, pools * D]``
        Likewise; gate head h reads the poolings of key/value head ``h // (Hg // Hkv)``.
    inv_freq : Tensor fp32 ``[hidden / 2]``, or None
        Inverse frequencies of RoPE, in radians per position; channels j and ``j + hidden / 2`` are
        a pair. None: no rotation.
    q_pool : list of {"avg", "max", "min"}
        Poolings of the query blocks.
    num_keys : int
        Number of positions, M.
    block_size : int
        Queries per block: 16, 32, 64 or 128.
    key_block_size : int, optional
        Keys per block, the ``block_size`` with which ``pooled_k`` was pooled: 16, 32, 64 or 128; by
        default ``block_size``.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence. Blocks and positions are counted from its end.
    q_rope : Tensor, like ``q``, optional
        Queries after the model's RoPE.
    mean_weight : float
        Weight of the products of their block means with those of the keys in the logits, without
        them 0; the queries' mean is also over the heads of a gate head.
    last_queries : bool
        Also scores each of the last ``block_size`` queries by itself, over the blocks that it sees,
        as a block of this query alone at the position of the last row block. That row block gets
        the largest of their probabilities and its own.
    columns : Tensor fp32 (fp64 for fp64 queries) ``[B, Hg, ceil(M / key block)]``, optional
        Least score of each block, 0 or more, in the rows that see it; rows are divided by their sum
        after that. Not with ``last_queries``.
    last_rows : Tensor fp32 (fp64 for fp64 queries) ``[B, Hg, R, ceil(M / key block)]``, optional
        Scores of the last R row blocks of each sequence, 0 or more, such as exact attention; the
        larger of these and the gate's are returned. Not with ``last_queries``.
    whole : Tensor bool ``[B | 1, R]``, optional
        Those of ``last_rows`` that replace the gate's scores.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        Probabilities ``[B, Hg, ceil(N / block), ceil(M / key block)]``, fp32 (fp64 for fp64
        inputs). Rows sum to 1, with ``last_queries`` the last one, and with ``last_rows`` those
        rows, to another number; blocks that are not visible, and rows without visible blocks, are
        0. Up to 65,536 columns on the Triton backend.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass: a gate is trained through its logits.
    """
    gate, backend = check_gate(
        q=q, pooled_k=pooled_k, query_weight=query_weight, key_weight=key_weight, inv_freq=inv_freq,
        q_pool=q_pool, num_keys=num_keys, block_size=block_size, key_block_size=key_block_size,
        kv_start=kv_start, q_rope=q_rope, mean_weight=mean_weight, last_queries=last_queries,
        columns=columns, last_rows=last_rows, whole=whole, backend=backend,
    )  # fmt: skip
    return _operator(*gate, backend)


def _empty(*gate: Any) -> Tensor:
    given = GateArguments(*gate[: len(GateArguments._fields)])
    return given.q.new_empty(given.map_shape, dtype=statistics_dtype(given.q))


def _reference(q_pool: str, **others: Any) -> Tensor:
    return reference.gate_scores(q_pool=q_pool.split(","), **others)


_operator = register_op(
    "gate_scores",
    gate_rows.launch,
    _reference,
    _empty,
    no_gradient="a gate is trained through its logits",
)

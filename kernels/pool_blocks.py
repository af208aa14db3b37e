"""Average, maximum and minimum pooling of token blocks.

    pooled[t] = concatenation of the requested reductions (avg, max, min) of the tokens of block t

The results are the inputs of SeerAttention's gate (section 3.1). The kernel is in
:mod:`msattn.kernels.common.block_pooling`; :mod:`msattn.kernels.gate_scores` uses it too.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import check_block_size, check_poolings, check_rotated
from msattn.kernels.common.block_pooling import empty_result, launch
from msattn.kernels.common.checks import check_device, check_tokens, check_vector, resolve_backend
from msattn.kernels.common.registration import USE_NO_GRAD, register_op
from msattn.kernels.reference import pool_blocks as reference
from msattn.kernels.types import Backend


def pool_blocks(
    x: Tensor,
    poolings: list[str],
    *,
    block_size: int = 64,
    start: Tensor | None = None,
    rotated: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Pools the tokens of each block and concatenates the poolings.

    Parameters
    ----------
    x : Tensor ``[B, H, N, D]``
        Queries or keys, fp32, fp16 or bf16 (fp64 on the torch backend), finite. Strided views are
        not copied.
    poolings : list of {"avg", "max", "min"}
        Poolings in the order of the result, each at most once.
    block_size : int
        Tokens per block: 16, 32, 64 or 128.
    start : Tensor int32 or int64 ``[B | 1]``, optional
        Left padding, 0 to N tokens before each sequence; blocks are counted from its end.
    rotated : Tensor, like ``x``, optional
        The same tokens after RoPE; their mean follows the poolings of ``x``.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        ``[B, H, ceil(N / block), len(poolings) * D]``, with ``rotated`` D more, fp32 (fp64 for
        fp64). A partial last block pools its existing tokens; a block without tokens, after the end
        of a shorter sequence, is 0.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass, which is not implemented.
    """
    check_tokens("x", x)
    check_block_size(block_size)
    check_poolings("poolings", poolings)
    check_rotated("rotated", rotated, "x", x)
    if start is not None:
        if (
            start.dtype not in (torch.int32, torch.int64)
            or start.dim() != 1
            or len(start) not in (1, x.shape[0])
        ):
            raise ValueError(
                f"start is {start.dtype} {tuple(start.shape)}: expected int32 or int64, "
                f"({x.shape[0]},) or (1,)"
            )
        check_vector("start", start)
        check_device("start", start, "x", x)
    return _operator(
        x, ",".join(poolings), block_size, start, rotated, resolve_backend(backend, x, name="x")
    )


def _reference(poolings: str, **others: Any) -> Tensor:
    return reference.pool_blocks(poolings=poolings.split(","), **others)


_operator = register_op("pool_blocks", launch, _reference, empty_result, no_gradient=USE_NO_GRAD)

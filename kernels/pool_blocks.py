"""What the tokens of each block pool to: means, largest and smallest values (the inputs of SeerAttention's gate, section 3.1).

    pooled[t] = (reduce over the tokens i of block t of x_i), for each of several ways to reduce, side by side

The kernel is kernels/pooling.py's, which gate_scores runs too.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.block_checks import check_pool_blocks
from msattn.kernels.common.block_pooling import empty_result, launch
from msattn.kernels.common.checks import resolve_backend
from msattn.kernels.types import Backend


def pool_blocks(
    x: Tensor, poolings: list[str], *, block_size: int = 64, start: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """Each block's tokens pooled in each of several ways, side by side.

    Parameters
    ----------
    x : Tensor ``[B, H, N, D]``
        Queries or keys, fp32, fp16 or bf16 (fp64 on the torch backend), finite. Strided views are read as they are.
    poolings : list of {"avg", "max", "min"}
        In the order of the result, each once.
    block_size : int
        Tokens of a block: 16, 32, 64 or 128.
    start : Tensor int32 or int64 ``[B | 1]``, optional
        Tokens before each sequence, 0 to N; they enter no block, and blocks are counted from there.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        ``[B, H, ceil(N / block), len(poolings) * D]``, fp32 (fp64 for fp64). The last, partial block pools the tokens that
        exist; a block without tokens, after the end of a shorter sequence, is 0.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name.
    NotImplementedError
        In the backward pass.
    """
    check_pool_blocks(x, poolings, block_size, start)
    return _operator(x, ",".join(poolings), block_size, start, resolve_backend(backend, x, name="x"))


@torch.library.custom_op("msattn::pool_blocks", mutates_args=())
def _operator(x: Tensor, poolings: str, block_size: int, start: Tensor | None, backend: str) -> Tensor:
    if backend == "torch":
        return reference.pool_blocks(x, poolings.split(","), block_size=block_size, start=start)
    with torch.cuda.device_of(x):
        return launch(x, poolings.split(","), block_size, start)


@_operator.register_fake
def _(x, poolings, block_size, start, backend):
    return empty_result(x, len(poolings.split(",")), block_size)


def _backward(ctx, gradient):
    raise NotImplementedError("pool_blocks has no gradient: detach its input, or use torch.no_grad()")


_operator.register_autograd(_backward)

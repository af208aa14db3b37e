"""What the tokens of each block pool to: means, largest and smallest values (the inputs of SeerAttention's gate, section 3.1).

    pooled[t] = (reduce over the tokens i of block t of x_i), for each of several ways to reduce, side by side

A program owns one block of one head and reads it once, whatever the number of ways. Programs of neighbouring heads come
together: in a projection's output their rows are neighbours in memory too. Prefix: p_ pointer.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.block_checks import POOLINGS, check_pool_blocks
from msattn.kernels.checks import resolve_backend, statistics_dtype
from msattn.kernels.primitives import padded_head, tl, triton
from msattn.kernels.types import Backend

TILE = 8192  # elements that a program holds at once


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
    return _result(x, len(poolings.split(",")), block_size)


def _backward(ctx, gradient):
    raise NotImplementedError("pool_blocks has no gradient: detach its input, or use torch.no_grad()")


_operator.register_autograd(_backward)


def _result(x: Tensor, ways: int, block_size: int) -> Tensor:
    batch, heads, tokens, head = x.shape
    return x.new_empty((batch, heads, (tokens + block_size - 1) // block_size, ways * head), dtype=statistics_dtype(x))


def launch(x: Tensor, poolings: list[str], block_size: int, start: Tensor | None, warps: int = 2) -> Tensor:
    """Run the kernel; ``warps`` overrides the shipped choice, for tuning."""
    batch, heads, tokens, head = x.shape
    pooled = _result(x, len(poolings), block_size)
    blocks, cols = pooled.shape[2], padded_head(head)
    place = {name.upper(): poolings.index(name) if name in poolings else None for name in POOLINGS}
    _pool_blocks_kernel[(heads * blocks * batch,)](
        x, pooled, start, *x.stride(), 0 if start is None or len(start) == 1 else 1, heads, blocks, tokens,
        HEAD=head, COLS=cols, BLOCK=block_size, ROWS=min(block_size, TILE // cols), WAYS=len(poolings), **place,
        num_warps=warps,
    )  # fmt: skip
    return pooled


@triton.jit(do_not_specialize=["stride_start", "heads", "blocks", "tokens"])
def _pool_blocks_kernel(
    p_x, p_pooled, p_start, stride_b, stride_h, stride_n, stride_d, stride_start, heads, blocks, tokens,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr,
    AVG: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    """``AVG``, ``MAX``, ``MIN``: which of the ``WAYS`` parts of a result each is, None where it is not asked for."""
    pid = tl.program_id(0)
    h, t, b = pid % heads, pid // heads % blocks, pid // (heads * blocks)
    first = t * BLOCK
    if p_start is not None:
        first += tl.load(p_start + b * stride_start).to(tl.int32)
    d = tl.arange(0, COLS)
    p_x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + d * stride_d

    total = tl.zeros([COLS], tl.float32)
    largest = tl.full([COLS], float("-inf"), tl.float32)
    smallest = tl.full([COLS], float("inf"), tl.float32)
    for row in tl.static_range(0, BLOCK, ROWS):
        i = first + row + tl.arange(0, ROWS)
        last = tl.minimum(i, tokens - 1).to(tl.int64)  # again and again, past the end
        x = tl.load(p_x[None, :] + last[:, None] * stride_n, mask=(d < HEAD)[None, :], other=0.0).to(tl.float32)
        if AVG is not None:
            total += tl.sum(tl.where((i < tokens)[:, None], x, 0.0), 0)
        if MAX is not None:
            largest = tl.maximum(largest, tl.max(x, 0))
        if MIN is not None:
            smallest = tl.minimum(smallest, tl.min(x, 0))

    count = tl.minimum(tokens - first, BLOCK)
    p_pooled += ((b.to(tl.int64) * heads + h) * blocks + t) * (WAYS * HEAD) + d
    if AVG is not None:
        tl.store(p_pooled + AVG * HEAD, total / tl.maximum(count, 1).to(tl.float32), mask=d < HEAD)
    if MAX is not None:
        tl.store(p_pooled + MAX * HEAD, tl.where(count > 0, largest, 0.0), mask=d < HEAD)
    if MIN is not None:
        tl.store(p_pooled + MIN * HEAD, tl.where(count > 0, smallest, 0.0), mask=d < HEAD)

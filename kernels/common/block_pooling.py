"""Kernel for block pooling, used by ``pool_blocks`` and ``gate_scores``.

A program owns one block of one head and reads it once for all poolings. Programs of adjacent heads
have adjacent numbers, because their rows are adjacent in the output of a projection.
"""

from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.common.choices import POOLINGS
from msattn.kernels.common.primitives import padded_head, tl, triton

TILE = 8192  # elements that a program processes at once


def empty_result(
    x: Tensor,
    poolings: str,
    block_size: int,
    start: Tensor | None,
    rotated: Tensor | None,
    *others: object,
    single: int = 0,
) -> Tensor:
    """Allocates the result ``[B, H, T + single, poolings * D]``."""
    batch, heads, tokens, head = x.shape
    size = (len(poolings.split(",")) + (rotated is not None)) * head
    return x.new_empty(
        (batch, heads, (tokens + block_size - 1) // block_size + single, size),
        dtype=statistics_dtype(x),
    )


def launch(
    x: Tensor,
    poolings: str,
    block_size: int,
    start: Tensor | None,
    rotated: Tensor | None,
    single: int = 0,
) -> Tensor:
    """Launches the kernel for ``poolings`` such as "avg,max", as an operator has no lists of
    strings.

    After the blocks follow the last ``single`` tokens, each pooled by itself.
    """
    batch, heads, tokens, head = x.shape
    pooled = empty_result(x, poolings, block_size, start, rotated, single=single)
    names = poolings.split(",")
    blocks, cols = pooled.shape[2], padded_head(head)
    place = {name.upper(): names.index(name) if name in names else None for name in POOLINGS}
    _pool_blocks_kernel[(heads * blocks * batch,)](
        x, rotated, pooled, start, *x.stride(), *(x if rotated is None else rotated).stride(),
        0 if start is None or len(start) == 1 else 1, heads, blocks, tokens, single,
        HEAD=head, COLS=cols, BLOCK=block_size, ROWS=min(block_size, TILE // cols),
        NUM_POOLINGS=len(names), **place,
        num_warps=2,
    )  # fmt: skip
    return pooled


@triton.jit(do_not_specialize=["stride_start", "heads", "blocks", "tokens", "single"])
def _pool_blocks_kernel(
    x_ptr, rotated_ptr, pooled_ptr, start_ptr,
    stride_b, stride_h, stride_n, stride_d,
    stride_rb, stride_rh, stride_rn, stride_rd, stride_start,
    heads, blocks, tokens, single,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, NUM_POOLINGS: tl.constexpr,
    AVG: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    """Pools a block. ``AVG``, ``MAX``, ``MIN``: index among the poolings, or None."""
    pid = tl.program_id(0)
    h, t, b = pid % heads, pid // heads % blocks, pid // (heads * blocks)
    first = t * BLOCK
    if start_ptr is not None:
        first += tl.load(start_ptr + b * stride_start).to(tl.int32)
    end = tl.minimum(first + BLOCK, tokens)
    if t >= blocks - single:
        first = tokens - blocks + t
        end = first + 1
    d = tl.arange(0, COLS)
    x_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + d * stride_d

    total = tl.zeros([COLS], tl.float32)
    largest = tl.full([COLS], float("-inf"), tl.float32)
    smallest = tl.full([COLS], float("inf"), tl.float32)
    for row in tl.static_range(0, BLOCK, ROWS):
        i, x = _load_rows(x_ptr, first + row, end, d, stride_n, HEAD, ROWS)
        total += tl.sum(tl.where((i < end)[:, None], x, 0.0), 0)
        if MAX is not None:
            largest = tl.maximum(largest, tl.max(x, 0))
        if MIN is not None:
            smallest = tl.minimum(smallest, tl.min(x, 0))

    count = end - first
    # maxima and minima ignore NaN; without tokens, the total is 0
    is_number = (count > 0) & (total == total)
    WIDTH: tl.constexpr = (NUM_POOLINGS + (rotated_ptr is not None)) * HEAD
    pooled_ptr += ((b.to(tl.int64) * heads + h) * blocks + t) * WIDTH + d
    if AVG is not None:
        tl.store(
            pooled_ptr + AVG * HEAD, total / tl.maximum(count, 1).to(tl.float32), mask=d < HEAD
        )
    if MAX is not None:
        tl.store(pooled_ptr + MAX * HEAD, tl.where(is_number, largest, total), mask=d < HEAD)
    if MIN is not None:
        tl.store(pooled_ptr + MIN * HEAD, tl.where(is_number, smallest, total), mask=d < HEAD)
    if rotated_ptr is not None:
        rotated_ptr += b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + d * stride_rd
        total = tl.zeros([COLS], tl.float32)
        for row in tl.static_range(0, BLOCK, ROWS):
            i, x = _load_rows(rotated_ptr, first + row, end, d, stride_rn, HEAD, ROWS)
            total += tl.sum(tl.where((i < end)[:, None], x, 0.0), 0)
        tl.store(
            pooled_ptr + NUM_POOLINGS * HEAD,
            total / tl.maximum(count, 1).to(tl.float32),
            mask=d < HEAD,
        )


@triton.jit
def _load_rows(x_ptr, first, end, d, stride_n, HEAD: tl.constexpr, ROWS: tl.constexpr):
    """Returns ROWS positions and their rows in fp32; the last row before ``end`` is repeated past
    it.
    """
    i = first + tl.arange(0, ROWS)
    last = tl.minimum(i, end - 1).to(tl.int64)
    return i, tl.load(
        x_ptr[None, :] + last[:, None] * stride_n, mask=(d < HEAD)[None, :], other=0.0
    ).to(tl.float32)

"""The share of the visible blocks that a block mask or zoom map does not read, for statistics."""

import torch
from torch import Tensor

from msattn.kernels.common.block_bits import WORD, unpack_blocks
from msattn.kernels.common.primitives import tl, triton

EIGHTHS = 8  # parts of a block; the coarsest zoom reads one
CHUNK = 8192  # elements of a program


def add_share_left_out(total: Tensor, selected: Tensor, visible: Tensor, copies: int) -> None:
    """Adds the share of the visible blocks that is not read to ``total``, an fp64 scalar, on the
    device.

    ``selected`` is bool, has bits (int32), or is uint8 zooms (0, 1, 2, 4, 8): a block at zoom z
    counts as 1 / z of a block; 0 is not read. It is for ``copies`` (e.g. heads) times the
    ``visible`` blocks, an integer scalar.
    """
    if selected.is_cuda:
        with torch.cuda.device_of(selected):
            launch(total, selected, visible, copies)
        return
    if selected.dtype == torch.int32:
        selected = unpack_blocks(selected, WORD * selected.shape[-1])
    read = selected.sum() * EIGHTHS
    if selected.dtype != torch.bool:
        read = (EIGHTHS // selected.clamp(min=1)).masked_fill(selected == 0, 0).sum()
    whole = visible * (EIGHTHS * copies)
    total += (whole - read).double() / whole


def launch(total: Tensor, selected: Tensor, visible: Tensor, copies: int) -> None:
    """Launches a kernel that counts blocks in chunks, and one that adds the share; counts are
    integers, so all is exact.
    """
    parts = triton.cdiv(selected.numel(), CHUNK)
    sums = torch.empty(parts, dtype=torch.int32, device=selected.device)
    selected = selected.contiguous()
    if selected.dtype == torch.bool:
        selected = selected.view(torch.uint8)
    _blocks_read_kernel[(parts,)](selected, sums, selected.numel(), CHUNK=CHUNK, num_warps=4)
    _add_share_kernel[(1,)](total, sums, visible, parts, copies * EIGHTHS, CHUNK=1024, num_warps=4)


@triton.jit
def _blocks_read_kernel(selected_ptr, sums_ptr, total, CHUNK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    i = tl.arange(0, CHUNK)
    x = tl.load(selected_ptr + first + i, mask=i < total - first, other=0)
    if selected_ptr.dtype.element_ty == tl.int32:
        part = 8 * _count_bits(x)
    else:  # zooms
        part = tl.where(x == 1, 8, tl.where(x == 2, 4, tl.where(x == 4, 2, tl.where(x == 8, 1, 0))))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(part, 0))


@triton.jit
def _count_bits(x):
    """Returns the numbers of bits of int32 numbers that are set: sums of 2, 4, 8, then all bits."""
    x = (x & 0x55555555) + ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit(do_not_specialize=["parts", "eighths"])
def _add_share_kernel(total_ptr, sums_ptr, visible_ptr, parts, eighths, CHUNK: tl.constexpr):
    read = tl.zeros((), tl.int64)
    for first in tl.range(0, parts, CHUNK):
        i = first + tl.arange(0, CHUNK)
        read += tl.sum(tl.load(sums_ptr + i, mask=i < parts, other=0).to(tl.int64), 0)
    whole = tl.load(visible_ptr).to(tl.int64) * eighths
    share = (whole - read).to(tl.float64) / whole.to(tl.float64)
    tl.atomic_add(total_ptr, share, sem="relaxed")

"""Counts of the blocks that a block mask or zoom map reads, for statistics."""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import tl, triton

EIGHTHS = 8  # parts of a block; the coarsest zoom reads one
CHUNK = 8192  # elements of a program


def blocks_read(selected: Tensor) -> Tensor:
    """Counts the blocks that are read, in eighths of a block: an int64 scalar on the device of ``selected``.

    ``selected`` is bool, or uint8 zooms (0, 1, 2, 4, 8): a block at zoom z counts as 1 / z of a block; 0 is not read.
    """
    if selected.is_cuda:
        with torch.cuda.device_of(selected):
            return launch(selected).sum()
    if selected.dtype == torch.bool:
        return selected.sum() * EIGHTHS
    return (EIGHTHS // selected.clamp(min=1)).masked_fill(selected == 0, 0).sum()


def launch(selected: Tensor) -> Tensor:
    """Launches the kernel; returns an int32 sum per ``CHUNK`` elements."""
    parts = triton.cdiv(selected.numel(), CHUNK)
    sums = torch.empty(parts, dtype=torch.int32, device=selected.device)
    selected = selected.contiguous().view(torch.uint8)
    _blocks_read_kernel[(parts,)](selected, sums, selected.numel(), CHUNK=CHUNK, num_warps=4)
    return sums


@triton.jit
def _blocks_read_kernel(selected_ptr, sums_ptr, total, CHUNK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    i = tl.arange(0, CHUNK)
    zoom = tl.load(selected_ptr + first + i, mask=i < total - first, other=0)
    part = tl.where(zoom == 1, 8, tl.where(zoom == 2, 4, tl.where(zoom == 4, 2, tl.where(zoom == 8, 1, 0))))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(part, 0))

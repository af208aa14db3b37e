"""How much a block mask, or a zoom map, reads: counted in one pass over its bytes."""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import tl, triton

WHOLE = 8  # parts of a block: what the coarsest zoom leaves of it is one


def blocks_read(selected: Tensor) -> Tensor:
    """Blocks that are read, in eighths of a block: int64 scalar on the device of ``selected``.

    Parameters
    ----------
    selected : bool, or uint8 zooms (0, 1, 2, 4, 8): a block at zoom z counts as 1 / z of a block.
    """
    if selected.is_cuda:
        with torch.cuda.device_of(selected):
            return launch(selected).sum()
    if selected.dtype == torch.bool:
        return selected.sum() * WHOLE
    return (WHOLE // selected.clamp(min=1)).masked_fill(selected == 0, 0).sum()


def launch(selected: Tensor, chunk: int = 8192, warps: int = 4) -> Tensor:
    """Run the kernel: int32, a sum for each chunk of ``selected``. ``chunk`` and ``warps`` are there for tuning."""
    parts = triton.cdiv(selected.numel(), chunk)
    sums = torch.empty(parts, dtype=torch.int32, device=selected.device)
    selected = selected.contiguous().view(torch.uint8)
    _blocks_read_kernel[(parts,)](selected, sums, selected.numel(), CHUNK=chunk, num_warps=warps)
    return sums


@triton.jit
def _blocks_read_kernel(p_selected, p_sums, total, CHUNK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    i = tl.arange(0, CHUNK)
    zoom = tl.load(p_selected + first + i, mask=i < total - first, other=0)
    part = tl.where(zoom == 1, 8, tl.where(zoom == 2, 4, tl.where(zoom == 4, 2, tl.where(zoom == 8, 1, 0))))
    tl.store(p_sums + tl.program_id(0), tl.sum(part, 0))

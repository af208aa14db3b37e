"""Numbers of splits for split-K kernels, and merging of their partial results.

``blocks`` is the number of programs per split, ``concurrent`` that of programs that the GPU runs at
once, ``tiles`` that of key tiles to be divided.
"""

import math
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from msattn.kernels.common.primitives import (
    LN_2,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    tl,
    triton,
)

MAX_SPLITS = 512
# estimated time to start a program, in units of the time of a key tile; merging takes one unit
START = 2


@lru_cache
def choose_splits(
    blocks: int,
    concurrent: int,
    tiles: int,
    efficiency: float = 1.0,
    saturation: float = 0.8,
    extra_tiles: int = 0,
) -> int:
    """Returns the fewest splits with at least ``efficiency`` times the best speed.

    Speed is estimated for programs that run in waves of ``concurrent`` programs. The efficiency is
    below 1 where merging is expensive. ``saturation`` is the share of the concurrent programs that
    saturates the memory bandwidth: programs of a partial last wave run faster, down to this share
    of a full wave's time; it is 1 for kernels that are not memory-bound. ``extra_tiles`` is the
    time, in key tiles, of one more program per block that is launched before the splits; a wave
    that does not fit next to these programs waits for them.
    """

    def time(splits: int) -> float:
        waves, left = divmod(blocks * splits, concurrent)
        last = max(saturation, left / concurrent) if left else 0
        delay = extra_tiles if (left or concurrent) + blocks > concurrent else 0
        return (
            START * (waves + (left > 0))
            + math.ceil(tiles / splits) * (waves + last)
            + (splits > 1)
            + delay
        )

    times = [time(splits) for splits in range(1, min(tiles, MAX_SPLITS) + 1)]
    longest = min(times) / efficiency
    return 1 + next(n for n, x in enumerate(times) if x <= longest)


def one_wave_splits(blocks: int, concurrent: int, tiles: int, limit: int | None = None) -> int:
    """Returns the most splits whose programs all run at once, at most ``tiles``.

    Used where the work per split depends on the data, as in ``bucket_decode``, and cannot be
    estimated.
    """
    splits = max(1, min(concurrent // blocks, tiles))
    return splits if limit is None else min(splits, limit)


class Parts(NamedTuple):
    """Partial results of the S splits of a decoding step, in the order in which kernels take them:
    row maxima (base 2) and sums of exponentials ``[B, Hq, S]``, weighted sums of values
    ``[B, Hq, S, D]``, all fp32.
    """

    maxima: Tensor
    sums: Tensor
    out: Tensor

    @classmethod
    def empty(cls, q: Tensor, splits: int) -> Self:
        """Returns uninitialized ones for queries ``q [B, Hq, n, D]``."""
        batch, heads, _, head = q.shape
        out = q.new_empty((batch, heads, splits, head), dtype=torch.float32)
        return cls(torch.empty_like(out[..., 0]), torch.empty_like(out[..., 0]), out)

    def merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the output ``[B, Hq, 1, D]`` of the given dtype and the LSE ``[B, Hq, 1]``."""
        batch, heads, _, head = self.out.shape
        out = self.out.new_empty((batch, heads, 1, head), dtype=dtype)
        lse = self.out.new_empty((batch, heads, 1))
        merge_splits(*self, out, lse)
        return out, lse


def merge_splits(
    part_max: Tensor,
    part_sum: Tensor,
    part_out: Tensor,
    out: Tensor,
    lse: Tensor,
    rebase: bool = True,
) -> None:
    """Merges the partial results of S splits into ``out [..., D]`` and ``lse [...]``, 0 and -inf
    for a row without keys.

    The partial results are fp32: row maxima (base 2) and sums of exponentials ``[..., S]``, and
    weighted sums of values, not normalized, ``part_out [..., S, D]``. Without ``rebase``, all
    splits of a row used the same maximum, so that sums add up without rescaling.
    """
    splits, head = part_out.shape[-2:]
    # One warp loads up to 32 splits at once. With more splits, programs divide the head.
    at_once, cols, warps = (
        (32, min(128, triton.next_power_of_2(head)), 1) if splits <= 32 else (128, 32, 4)
    )
    _merge_kernel[(lse.numel(), triton.cdiv(head, cols))](
        part_max, part_sum, part_out, out, lse, splits, HEAD=head, BS=at_once, BD=cols,
        REBASE=rebase,
        num_warps=warps, **pdl_args(out.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_max_ptr, part_sum_ptr, part_out_ptr, out_ptr, lse_ptr, num_splits,
    HEAD: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, REBASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m = tl.full((), float("-inf"), tl.float32)
    l = tl.zeros((), tl.float32)
    acc = tl.zeros([BD], tl.float32)
    for first in tl.range(0, num_splits, BS):
        split = first + tl.arange(0, BS)
        m_split = split < num_splits
        part = row * num_splits + split  # [BS]
        b_max = tl.load(part_max_ptr + part, mask=m_split, other=float("-inf"))
        b_sum = tl.load(part_sum_ptr + part, mask=m_split, other=0.0)
        m_out = m_split[:, None] & (o_d < HEAD)[None, :]
        # [BS, BD]
        b_out = tl.load(part_out_ptr + part[:, None] * HEAD + o_d[None, :], mask=m_out, other=0.0)
        m_new = tl.maximum(m, tl.max(b_max, 0))
        if REBASE:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight, alpha = tl.exp2(b_max - base), tl.exp2(m - base)
            b_sum, b_out = b_sum * weight, b_out * weight[:, None]
            l, acc = l * alpha, acc * alpha
        l += tl.sum(b_sum, 0)
        acc += tl.sum(b_out, 0)
        m = m_new
    l = tl.where(l != 0, l, 1.0)  # l and acc are 0 where no key is visible
    tl.store(out_ptr + row * HEAD + o_d, (acc / l).to(out_ptr.dtype.element_ty), mask=o_d < HEAD)
    tl.store(lse_ptr + row, (m + tl.log2(l)) * LN_2, mask=tl.program_id(1) == 0)

"""Splitting the keys of a decoding step over programs, and adding up what the splits found."""

import math
from functools import lru_cache

from torch import Tensor

from msattn.kernels.common.primitives import LN_2, pdl_args, pdl_launch_dependents, pdl_wait, tl, triton

MAX_SPLITS = 512
START = 2  # a program takes as long to start as for so many tiles; merging, as for one


@lru_cache
def choose_splits(blocks: int, slots: int, tiles: int, enough: float = 1.0, saturated: float = 0.8, first: int = 0) -> int:
    """The fewest splits of ``tiles``, of ``blocks`` programs each, that take at most 1 / ``enough`` of the shortest time.

    Programs come in waves, as many at once as the GPU has slots. Where the last wave leaves slots free, its programs are faster
    for that, down to ``saturated`` of the slots: as many as draw all that the memory gives; 1 where it is not the limit.
    Another program of each block may come ``first``, for as long as so many tiles take; a wave without room beside it waits.
    """

    def time(splits: int) -> float:
        waves, left = divmod(blocks * splits, slots)
        last = max(saturated, left / slots) if left else 0
        delay = first if (left or slots) + blocks > slots else 0
        return START * (waves + (left > 0)) + math.ceil(tiles / splits) * (waves + last) + (splits > 1) + delay

    times = [time(splits) for splits in range(1, min(tiles, MAX_SPLITS) + 1)]
    longest = min(times) / enough
    return 1 + next(n for n, x in enumerate(times) if x <= longest)


def merge_splits(part_max: Tensor, part_sum: Tensor, part_out: Tensor, out: Tensor, lse: Tensor, rebase: bool = True) -> None:
    """Add up the splits ``part_max, part_sum [..., S]``, ``part_out [..., S, D]`` of each row ``out [..., D]``, ``lse [...]``.

    Maxima are of base 2, sums not divided yet; they are rebased to the largest maximum unless all started from that.
    """
    splits, head = part_out.shape[-2:]
    # Up to 32 splits are one warp's, which waits for them once; of more, each part of the head has programs of its own.
    at_once, cols, warps = (32, min(128, triton.next_power_of_2(head)), 1) if splits <= 32 else (128, 32, 4)
    _merge_kernel[(lse.numel(), triton.cdiv(head, cols))](
        part_max, part_sum, part_out, out, lse, splits, HEAD=head, BS=at_once, BD=cols, REBASE=rebase,
        num_warps=warps, **pdl_args(out.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_max, part_sum, part_out, out, lse, num_splits,
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
        b_max = tl.load(part_max + part, mask=m_split, other=float("-inf"))
        b_sum = tl.load(part_sum + part, mask=m_split, other=0.0)
        m_out = m_split[:, None] & (o_d < HEAD)[None, :]
        b_out = tl.load(part_out + part[:, None] * HEAD + o_d[None, :], mask=m_out, other=0.0)  # [BS, BD]
        m_new = tl.maximum(m, tl.max(b_max, 0))
        if REBASE:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight, alpha = tl.exp2(b_max - base), tl.exp2(m - base)
            b_sum, b_out = b_sum * weight, b_out * weight[:, None]
            l, acc = l * alpha, acc * alpha
        l += tl.sum(b_sum, 0)
        acc += tl.sum(b_out, 0)
        m = m_new
    l = tl.where(l > 0, l, 1.0)  # 0 where nothing was seen, and acc with it
    tl.store(out + row * HEAD + o_d, (acc / l).to(out.dtype.element_ty), mask=o_d < HEAD)
    tl.store(lse + row, (m + tl.log2(l)) * LN_2, mask=tl.program_id(1) == 0)

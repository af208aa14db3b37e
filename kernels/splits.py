"""Splitting the keys of a decoding step over programs, and adding up what the splits found."""

import math
from functools import lru_cache

from msattn.kernels.primitives import LN_2, admit_next, tl, triton, wait_for_previous

MAX_SPLITS = 512
SPLITS_AT_ONCE = 32  # of a row, when they are merged


@lru_cache
def choose_splits(blocks: int, slots: int, most: int, enough: float = 0.95) -> int:
    """The fewest splits, of ``blocks`` programs each, that keep the GPU's slots nearly as busy as any number does."""
    waves = [blocks * splits / slots for splits in range(1, min(most, MAX_SPLITS) + 1)]
    busy = [x / math.ceil(x) for x in waves]
    return 1 + next(n for n, x in enumerate(busy) if x >= enough * max(busy))


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    part_max, part_sum, part_out, out, lse, num_splits,
    HEAD: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, REBASE: tl.constexpr, IN_A_ROW: tl.constexpr,
):  # fmt: skip
    """Add the splits of one row, rebased to the largest maximum (base 2) unless they started from it.

    ``part_out [rows, S, D]`` are sums, not yet divided by ``part_sum [rows, S]``.
    """
    wait_for_previous(IN_A_ROW)
    admit_next(IN_A_ROW)
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
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
    tl.store(lse + row, (m + tl.log2(l)) * LN_2)

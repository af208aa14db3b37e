"""Tiles of kernels that decode one query over gathered keys.

The rows of a tile are the BH query heads of a group, padded to the 16 rows that tensor cores need.
"""

from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.tuned import Tile


def default_tile(cols: int, itemsize: int) -> Tile:
    """Returns a tile of at most 16 KiB.

    Two dependent loads, of an index entry and then of its key, use pipeline stages: five leave two
    buffers for K and V each.
    """
    return Tile(
        rows=16, keys=max(16, min(64, 16384 // (cols * itemsize))), warps=4, stages=5, programs=2
    )


@triton.jit
def load_group(
    q_ptr,
    batch,
    kv_head,
    group,
    stride_qb,
    stride_qh,
    stride_qd,
    HEAD: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """Loads the queries ``[BH, BD]`` of a group, zeros in the padding."""
    o_head, o_d = tl.arange(0, BH), tl.arange(0, BD)
    q_ptrs = (
        q_ptr
        + batch * stride_qb
        + (kv_head * group + o_head)[:, None] * stride_qh
        + o_d[None, :] * stride_qd
    )
    return tl.load(q_ptrs, mask=(o_head < group)[:, None] & (o_d < HEAD)[None, :], other=0.0)


@triton.jit
def dense_window(start, end, recent, sink):
    """Returns the bounds of the dense window.

    Its keys are ``start <= j < sink_end`` and ``recent_begin <= j < end``.
    """
    sink_end = tl.minimum(start + sink, end)
    return sink_end, tl.minimum(tl.maximum(end - recent, sink_end), end)


@triton.jit
def store_split(
    part_max_ptr, part_sum_ptr, part_out_ptr, m, l, acc, batch, kv_head, group,
    HEAD: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Stores a split's results: ``part_out [B, Hq, S, D]``, maxima (base 2) and sums
    ``[B, Hq, S]``.
    """
    split, num_splits, kv_heads = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    o_head, o_d = tl.arange(0, BH), tl.arange(0, BD)
    m_head = o_head < group
    part = ((batch * kv_heads + kv_head) * group + o_head) * num_splits + split  # [BH]
    tl.store(part_max_ptr + part, m, mask=m_head)
    tl.store(part_sum_ptr + part, l, mask=m_head)
    tl.store(
        part_out_ptr + part[:, None] * HEAD + o_d[None, :],
        acc,
        mask=m_head[:, None] & (o_d < HEAD)[None, :],
    )

"""A block mask as lists on the device: what each row block reads, or which row blocks read each column block.

A kernel that walks a list costs what it reads. The lists' lengths are never asked for on the host, so that nothing waits for
the device: each list has room for everything its block can see.

Layouts: mask ``[B or 1, Hm, Tr, Tc]``; with ``own`` blocks that have a list each and ``listed`` blocks in it, lists ``[B or 1,
Hm, own, listed]`` in ascending order and lengths ``[B or 1, Hm, own, 2]`` (those that need no mask, all). Those that need none
come first in a row block's list, before the diagonal and the end of the keys, and last in a column block's.
"""

import torch
from torch import Tensor

from msattn.kernels.primitives import sequence_span, tl, triton


def compact(
    block_mask: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    block_size: int,
    causal: bool,
    by_column: bool = False,
) -> tuple[Tensor, Tensor]:
    """Lists of the True blocks that can be seen, of row blocks or column blocks, and their lengths (see the module)."""
    if kv_start is not None:  # sequences that share a mask still end at different blocks
        block_mask = block_mask.expand(kv_start.shape[0], -1, -1, -1)
    if by_column:
        block_mask = block_mask.mT
    batch, heads, own, listed = block_mask.shape
    lists = torch.empty(block_mask.shape, dtype=torch.int16 if listed < 2**15 else torch.int32, device=block_mask.device)
    lengths = torch.empty((batch, heads, own, 2), dtype=torch.int32, device=block_mask.device)
    _compact_kernel[(own, heads, batch)](
        block_mask.view(torch.uint8), lists, lengths, kv_start,
        *block_mask.stride(),
        num_queries, num_keys, listed, offset,
        BLOCK=block_size, CHUNK=min(1024, triton.next_power_of_2(listed)), CAUSAL=causal, BY_COLUMN=by_column,
    )  # fmt: skip
    return lists, lengths


@triton.jit(do_not_specialize=["listed"])
def _compact_kernel(
    p_mask, p_lists, p_lengths, p_kv_start,
    stride_b, stride_h, stride_own, stride_listed,
    num_queries, num_keys, listed, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """One program = one row block (column block) of the mask: its True blocks, in order, as a list."""
    own, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    if BY_COLUMN:
        begin, end, plain_begin, plain_end = _readers(own * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
    else:
        begin, end, plain_begin, plain_end = _readable(own * BLOCK, keys, queries, delta, BLOCK, CAUSAL)

    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + own
    p_mask += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + own.to(tl.int64) * stride_own
    found = tl.zeros((), tl.int32)
    found_plain = tl.zeros((), tl.int32)
    for first in tl.range(begin, end, CHUNK):  # type: ignore[misc]
        other = first + tl.arange(0, CHUNK)
        on = tl.load(p_mask + other.to(tl.int64) * stride_listed, mask=other < end, other=0).to(tl.int32)
        place = found + tl.cumsum(on, 0) - on
        tl.store(p_lists + row * listed + place, other.to(p_lists.dtype.element_ty), mask=on != 0)
        found += tl.sum(on, 0)
        found_plain += tl.sum(tl.where((other >= plain_begin) & (other < plain_end), on, 0), 0)
    tl.store(p_lengths + row * 2, found_plain)
    tl.store(p_lengths + row * 2 + 1, found)


@triton.jit
def _readable(t0, keys, queries, delta, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Column blocks ``[begin, end)`` that some query of the row block at t0 sees; those that all of its queries see whole."""
    last, plain_end = keys, keys // BLOCK
    if CAUSAL:
        last = tl.minimum(keys, tl.minimum(t0 + BLOCK, queries) + delta)
        plain_end = tl.minimum(keys, t0 + delta + 1) // BLOCK
    return 0, tl.where(t0 < queries, tl.cdiv(last, BLOCK), 0), 0, plain_end


@triton.jit
def _readers(u0, keys, queries, delta, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Row blocks ``[begin, end)`` that see some key of the column block at u0; those where no key comes after a query.

    Keys and queries that do not exist need no mask here: a key's gradients are its own row of a product, and not stored.
    """
    begin, plain_begin = 0, 0
    end = tl.cdiv(queries, BLOCK)
    if CAUSAL:
        begin = tl.maximum(u0 - delta, 0) // BLOCK
        plain_begin = tl.cdiv(tl.maximum(u0 + BLOCK - 1 - delta, 0), BLOCK)
    return begin, tl.where(u0 < keys, end, 0), plain_begin, end


@triton.jit
def find_list(p_lists, p_lengths, b, h, own, q_heads, list_batch, list_heads, num_own, listed):
    """A block's list for query head h of sequence b: where it starts, how many need no mask, how many there are."""
    row = ((b % list_batch).to(tl.int64) * list_heads + h * list_heads // q_heads) * num_own + own
    return p_lists + row * listed, tl.load(p_lengths + row * 2), tl.load(p_lengths + row * 2 + 1)

"""A block mask as lists on the device: what each row block reads, or which row blocks read each column block.

A kernel that walks a list costs what it reads. The lists' lengths are never asked for on the host, so that nothing waits for
the device: each list has room for everything its block can see.

Layouts: mask ``[B or 1, Hm, Tr, Tc]``. Row blocks: lists ``[B or 1, Hm, Tr, Tc]`` of column blocks, in ascending order, and
lengths ``[B or 1, Hm, Tr, 2]`` (those that need no mask, all); those that need none come first, before the diagonal and the end
of the keys. Column blocks have one list for a key/value head: lists ``[B or 1, Hkv, Tc, Tr * group]`` of ``row block * group +
query head in the group``, in ascending order, those that need no mask last.
"""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import sequence_span, tl, triton


def compact(
    block_mask: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    block_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """For each row block, list and lengths of the True column blocks that it can see (see the module)."""
    return _compact(
        block_mask[:, :, None], kv_start, num_queries, num_keys, offset, BLOCK=block_size, CAUSAL=causal, BY_COLUMN=False
    )


def compact_columns(
    block_mask: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    block_size: int,
    causal: bool,
    kv_heads: int,
    group: int,
) -> tuple[Tensor, Tensor]:
    """For each column block of a key/value head, list and lengths of the row blocks, of each query head, that read it."""
    shared = min(block_mask.shape[1], kv_heads)
    grouped = block_mask.unflatten(1, (shared, -1)).expand(-1, kv_heads, group, -1, -1).mT
    return _compact(grouped, kv_start, num_queries, num_keys, offset, BLOCK=block_size, CAUSAL=causal, BY_COLUMN=True)


def _compact(mask: Tensor, kv_start: Tensor | None, num_queries: int, num_keys: int, offset: int, **constants: int | bool):
    """Lists of a mask ``[B or 1, heads, members, own, listed]``, of ``listed * members`` entries for each of ``own`` blocks."""
    if kv_start is not None:  # sequences that share a mask still end at different blocks
        mask = mask.expand(kv_start.shape[0], -1, -1, -1, -1)
    batch, heads, members, own, listed = mask.shape
    entries = listed * members
    dtype = torch.int16 if entries < 2**15 else torch.int32
    lists = torch.empty((batch, heads, own, entries), dtype=dtype, device=mask.device)
    lengths = torch.empty((batch, heads, own, 2), dtype=torch.int32, device=mask.device)
    _compact_kernel[(own, heads, batch)](
        mask.view(torch.uint8), lists, lengths, kv_start,
        *mask.stride(),
        num_queries, num_keys, entries, offset,
        MEMBERS=members, CHUNK=min(1024, triton.next_power_of_2(entries)), **constants,
    )  # fmt: skip
    return lists, lengths


@triton.jit(do_not_specialize=["entries"])
def _compact_kernel(
    p_mask, p_lists, p_lengths, p_kv_start,
    stride_b, stride_h, stride_member, stride_own, stride_listed,
    num_queries, num_keys, entries, offset,
    MEMBERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, BY_COLUMN: tl.constexpr,
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
    for first in tl.range(begin * MEMBERS, end * MEMBERS, CHUNK):  # type: ignore[misc]
        entry = first + tl.arange(0, CHUNK)
        other = entry // MEMBERS
        p_on = p_mask + other.to(tl.int64) * stride_listed + (entry % MEMBERS).to(tl.int64) * stride_member
        on = tl.load(p_on, mask=other < end, other=0).to(tl.int32)
        place = found + tl.cumsum(on, 0) - on
        tl.store(p_lists + row * entries + place, entry.to(p_lists.dtype.element_ty), mask=on != 0)
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
def find_list(p_lists, p_lengths, b, h, own, heads, list_batch, list_heads, num_own, entries):
    """A block's list for head h (of ``heads``) of sequence b: where it starts, how many need no mask, how many there are."""
    row = ((b % list_batch).to(tl.int64) * list_heads + h * list_heads // heads) * num_own + own
    return p_lists + row * entries, tl.load(p_lengths + row * 2), tl.load(p_lengths + row * 2 + 1)

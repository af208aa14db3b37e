"""Compacts a block mask into lists of blocks, on the device.

The lists hold the column blocks of each row block, or the row blocks of each column block, so that
the cost of a kernel is proportional to the blocks that it reads. Reading the lengths on the host
would synchronize with the device; each list therefore has room for all the blocks that it may hold.

A mask is bool ``[B or 1, Hm, Tr, Tc]`` or has bits (:mod:`.block_bits`), int32
``[B or 1, Hm, Tr, ceil(Tc / 32)]``.

Layouts of the lists. "Full" blocks need no mask (as in FlexAttention), the others are partial.

- By row block: column blocks ``[B or 1, Hm, Tr, entries]`` in ascending order, full ones first,
  because partial ones lie on the diagonal or at the end of the keys. Lengths
  ``[B or 1, Hm, Tr, 2]``: full blocks, all blocks.
- By column block, one list for a key/value head: entries
  ``row block * group + query head in the group``, ``[B or 1, Hkv, Tc, entries]``, in ascending
  order, full ones last. Lengths ``[B or 1, Hkv, Tc, 2]``.

A list is followed by PAD copies of its last entry (of 0, if it is empty), so that whole tiles of
blocks, and the tile after the last one, are loaded without a mask. It begins at a multiple of PAD
entries, so that these loads are wide.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.block_bits import WORD
from msattn.kernels.common.paged_tiles import packed_span
from msattn.kernels.common.primitives import sequence_span, tl, triton

PART_BYTES = 2**30  # of the lists of some row blocks
PAD = tl.constexpr(16)  # twice the blocks of the largest tile


def compact_parts(
    block_mask: Tensor, kv_start: Tensor | None, *others: Any
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields the first row block, lists and lengths of parts of the row blocks, the last part
    first.

    ``others`` are those of :func:`compact_rows`. Long prompts have several parts, as the lists have
    room for all blocks.
    """
    batch, heads, row_blocks, _ = block_mask.shape
    _, num_keys, _, _, key_block_size, _ = others
    col_blocks = triton.cdiv(num_keys, key_block_size)
    lists = (batch if kv_start is None else len(kv_start)) * heads
    rows = max(1, PART_BYTES // (lists * col_blocks * _dtype(col_blocks).itemsize))
    for first in reversed(range(0, row_blocks, rows)):
        yield (
            first,
            *compact_rows(
                block_mask[:, :, first : first + rows], kv_start, *others, first_block=first
            ),
        )


def compact_rows(
    block_mask: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    block_size: int,
    key_block_size: int,
    causal: bool,
    first_block: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns lists and lengths of the column blocks that each row block reads.

    These are the True blocks up to the causal limit. The module docstring gives the layouts. The
    mask begins at row block ``first_block``.
    """
    return _compact(
        block_mask[:, :, None], triton.cdiv(num_keys, key_block_size), kv_start,
        num_queries, num_keys, offset, first_block=first_block,
        ROWS=block_size, KEYS=key_block_size, CAUSAL=causal, BY_COLUMN=False,
    )  # fmt: skip


def compact_packed_rows(
    block_mask: Tensor,
    cu_queries: Tensor,
    kv_len: Tensor,
    num_queries: int,
    num_keys: int,
    block_size: int,
    key_block_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns the lists of :func:`compact_rows` for packed causal sequences, whose lengths are on
    the device.

    ``num_queries`` and ``num_keys`` are those that there is room for, see
    :func:`.paged_tiles.packed_span`.
    """
    return _compact(
        block_mask[:, :, None], triton.cdiv(num_keys, key_block_size), None,
        num_queries, num_keys, 0, cu_queries, kv_len,
        ROWS=block_size, KEYS=key_block_size, CAUSAL=True, BY_COLUMN=False,
    )  # fmt: skip


def compact_columns(
    block_mask: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    block_size: int,
    key_block_size: int,
    causal: bool,
    kv_heads: int,
    group: int,
) -> tuple[Tensor, Tensor]:
    """Returns lists and lengths of the row blocks that read each column block.

    A list covers all query heads of a key/value head.
    """
    shared = min(block_mask.shape[1], kv_heads)
    grouped = block_mask.unflatten(1, (shared, -1)).expand(-1, kv_heads, group, -1, -1).mT
    return _compact(
        grouped, triton.cdiv(num_keys, key_block_size), kv_start, num_queries, num_keys, offset,
        ROWS=block_size, KEYS=key_block_size, CAUSAL=causal, BY_COLUMN=True,
    )  # fmt: skip


def _compact(
    mask: Tensor,
    col_blocks: int,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    offset: int,
    cu_queries: Tensor | None = None,
    kv_len: Tensor | None = None,
    first_block: int = 0,
    **constants: int | bool,
) -> tuple[Tensor, Tensor]:
    """Builds the lists of ``mask [B or 1, heads, group, blocks, candidates]``.

    By row, blocks are row blocks, and candidates column blocks or words of them; by column, blocks
    are column blocks or words, and candidates row blocks.

    Sequences are padded, with ``kv_start``, or packed, with ``cu_queries`` and ``kv_len``.
    """
    # sequences may share a mask, but their causal limits differ by padding
    if kv_start is not None:
        mask = mask.expand(kv_start.shape[0], -1, -1, -1, -1)
    batch, heads, group, *sizes = mask.shape
    by_column, bits = constants["BY_COLUMN"], mask.dtype != torch.bool
    blocks, candidates = (col_blocks, sizes[1]) if by_column else (sizes[0], col_blocks)
    entries = triton.cdiv(candidates * group, PAD.value) * PAD.value + PAD.value
    lists = torch.empty(
        (batch, heads, blocks, entries), dtype=_dtype(candidates * group), device=mask.device
    )
    lengths = torch.empty((batch, heads, blocks, 2), dtype=torch.int32, device=mask.device)
    _compact_kernel[(blocks, heads, batch)](
        mask if bits else mask.view(torch.uint8), lists,
        lengths, kv_start, cu_queries, kv_len, *mask.stride(),
        num_queries, num_keys, entries, offset, first_block,
        GROUP=group, CHUNK=min(1024, triton.next_power_of_2(candidates * group)),
        WORD=WORD if bits else 1, **constants,
        num_warps=1,
    )  # fmt: skip
    return lists, lengths


def _dtype(candidates: int) -> torch.dtype:
    """Returns the dtype of entries below ``candidates``."""
    return torch.uint16 if candidates <= 2**16 else torch.int32


@triton.jit(do_not_specialize=["first_block", "num_queries"])
def _compact_kernel(
    mask_ptr, lists_ptr, lengths_ptr, kv_start_ptr, cu_queries_ptr, kv_len_ptr,
    stride_b, stride_h, stride_group, stride_block, stride_candidate,
    num_queries, num_keys, entries, offset, first_block,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """One program compacts one row block (column block) of the mask, of WORD columns an element."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if cu_queries_ptr is not None:
        _, keys, queries, delta = packed_span(cu_queries_ptr, kv_len_ptr, b, num_queries, num_keys)
    else:
        _, _, keys, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    first_token = (first_block + block) * (KEYS if BY_COLUMN else ROWS)
    if BY_COLUMN:
        begin, end, full_begin, full_end = _visible_row_blocks(
            first_token, keys, queries, delta, ROWS, KEYS, CAUSAL
        )
    else:
        begin, end, full_begin, full_end = visible_column_blocks(
            first_token, keys, queries, delta, ROWS, KEYS, CAUSAL
        )

    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + block
    line = block // WORD if BY_COLUMN else block
    mask_ptr += (
        b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + line.to(tl.int64) * stride_block
    )
    found = tl.zeros((), tl.int32)
    found_full = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32)
    lists_ptr += row * entries
    for first in tl.range(begin * GROUP, end * GROUP, CHUNK):  # type: ignore[misc]
        entry = first + tl.arange(0, CHUNK)
        candidate = entry // GROUP
        element = candidate if BY_COLUMN else candidate // WORD
        on_ptrs = (
            mask_ptr
            + element.to(tl.int64) * stride_candidate
            + (entry % GROUP).to(tl.int64) * stride_group
        )
        on = tl.load(on_ptrs, mask=candidate < end, other=0).to(tl.int32)
        if WORD > 1:
            on = (on >> ((block if BY_COLUMN else candidate) % WORD)) & 1
        place = found + tl.cumsum(on, 0) - on
        tl.store(lists_ptr + place, entry.to(lists_ptr.dtype.element_ty), mask=on != 0)
        found += tl.sum(on, 0)
        last = tl.maximum(last, tl.max(entry * on, 0))
        found_full += tl.sum(tl.where((candidate >= full_begin) & (candidate < full_end), on, 0), 0)
    tl.store(lists_ptr + found + tl.arange(0, PAD), last.to(lists_ptr.dtype.element_ty))
    tl.store(lengths_ptr + row * 2, found_full)
    tl.store(lengths_ptr + row * 2 + 1, found)


@triton.jit
def visible_column_blocks(
    t0, keys, queries, delta, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns the range of column blocks, of KEYS keys each, that the row block of ROWS queries at
    t0 sees.

    It is ``[begin, end)``, followed by the range of those that all its queries see in full.
    """
    last, full_end = keys, keys // KEYS
    if CAUSAL:
        last = tl.minimum(keys, tl.minimum(t0 + ROWS, queries) + delta)
        full_end = tl.minimum(keys, t0 + delta + 1) // KEYS
    return 0, tl.where(t0 < queries, tl.cdiv(last, KEYS), 0), 0, full_end


@triton.jit
def _visible_row_blocks(
    u0, keys, queries, delta, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns the range of row blocks, of ROWS queries each, that see the column block of KEYS keys
    at u0.

    It is ``[begin, end)``, followed by the range of those that see all of its keys. Keys and
    queries past the end of a sequence count as seen: the gradients of such keys are not stored, and
    such queries are loaded as 0.
    """
    begin, full_begin = 0, 0
    end = tl.cdiv(queries, ROWS)
    if CAUSAL:
        begin = tl.maximum(u0 - delta, 0) // ROWS
        full_begin = tl.cdiv(tl.maximum(u0 + KEYS - 1 - delta, 0), ROWS)
    return begin, tl.where(u0 < keys, end, 0), full_begin, end


@triton.jit
def listed_runs(list_ptr, n, KEYS: tl.constexpr, BN: tl.constexpr, RUN: tl.constexpr):
    """Returns the first key of each run of tile n of a list, ``[BN // RUN]``; None lists all
    blocks.

    The list has blocks of KEYS keys. A tile of BN keys is a part of a block or several blocks; a
    run of RUN adjacent keys is a part of both. After the last block, the last tile repeats it, so
    that nothing else is loaded.
    """
    place = n * BN + tl.arange(0, BN // RUN) * RUN
    if list_ptr is not None:
        if RUN == KEYS:
            place = (
                tl.load(list_ptr + n * (BN // RUN) + tl.arange(0, BN // RUN)).to(tl.int32) * KEYS
            )
        else:
            place = tl.load(list_ptr + place // KEYS).to(tl.int32) * KEYS + place % KEYS
    return place


@triton.jit
def repeat_runs(x, RUN: tl.constexpr):
    """Repeats each element of ``x [R]``, ``[R * RUN]``."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], RUN]), [x.shape[0] * RUN])


@triton.jit
def run_keys(runs, RUN: tl.constexpr):
    """Returns the keys of runs that begin at ``runs [R]``, ``[R * RUN]``."""
    return repeat_runs(runs, RUN) + tl.arange(0, runs.shape[0] * RUN) % RUN


@triton.jit
def listed_keys(
    list_ptr, n, entries, keys, KEYS: tl.constexpr, BN: tl.constexpr, RUN: tl.constexpr
):
    """Returns the keys of tile n of a list, ``[BN]``; after the last block, they are past the end
    of the ``keys``.
    """
    u = run_keys(listed_runs(list_ptr, n, KEYS, BN, RUN), RUN)
    return tl.where(n * BN + tl.arange(0, BN) < entries * KEYS, u, keys)


@triton.jit
def find_list(
    lists_ptr, lengths_ptr, b, h, block, heads, list_batch, list_heads, num_blocks, entries
):
    """Returns the list of a block for head h (of ``heads``) of sequence b, of lists with room for
    ``entries``.

    The result is a pointer, the number of full blocks and the number of blocks.
    """
    row = (
        (b % list_batch).to(tl.int64) * list_heads + h * list_heads // heads
    ) * num_blocks + block
    return (
        lists_ptr + row * entries,
        tl.load(lengths_ptr + row * 2),
        tl.load(lengths_ptr + row * 2 + 1),
    )

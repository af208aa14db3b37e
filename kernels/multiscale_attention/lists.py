"""Lists of blocks by zoom, built on the device.

- Row lists ``[B or 1, Hm, Tr, Tc]``: the column blocks that a row block reads, those of zoom 8
  first, then 4, 2 and 1, each in ascending order. Counts ``[B or 1, Hm, Tr, 4]``: the number of
  keys in the blocks of each zoom.
- Tile lists ``[B or 1, Hkv, tiles, Tr * group]``, for the backward pass: the row blocks, of each
  query head of a group, that read some column block of a tile at the zoom of the tile, in ascending
  order. An entry is ``(row block * group + query head in the group) << 8 | columns``, with a bit in
  ``columns`` for each column block that is read. Lengths ``[B or 1, Hkv, tiles, 2]``: entries that
  need no mask, which come last, and all entries.

A tile covers adjacent column blocks at one level
(:mod:`msattn.kernels.multiscale_attention.levels`). Hm is the number of heads of the zoom map. The
first dimension is B if sequences differ in padding or zoom, else 1.
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset
from msattn.kernels.common.primitives import sequence_span, tl, triton
from msattn.kernels.multiscale_attention.levels import level_of_tile, num_tiles


def row_lists(
    zoom: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    block_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the row lists and their counts (layouts in the module docstring)."""
    zoom = _expand_batch(zoom, kv_start)
    col_blocks = zoom.shape[3]
    lists = torch.empty(
        zoom.shape, dtype=torch.int16 if col_blocks < 2**15 else torch.int32, device=zoom.device
    )
    counts = torch.empty((*zoom.shape[:3], 4), dtype=torch.int32, device=zoom.device)
    _row_lists_kernel[zoom.shape[2::-1]](
        zoom, lists, counts, kv_start, *zoom.stride(),
        num_queries, num_keys, col_blocks, query_offset(num_queries, num_keys, causal),
        BLOCK=block_size, CHUNK=min(256, triton.next_power_of_2(col_blocks)), CAUSAL=causal,
        num_warps=1,
    )  # fmt: skip
    return lists, counts


def tile_lists(
    zoom: Tensor,
    kv_start: Tensor | None,
    num_queries: int,
    num_keys: int,
    block_size: int,
    causal: bool,
    kv_heads: int,
    group: int,
    pooled: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the tile lists and their lengths (layouts in the module docstring).

    Tiles are those of the means if ``pooled``, else the column blocks of zoom 1.
    """
    zoom = _expand_batch(zoom, kv_start)
    batch, heads, row_blocks, col_blocks = zoom.shape
    zoom = zoom.unflatten(1, (min(heads, kv_heads), -1)).expand(-1, kv_heads, group, -1, -1)
    tiles, entries = num_tiles(col_blocks) if pooled else col_blocks, row_blocks * group
    lists = torch.empty((batch, kv_heads, tiles, entries), dtype=torch.int32, device=zoom.device)
    lengths = torch.empty((batch, kv_heads, tiles, 2), dtype=torch.int32, device=zoom.device)
    _tile_lists_kernel[(tiles, kv_heads, batch)](
        zoom, lists, lengths, kv_start, *zoom.stride(),
        num_queries, num_keys, entries, col_blocks, query_offset(num_queries, num_keys, causal),
        GROUP=group,
        BLOCK=block_size, CHUNK=min(512, triton.next_power_of_2(entries)), CAUSAL=causal,
        COLUMNS=8 if pooled else 1,
    )  # fmt: skip
    return lists, lengths


def _expand_batch(zoom: Tensor, kv_start: Tensor | None) -> Tensor:
    """Expands a map that sequences share, if padding makes their causal limits differ."""
    return zoom if kv_start is None else zoom.expand(kv_start.shape[0], -1, -1, -1)


@triton.jit
def find_row_list(
    lists_ptr, counts_ptr, b, h, r, q_heads, list_batch, list_heads, row_blocks, col_blocks
):
    """Returns the row list of row block r for query head h of sequence b.

    The result is a pointer and the number of keys at zoom 8, 4, 2, 1.
    """
    row = ((b % list_batch).to(tl.int64) * list_heads + h * list_heads // q_heads) * row_blocks + r
    p = counts_ptr + row * 4
    return lists_ptr + row * col_blocks, tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def _visible_blocks(t0, keys, queries, delta, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Returns the number of column blocks that the row block at t0 sees.

    The second result is the number of full blocks: these have no key after a query of the row block
    and may be pooled.
    """
    seen, past = keys, keys
    if CAUSAL:
        seen = tl.minimum(keys, tl.minimum(t0 + BLOCK, queries) + delta)
        past = t0 + delta + 1
    full_end = tl.where(past < keys, past // BLOCK, tl.cdiv(keys, BLOCK))
    return tl.where(t0 < queries, tl.cdiv(seen, BLOCK), 0), tl.where(t0 < queries, full_end, 0)


@triton.jit
def _effective_zoom(zoom, c, end, full_end):
    """Returns the zoom at which a row block reads column block c; 0 if not at all.

    Blocks from ``full_end`` on contain later keys and are not pooled.
    """
    # values above 8 are not read; bounded for the shift in _pack_count
    zoom = tl.minimum(zoom.to(tl.int32), 9)
    return tl.where(c < full_end, zoom, tl.where(c < end, tl.minimum(zoom, 1), 0))


@triton.jit(do_not_specialize=["col_blocks"])
def _row_lists_kernel(
    zoom_ptr, lists_ptr, counts_ptr, kv_start_ptr,
    stride_b, stride_h, stride_r, stride_c,
    num_queries, num_keys, col_blocks, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program counts the blocks of a row block by zoom, then scatters them."""
    r, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    end, full_end = _visible_blocks(r * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + r
    zoom_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + r.to(tl.int64) * stride_r
    lists_ptr += row * col_blocks

    n8, n4, n2, n1 = 0, 0, 0, 0
    for c0 in tl.range(0, end, CHUNK):  # type: ignore[misc]
        c = c0 + tl.arange(0, CHUNK)
        zoom = tl.load(zoom_ptr + c.to(tl.int64) * stride_c, mask=c < end, other=0)
        found = tl.sum(_pack_count(_effective_zoom(zoom, c, end, full_end)), 0)
        n8, n4, n2, n1 = (
            n8 + _unpack(found, 3),
            n4 + _unpack(found, 2),
            n2 + _unpack(found, 1),
            n1 + _unpack(found, 0),
        )
    cut = keys // BLOCK  # the partial column block at the end of the sequence, if any
    last = _effective_zoom(
        tl.load(zoom_ptr + cut.to(tl.int64) * stride_c, mask=cut < end, other=0), cut, end, full_end
    )
    missing = BLOCK - keys % BLOCK
    counts_ptr += row * 4
    tl.store(counts_ptr, n8 * BLOCK - tl.where(last == 8, missing, 0))
    tl.store(counts_ptr + 1, n4 * BLOCK - tl.where(last == 4, missing, 0))
    tl.store(counts_ptr + 2, n2 * BLOCK - tl.where(last == 2, missing, 0))
    tl.store(counts_ptr + 3, n1 * BLOCK - tl.where(last == 1, missing, 0))

    next8, next4, next2, next1 = 0, n8, n8 + n4, n8 + n4 + n2
    for c0 in tl.range(0, end, CHUNK):  # type: ignore[misc]
        c = c0 + tl.arange(0, CHUNK)
        zoom = tl.load(zoom_ptr + c.to(tl.int64) * stride_c, mask=c < end, other=0)
        zoom = _effective_zoom(zoom, c, end, full_end)
        one = _pack_count(zoom)
        place = tl.where(
            zoom == 8, next8, tl.where(zoom == 4, next4, tl.where(zoom == 2, next2, next1))
        )
        place += _unpack(tl.cumsum(one, 0) - one, _level(zoom))
        tl.store(lists_ptr + place, c.to(lists_ptr.dtype.element_ty), mask=one != 0)
        found = tl.sum(one, 0)
        next8, next4 = next8 + _unpack(found, 3), next4 + _unpack(found, 2)
        next2, next1 = next2 + _unpack(found, 1), next1 + _unpack(found, 0)


@triton.jit
def _level(zoom):
    """Returns log2 of the zoom."""
    return (zoom >> 1) - (zoom >> 3)


@triton.jit
def _pack_count(zoom):
    """Returns four 16-bit counters in one int64, with a 1 in the counter of ``zoom``.

    A single sum then counts all four zooms. Blocks that are not read have 0 in all counters.
    """
    read = (tl.full([], 0b100010110, tl.int32) >> zoom) & 1
    return read.to(tl.int64) << (16 * _level(zoom))


@triton.jit
def _unpack(counters, level):
    return ((counters >> (16 * level)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["entries", "col_blocks"])
def _tile_lists_kernel(
    zoom_ptr, lists_ptr, lengths_ptr, kv_start_ptr,
    stride_b, stride_h, stride_group, stride_r, stride_c,
    num_queries, num_keys, entries, col_blocks, offset, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program lists the row blocks that read one tile."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    level, number = level_of_tile(tile, col_blocks, COLUMNS > 1)
    column = tl.arange(0, COLUMNS)
    c = (number << level) + column
    of_tile = (column < (1 << level)) & (c < col_blocks)
    begin, end = 0, tl.cdiv(queries, BLOCK)
    if CAUSAL:
        # earlier row blocks see no key of the tile
        begin = tl.maximum((number << level) * BLOCK - delta, 0) // BLOCK
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + tile
    zoom_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    found, found_full = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in tl.range(begin * GROUP, end * GROUP, CHUNK):  # type: ignore[misc]
        entry = first + tl.arange(0, CHUNK)
        r = entry // GROUP
        p = zoom_ptr + r.to(tl.int64) * stride_r + (entry % GROUP).to(tl.int64) * stride_group
        p = p[:, None] + c.to(tl.int64)[None, :] * stride_c
        zoom = tl.load(p, mask=(r < end)[:, None] & of_tile[None, :], other=0)  # [CHUNK, COLUMNS]
        seen_end, full_end = _visible_blocks(r * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
        zoom = _effective_zoom(zoom, c[None, :], seen_end[:, None], full_end[:, None])
        columns = tl.sum((zoom == (1 << level)).to(tl.int32) << column[None, :], 1)
        on = (columns != 0).to(tl.int32)
        place = found + tl.cumsum(on, 0) - on
        tl.store(lists_ptr + row * entries + place, (entry << 8) | columns, mask=on != 0)
        found += tl.sum(on, 0)
        found_full += tl.sum(tl.where((number << level) < full_end, on, 0), 0)
    tl.store(lengths_ptr + row * 2, found_full)
    tl.store(lengths_ptr + row * 2 + 1, found)

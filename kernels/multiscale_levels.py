"""What multiscale attention reads, prepared on the device: means of K and V, and lists of blocks by zoom.

Level ``e`` holds means of ``2 ** e`` keys: one buffer ``[B, Hkv, rows, 2, D]``, a row of K and one of V side by side; levels 3,
2, 1 one after the other, each filled up with zeros to whole tiles. A tile of level e has a block's number of rows and so stands
for ``2 ** e`` column blocks; tiles count through all levels. Groups are counted from the start of a sequence and never straddle
blocks.

Row lists ``[B or 1, Hm, Tr, Tc]``: the column blocks that a row block reads, those of zoom 8 first, then 4, 2 and 1, each in
ascending order; how many keys those of each zoom have, ``[B or 1, Hm, Tr, 4]``. Tile lists ``[B or 1, Hkv, tiles, Tr *
group]``, for gradients: the row blocks, of each query head of a group, that read some column block of a tile at the tile's own
zoom, in ascending order, as ``(row block * group + query head in the group) << 8 | which``, a bit for each column block;
lengths ``[B or 1, Hkv, tiles, 2]`` (those that need no mask, which come last; all). Hm are the heads of the zoom map, B the
batch where sequences differ in padding or zoom. Prefix: p_ pointer.
"""

import torch
from torch import Tensor

from msattn.kernels.checks import query_offset
from msattn.kernels.primitives import padded_head, sequence_span, tl, triton

TOP = tl.constexpr(3)  # the coarsest level, of zoom 8
POOLED_AT_ONCE = 2048  # numbers, by one warp, so that neighbours meet in its registers


def num_tiles(col_blocks: int) -> int:
    """Tiles of the three levels together."""
    return sum(triton.cdiv(col_blocks, zoom) for zoom in (8, 4, 2))


def pool(k: Tensor, v: Tensor, kv_start: Tensor | None, block_size: int) -> Tensor:
    """Means of 8, 4 and 2 of ``k, v [B, Hkv, M, D]`` (layout: top of the file), made in fp32 and rounded once."""
    batch, heads, num_keys, head = k.shape
    col_blocks = triton.cdiv(num_keys, block_size)
    means = k.new_empty((batch, heads, num_tiles(col_blocks) * block_size, 2, head))
    cols = padded_head(head)
    at_once = POOLED_AT_ONCE // cols
    _pool_kernel[(triton.cdiv(triton.cdiv(col_blocks, 8) * 8 * block_size, at_once), heads, batch)](
        k, v, means, kv_start, *k.stride()[:3], *v.stride()[:3], num_keys, col_blocks,
        HEAD=head, COLS=cols, BLOCK=block_size, KEYS=at_once, num_warps=1,
    )  # fmt: skip
    return means


def row_lists(
    zoom: Tensor, kv_start: Tensor | None, num_queries: int, num_keys: int, block_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """What each row block reads, and how much of it (layouts: top of the file)."""
    zoom = _of_each_sequence(zoom, kv_start)
    col_blocks = zoom.shape[3]
    lists = torch.empty(zoom.shape, dtype=torch.int16 if col_blocks < 2**15 else torch.int32, device=zoom.device)
    counts = torch.empty((*zoom.shape[:3], 4), dtype=torch.int32, device=zoom.device)
    _row_lists_kernel[zoom.shape[2::-1]](
        zoom, lists, counts, kv_start, *zoom.stride(),
        num_queries, num_keys, col_blocks, query_offset(num_queries, num_keys, causal),
        BLOCK=block_size, CHUNK=min(512, triton.next_power_of_2(col_blocks)), CAUSAL=causal, num_warps=1,
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
    """What reads each tile of means or, unless ``pooled``, each column block as it is (layouts: top of the file)."""
    zoom = _of_each_sequence(zoom, kv_start)
    batch, heads, row_blocks, col_blocks = zoom.shape
    zoom = zoom.unflatten(1, (min(heads, kv_heads), -1)).expand(-1, kv_heads, group, -1, -1)
    tiles, entries = num_tiles(col_blocks) if pooled else col_blocks, row_blocks * group
    lists = torch.empty((batch, kv_heads, tiles, entries), dtype=torch.int32, device=zoom.device)
    lengths = torch.empty((batch, kv_heads, tiles, 2), dtype=torch.int32, device=zoom.device)
    _tile_lists_kernel[(tiles, kv_heads, batch)](
        zoom, lists, lengths, kv_start, *zoom.stride(),
        num_queries, num_keys, entries, col_blocks, query_offset(num_queries, num_keys, causal), MEMBERS=group,
        BLOCK=block_size, CHUNK=min(512, triton.next_power_of_2(entries)), CAUSAL=causal, COLUMNS=8 if pooled else 1,
    )  # fmt: skip
    return lists, lengths


def _of_each_sequence(zoom: Tensor, kv_start: Tensor | None) -> Tensor:
    """Sequences that share a map still end at different blocks."""
    return zoom if kv_start is None else zoom.expand(kv_start.shape[0], -1, -1, -1)


# --- levels and tiles, on the device ---


@triton.jit
def first_tile(level, col_blocks):
    """First tile of a level (a tensor of levels, too)."""
    top = tl.cdiv(col_blocks, 8)
    return tl.where(level == TOP, 0, tl.where(level == TOP - 1, top, top + tl.cdiv(col_blocks, 4)))


@triton.jit
def level_of_tile(tile, col_blocks, POOLED: tl.constexpr):
    """Level of a tile and its number within the level; where nothing is pooled, tiles are column blocks."""
    level, first = 0, 0
    if POOLED:
        level = tl.where(tile < first_tile(2, col_blocks), 3, tl.where(tile < first_tile(1, col_blocks), 2, 1))
        first = first_tile(level, col_blocks)
    return level, tile - first


@triton.jit
def group_size(u, level, keys):
    """How many of ``keys`` keys the group of a level that begins at key u has; 0 or less past the end."""
    return tl.minimum(keys - u, tl.full([], 1, tl.int32) << level)


@triton.jit
def pooled_ends(keys8, keys4, keys2):
    """Where the means of zoom 8, 4 and 2 end, if all that a row block reads stood in a row."""
    end8 = tl.cdiv(keys8, 8)
    end4 = end8 + tl.cdiv(keys4, 4)
    return end8, end4, end4 + tl.cdiv(keys2, 2)


@triton.jit
def find_tile(n, p_list, keys8, keys4, keys2, col_blocks, BLOCK: tl.constexpr, BP: tl.constexpr):
    """The n-th BP means that a row block reads: their level, 0 unless all are of one level and whole groups; their rows.

    Rows past the last are of means that exist.
    """
    end8, end4, end2 = pooled_ends(keys8, keys4, keys2)
    begin, end = n * BP, n * BP + BP
    level = tl.where(end <= keys8 // 8, 3, 0)
    level = tl.where((begin >= end8) & (end <= end8 + keys4 // 4), 2, level)
    level = tl.where((begin >= end4) & (end <= end4 + keys2 // 2), 1, level)
    blocks8 = tl.cdiv(keys8, BLOCK)
    blocks4 = blocks8 + tl.cdiv(keys4, BLOCK)
    BITS: tl.constexpr = (BLOCK // 8).bit_length() - 1  # groups of zoom 8 in a block, as a power of two
    to_list4, to_list2 = (blocks8 << (BITS + 1)) - end8, (blocks4 << (BITS + 2)) - end4
    g = begin + tl.arange(0, BP)
    past8, past4 = g >= end8, g >= end4
    # Levels by lane, in few instructions: where g would stand in its level's part of the list, and then of the buffer.
    bits = BITS + tl.where(past4, 2, tl.where(past8, 1, 0))
    block = (g + tl.where(past4, to_list2, tl.where(past8, to_list4, 0))) >> bits
    to_row4, to_row2 = to_list4 + first_tile(2, col_blocks) * BLOCK, to_list2 + first_tile(1, col_blocks) * BLOCK
    row = g + tl.where(past4, to_row2, tl.where(past8, to_row4, 0))
    c = tl.load(p_list + block, mask=g < end2, other=0).to(tl.int32)
    return level, row + ((c - block) << bits)


@triton.jit
def _level_of(g, end8, end4):
    return tl.where(g < end8, 3, tl.where(g < end4, 2, 1))


@triton.jit
def weigh_means(s, n, keys8, keys4, keys2, scale2, BP: tl.constexpr):
    """Scores ``s [BM, BP]`` of the n-th means, of any levels, with the logarithms of their groups; -inf past the last."""
    end8, end4, end2 = pooled_ends(keys8, keys4, keys2)
    g = n * BP + tl.arange(0, BP)
    bias = tl.where(g < end2, _level_of(g, end8, end4).to(tl.float32), float("-inf"))
    # One group can be cut off: the last of its level.
    size8, size4, size2 = keys8 % 8, keys4 % 4, keys2 % 2
    cut = tl.where(size8 > 0, end8, tl.where(size4 > 0, end4, end2)) - 1
    size = size8 + size4 + size2
    bias = tl.where((g == cut) & (size > 0), tl.log2(size.to(tl.float32)), bias)
    return s + (bias * (1.0 / scale2))[None, :]


@triton.jit
def find_row_list(p_lists, p_counts, b, h, r, q_heads, list_batch, list_heads, row_blocks, col_blocks):
    """Row block r's list for query head h of sequence b: where it starts, how many keys it has at zoom 8, 4, 2, 1."""
    row = ((b % list_batch).to(tl.int64) * list_heads + h * list_heads // q_heads) * row_blocks + r
    p = p_counts + row * 4
    return p_lists + row * col_blocks, tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def find_means(p_means, b, kv_head, kv_heads, col_blocks, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Where the means of a key/value head start."""
    rows = (first_tile(1, col_blocks) + tl.cdiv(col_blocks, 2)) * BLOCK
    return p_means + (b.to(tl.int64) * kv_heads + kv_head) * rows * (2 * HEAD)


@triton.jit
def load_means(p_means, row, V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Rows of a head's means of K (V = 0) or V (V = 1), ``[rows, COLS]``."""
    d = tl.arange(0, COLS)
    p = p_means + row.to(tl.int64)[:, None] * (2 * HEAD) + d[None, :] + V * HEAD
    if HEAD == COLS:
        return tl.load(p)
    return tl.load(p, mask=(d < HEAD)[None, :], other=0.0)


@triton.jit
def store_means(p_means, x, row, exists, V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Write rows, those that exist, of a head's means of K or V."""
    d = tl.arange(0, COLS)
    p = p_means + row.to(tl.int64)[:, None] * (2 * HEAD) + d[None, :] + V * HEAD
    tl.store(p, x.to(p_means.dtype.element_ty), mask=exists[:, None] & (d < HEAD)[None, :])


# --- kernels ---


@triton.jit(do_not_specialize=["col_blocks"])
def _pool_kernel(
    p_k, p_v, p_means, p_kv_start,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, num_keys, col_blocks,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program = some groups of 8 keys."""
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first_key, _, keys, _, _ = sequence_span(p_kv_start, b, 0, num_keys, 0)
    u0 = tl.program_id(0) * KEYS
    p_k += b * stride_kb + h * stride_kh + (first_key + u0).to(tl.int64) * stride_kn
    p_v += b * stride_vb + h * stride_vh + (first_key + u0).to(tl.int64) * stride_vn
    p_means = find_means(p_means, b, h, tl.num_programs(1), col_blocks, HEAD, BLOCK)
    _pool(p_k, stride_kn, p_means, u0, keys, col_blocks, 0, HEAD, COLS, BLOCK, KEYS)
    _pool(p_v, stride_vn, p_means, u0, keys, col_blocks, 1, HEAD, COLS, BLOCK, KEYS)


@triton.jit
def _pool(
    p_x, stride, p_means, u0, keys, col_blocks,
    V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums of 2, of 4 and of 8 keys from key u0 on, each divided by the keys that exist."""
    i, d = tl.arange(0, KEYS), tl.arange(0, COLS)
    p = p_x + i.to(tl.int64)[:, None] * stride + d[None, :]
    total = tl.load(p, mask=(u0 + i < keys)[:, None] & (d < HEAD)[None, :], other=0.0).to(tl.float32)
    for level in tl.static_range(1, 4):  # type: ignore[misc]
        total = tl.sum(tl.reshape(total, [KEYS >> level, 2, COLS]), 1)
        group = (u0 >> level) + tl.arange(0, KEYS >> level)
        row = first_tile(level, col_blocks) * BLOCK + group
        exists = group < tl.cdiv(col_blocks, 1 << level) * BLOCK
        if u0 + KEYS <= keys:
            store_means(p_means, total * (0.5**level), row, exists, V, HEAD, COLS)
        else:
            # Rounded as IEEE says: means of 16-bit numbers often lie half way between two, where a last bit would decide.
            size = tl.maximum(group_size(group << level, level, keys), 1).to(tl.float32)
            mean = tl.div_rn(total, tl.broadcast_to(size[:, None], total.shape))
            store_means(p_means, mean, row, exists, V, HEAD, COLS)


@triton.jit
def _row_span(t0, keys, queries, delta, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """How many column blocks the row block at t0 sees, and how many before the first with a key after one of its queries."""
    seen, past = keys, keys
    if CAUSAL:
        seen = tl.minimum(keys, tl.minimum(t0 + BLOCK, queries) + delta)
        past = t0 + delta + 1
    past_end = tl.where(past < keys, past // BLOCK, tl.cdiv(keys, BLOCK))
    return tl.where(t0 < queries, tl.cdiv(seen, BLOCK), 0), tl.where(t0 < queries, past_end, 0)


@triton.jit
def _seen_zoom(zoom, c, end, past_end):
    """At which zoom a row block of that span sees column block c: 0 if not at all, never a mean of what is to come."""
    zoom = tl.minimum(zoom.to(tl.int32), 9)  # which is none, as all above are
    return tl.where(c < past_end, zoom, tl.where(c < end, tl.minimum(zoom, 1), 0))


@triton.jit(do_not_specialize=["col_blocks"])
def _row_lists_kernel(
    p_zoom, p_lists, p_counts, p_kv_start,
    stride_b, stride_h, stride_r, stride_c,
    num_queries, num_keys, col_blocks, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program = one row block: it counts its blocks by zoom, then puts each in its place."""
    r, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    end, past_end = _row_span(r * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + r
    p_zoom += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + r.to(tl.int64) * stride_r
    p_lists += row * col_blocks

    n8, n4, n2, n1 = 0, 0, 0, 0
    for c0 in tl.range(0, end, CHUNK):  # type: ignore[misc]
        c = c0 + tl.arange(0, CHUNK)
        zoom = tl.load(p_zoom + c.to(tl.int64) * stride_c, mask=c < end, other=0)
        found = tl.sum(_counters(_seen_zoom(zoom, c, end, past_end)), 0)
        n8, n4, n2, n1 = n8 + _count(found, 3), n4 + _count(found, 2), n2 + _count(found, 1), n1 + _count(found, 0)
    cut = keys // BLOCK  # the column block in which the sequence ends, if it does in one
    last = _seen_zoom(tl.load(p_zoom + cut.to(tl.int64) * stride_c, mask=cut < end, other=0), cut, end, past_end)
    lacks = BLOCK - keys % BLOCK
    p_counts += row * 4
    tl.store(p_counts, n8 * BLOCK - tl.where(last == 8, lacks, 0))
    tl.store(p_counts + 1, n4 * BLOCK - tl.where(last == 4, lacks, 0))
    tl.store(p_counts + 2, n2 * BLOCK - tl.where(last == 2, lacks, 0))
    tl.store(p_counts + 3, n1 * BLOCK - tl.where(last == 1, lacks, 0))

    at8, at4, at2, at1 = 0, n8, n8 + n4, n8 + n4 + n2
    for c0 in tl.range(0, end, CHUNK):  # type: ignore[misc]
        c = c0 + tl.arange(0, CHUNK)
        zoom = tl.load(p_zoom + c.to(tl.int64) * stride_c, mask=c < end, other=0)
        zoom = _seen_zoom(zoom, c, end, past_end)
        one = _counters(zoom)
        place = tl.where(zoom == 8, at8, tl.where(zoom == 4, at4, tl.where(zoom == 2, at2, at1)))
        place += _count(tl.cumsum(one, 0) - one, _level(zoom))
        tl.store(p_lists + place, c.to(p_lists.dtype.element_ty), mask=one != 0)
        found = tl.sum(one, 0)
        at8, at4, at2, at1 = at8 + _count(found, 3), at4 + _count(found, 2), at2 + _count(found, 1), at1 + _count(found, 0)


@triton.jit
def _level(zoom):
    """0, 1, 2, 3 for 1, 2, 4, 8."""
    return (zoom >> 1) - (zoom >> 3)


@triton.jit
def _counters(zoom):
    """Four counters of 16 bits in one integer, so that one sum counts four zooms: a 1 in that of ``zoom``, 0 if not read."""
    read = (tl.full([], 0b100010110, tl.int32) >> zoom) & 1
    return read.to(tl.int64) << (16 * _level(zoom))


@triton.jit
def _count(counters, level):
    return ((counters >> (16 * level)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["entries", "col_blocks"])
def _tile_lists_kernel(
    p_zoom, p_lists, p_lengths, p_kv_start,
    stride_b, stride_h, stride_member, stride_r, stride_c,
    num_queries, num_keys, entries, col_blocks, offset, MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program = one tile: the row blocks of each query head that read it, in order."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    level, number = level_of_tile(tile, col_blocks, COLUMNS > 1)
    column = tl.arange(0, COLUMNS)
    c = (number << level) + column
    of_tile = (column < (1 << level)) & (c < col_blocks)
    begin, end = 0, tl.cdiv(queries, BLOCK)
    if CAUSAL:
        begin = tl.maximum((number << level) * BLOCK - delta, 0) // BLOCK  # earlier row blocks end before the tile
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + tile
    p_zoom += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    found, found_plain = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in tl.range(begin * MEMBERS, end * MEMBERS, CHUNK):  # type: ignore[misc]
        entry = first + tl.arange(0, CHUNK)
        r = entry // MEMBERS
        p = p_zoom + r.to(tl.int64) * stride_r + (entry % MEMBERS).to(tl.int64) * stride_member
        p = p[:, None] + c.to(tl.int64)[None, :] * stride_c
        zoom = tl.load(p, mask=(r < end)[:, None] & of_tile[None, :], other=0)  # [CHUNK, COLUMNS]
        seen_end, past_end = _row_span(r * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
        zoom = _seen_zoom(zoom, c[None, :], seen_end[:, None], past_end[:, None])
        which = tl.sum((zoom == (1 << level)).to(tl.int32) << column[None, :], 1)
        on = (which != 0).to(tl.int32)
        place = found + tl.cumsum(on, 0) - on
        tl.store(p_lists + row * entries + place, (entry << 8) | which, mask=on != 0)
        found += tl.sum(on, 0)
        found_plain += tl.sum(tl.where((number << level) < past_end, on, 0), 0)
    tl.store(p_lengths + row * 2, found_plain)
    tl.store(p_lengths + row * 2 + 1, found)

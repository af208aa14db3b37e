"""What multiscale attention reads, prepared on the device: means of K and V, and lists of blocks by zoom.

Level ``e`` holds means of ``2 ** e`` keys: one buffer ``[B, Hkv, rows, 2, D]``, a row of K and one of V side by side; levels 3,
2, 1 one after the other, each filled up with zeros to whole tiles. A tile of level e has a block's number of rows and so stands
for ``2 ** e`` column blocks; tiles count through all levels. Groups are counted from the start of a sequence and never straddle
blocks.

Row lists ``[B or 1, Hm, Tr, Tc]``: the column blocks that a row block reads, those of zoom 8 first, then 4, 2 and 1, each in
ascending order; how many keys those of each zoom have, ``[B or 1, Hm, Tr, 4]``. Tile lists ``[B or 1, Hm, tiles, Tr]``, for
gradients: the row blocks that read some column block of a tile at the tile's own zoom, as ``r << 8 | which``, a bit for each
column block; counts ``[B or 1, Hm, tiles]``. Hm are the heads of the zoom map, B the batch where sequences differ in padding or
zoom. Prefix: p_ pointer.
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
    zoom: Tensor, kv_start: Tensor | None, num_queries: int, num_keys: int, block_size: int, causal: bool, pooled: bool
) -> tuple[Tensor, Tensor]:
    """Which row blocks read each tile of means or, unless ``pooled``, each column block as it is (layouts: top of the file)."""
    zoom = _of_each_sequence(zoom, kv_start)
    batch, heads, row_blocks, col_blocks = zoom.shape
    tiles = num_tiles(col_blocks) if pooled else col_blocks
    lists = torch.empty((batch, heads, tiles, row_blocks), dtype=torch.int32, device=zoom.device)
    counts = torch.empty((batch, heads, tiles), dtype=torch.int32, device=zoom.device)
    _tile_lists_kernel[(tiles, heads, batch)](
        zoom, lists, counts, kv_start, *zoom.stride(),
        num_queries, num_keys, row_blocks, col_blocks, query_offset(num_queries, num_keys, causal),
        BLOCK=block_size, CHUNK=min(512, triton.next_power_of_2(row_blocks)), CAUSAL=causal, COLUMNS=8 if pooled else 1,
    )  # fmt: skip
    return lists, counts


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
def pooled_tiles(keys8, keys4, keys2, BP: tl.constexpr):
    """Tiles of BP means that a row block reads: each is of one level, so that all but the last of a level are full."""
    return tl.cdiv(keys8, BP * 8) + tl.cdiv(keys4, BP * 4) + tl.cdiv(keys2, BP * 2)


@triton.jit
def find_tile(n, p_list, keys8, keys4, keys2, col_blocks, BLOCK: tl.constexpr, BP: tl.constexpr):
    """Tile n of a row block's: its level, how many keys there are from its start to its list's end, the rows of its means.

    Rows past the end of a list, and those of a tile past the last, are of means that exist.
    """
    end8 = tl.cdiv(keys8, BP * 8)
    end4 = end8 + tl.cdiv(keys4, BP * 4)
    level = tl.where(n < end8, 3, tl.where(n < end4, 2, 1))
    tile = n - tl.where(n < end8, 0, tl.where(n < end4, end8, end4))
    keys = tl.where(n < end8, keys8, tl.where(n < end4, keys4, keys2))
    blocks8 = tl.cdiv(keys8, BLOCK)
    p_list += tl.where(n < end8, 0, tl.where(n < end4, blocks8, blocks8 + tl.cdiv(keys4, BLOCK)))
    u = (tile * BP + tl.arange(0, BP)) << level  # the first key of each group, if the blocks stood in a row
    c = tl.load(p_list + u // BLOCK, mask=u < keys, other=0).to(tl.int32)
    row = first_tile(level, col_blocks) * BLOCK + ((c * BLOCK + (u & (BLOCK - 1))) >> level)
    return level, keys - ((tile * BP) << level), row


@triton.jit
def mask_means(s, level, keys, scale2, BP: tl.constexpr):
    """Scores ``s [BM, BP]`` of a tile whose list ends after ``keys`` keys: -inf past the end, a group cut off weighs less."""
    size = group_size(tl.arange(0, BP) << level, level, keys)
    return s + (log_size(size, scale2) - level / scale2)[None, :]


@triton.jit
def log_size(size, scale2):
    """What a group adds to its unscaled score: the logarithm of its number of keys over the scale; -inf if it has none."""
    return tl.where(size > 0, tl.log2(tl.maximum(size, 1).to(tl.float32)) * (1.0 / scale2), float("-inf"))


@triton.jit
def find_list(b, h, own, q_heads, list_batch, list_heads, num_own):
    """Which list, counted through sequences and heads of the map, is that of ``own`` for query head h of sequence b."""
    return ((b % list_batch).to(tl.int64) * list_heads + h * list_heads // q_heads) * num_own + own


@triton.jit
def find_row_list(p_lists, p_counts, b, h, r, q_heads, list_batch, list_heads, row_blocks, col_blocks):
    """Row block r's list for query head h of sequence b: where it starts, how many keys it has at zoom 8, 4, 2, 1."""
    row = find_list(b, h, r, q_heads, list_batch, list_heads, row_blocks)
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


@triton.jit(do_not_specialize=["row_blocks", "col_blocks"])
def _tile_lists_kernel(
    p_zoom, p_lists, p_counts, p_kv_start,
    stride_b, stride_h, stride_r, stride_c,
    num_queries, num_keys, row_blocks, col_blocks, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program = one tile: the row blocks that read it, in order."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, keys, queries, delta = sequence_span(p_kv_start, b, num_queries, num_keys, offset)
    level, number = level_of_tile(tile, col_blocks, COLUMNS > 1)
    column = tl.arange(0, COLUMNS)
    c = (number << level) + column
    of_tile = (column < (1 << level)) & (c < col_blocks)
    begin = 0
    if CAUSAL:
        begin = tl.maximum((number << level) * BLOCK - delta, 0) // BLOCK  # earlier row blocks end before the tile
    row = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + tile
    p_zoom += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    found = tl.zeros((), tl.int32)
    for r0 in tl.range(begin, tl.cdiv(queries, BLOCK), CHUNK):  # type: ignore[misc]
        r = r0 + tl.arange(0, CHUNK)
        p = p_zoom + r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
        zoom = tl.load(p, mask=(r < row_blocks)[:, None] & of_tile[None, :], other=0)  # [CHUNK, COLUMNS]
        end, past_end = _row_span(r * BLOCK, keys, queries, delta, BLOCK, CAUSAL)
        zoom = _seen_zoom(zoom, c[None, :], end[:, None], past_end[:, None])
        which = tl.sum((zoom == (1 << level)).to(tl.int32) << column[None, :], 1)
        on = (which != 0).to(tl.int32)
        place = found + tl.cumsum(on, 0) - on
        tl.store(p_lists + row * row_blocks + place, (r << 8) | which, mask=on != 0)
        found += tl.sum(on, 0)
    tl.store(p_counts + row, found)

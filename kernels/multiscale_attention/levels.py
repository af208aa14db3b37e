"""Means of K and V for multi-scale attention.

Level ``e`` holds means of groups of ``2 ** e`` keys. All levels share a buffer
``[B, Hkv, rows, 2, D]``, in which a row of K is next to its row of V: levels 3, 2, 1 in this order,
each padded with zeros to whole tiles. A tile of level e has as many rows as a block has tokens, so
it covers ``2 ** e`` column blocks; tiles are numbered through all levels. Groups are counted from
the start of a sequence and never span two blocks.
"""

from torch import Tensor

from msattn.kernels.common.primitives import padded_head, sequence_span, tl, triton

COARSEST_LEVEL = tl.constexpr(3)  # zoom 8
POOL_TILE_ELEMENTS = 2048  # elements of one program, a warp that adds adjacent keys in registers


def num_tiles(col_blocks: int) -> int:
    """Returns the number of tiles in the three levels."""
    return sum(triton.cdiv(col_blocks, zoom) for zoom in (8, 4, 2))


def pool_means(k: Tensor, v: Tensor, kv_start: Tensor | None, block_size: int) -> Tensor:
    """Computes the means of 8, 4 and 2 tokens of ``k, v [B, Hkv, M, D]``.

    They are summed in fp32 and rounded once; the module docstring gives the layout.
    """
    batch, heads, num_keys, head = k.shape
    col_blocks = triton.cdiv(num_keys, block_size)
    means = k.new_empty((batch, heads, num_tiles(col_blocks) * block_size, 2, head))
    cols = padded_head(head)
    at_once = max(8, POOL_TILE_ELEMENTS // cols)
    _pool_kernel[(triton.cdiv(triton.cdiv(col_blocks, 8) * 8 * block_size, at_once), heads, batch)](
        k, v, means, kv_start, *k.stride()[:3], *v.stride()[:3], num_keys, col_blocks,
        HEAD=head, COLS=cols, BLOCK=block_size, KEYS=at_once, num_warps=1,
    )  # fmt: skip
    return means


# --- levels and tiles, on the device ---


@triton.jit
def first_tile(level, col_blocks):
    """Returns the first tile of a level, elementwise for a tensor of levels."""
    level3 = tl.cdiv(col_blocks, 8)
    return tl.where(
        level == COARSEST_LEVEL,
        0,
        tl.where(level == COARSEST_LEVEL - 1, level3, level3 + tl.cdiv(col_blocks, 4)),
    )


@triton.jit
def level_of_tile(tile, col_blocks, POOLED: tl.constexpr):
    """Returns the level of a tile and its number within the level.

    Without pooling, tiles are column blocks of level 0.
    """
    level, first = 0, 0
    if POOLED:
        level = tl.where(
            tile < first_tile(2, col_blocks), 3, tl.where(tile < first_tile(1, col_blocks), 2, 1)
        )
        first = first_tile(level, col_blocks)
    return level, tile - first


@triton.jit
def group_size(u, level, keys):
    """Returns the number of keys in the group of a level that begins at key u.

    It is 0 or less past the end of the sequence, which has ``keys`` keys.
    """
    return tl.minimum(keys - u, tl.full([], 1, tl.int32) << level)


@triton.jit
def level_ends(keys8, keys4, keys2):
    """Returns the cumulative counts of the means of a row block, after zoom 8, 4, 2."""
    end8 = tl.cdiv(keys8, 8)
    end4 = end8 + tl.cdiv(keys4, 4)
    return end8, end4, end4 + tl.cdiv(keys2, 2)


@triton.jit
def locate_means(
    n, list_ptr, keys8, keys4, keys2, col_blocks, BLOCK: tl.constexpr, BP: tl.constexpr
):
    """Returns level and buffer rows of the n-th tile of BP means of a row block.

    The level is 0 unless all means are of one level and of full groups. Rows past the last mean
    repeat it.
    """
    end8, end4, end2 = level_ends(keys8, keys4, keys2)
    begin, end = n * BP, n * BP + BP
    level = tl.where(end <= keys8 // 8, 3, 0)
    level = tl.where((begin >= end8) & (end <= end8 + keys4 // 4), 2, level)
    level = tl.where((begin >= end4) & (end <= end4 + keys2 // 2), 1, level)
    blocks8 = tl.cdiv(keys8, BLOCK)
    blocks4 = blocks8 + tl.cdiv(keys4, BLOCK)
    # log2 of the groups of zoom 8 in a block
    BITS: tl.constexpr = (BLOCK // 8).bit_length() - 1  # pyrefly: ignore[missing-attribute]
    list_shift4, list_shift2 = (blocks8 << (BITS + 1)) - end8, (blocks4 << (BITS + 2)) - end4
    g = tl.minimum(begin + tl.arange(0, BP), tl.maximum(end2 - 1, 0))
    past8, past4 = g >= end8, g >= end4
    # Index of mean g if all blocks before it in the list had its level: the high bits are the list
    # position of its block. With the block's number in place of this position, and the start of its
    # level added, the index is a row of the buffer.
    bits = BITS + tl.where(past4, 2, tl.where(past8, 1, 0))
    block = (g + tl.where(past4, list_shift2, tl.where(past8, list_shift4, 0))) >> bits
    row_shift4, row_shift2 = (
        list_shift4 + first_tile(2, col_blocks) * BLOCK,
        list_shift2 + first_tile(1, col_blocks) * BLOCK,
    )
    row = g + tl.where(past4, row_shift2, tl.where(past8, row_shift4, 0))
    c = tl.load(list_ptr + block, mask=g < end2, other=0).to(tl.int32)
    return level, row + ((c - block) << bits)


@triton.jit
def _level_of(g, end8, end4):
    return tl.where(g < end8, 3, tl.where(g < end4, 2, 1))


@triton.jit
def add_log_sizes(s, n, keys8, keys4, keys2, scale2, BP: tl.constexpr):
    """Adds log group sizes to the scores ``s [BM, BP]`` of the n-th tile of means.

    The means may be of several levels. Scores past the last mean become -inf.
    """
    end8, end4, end2 = level_ends(keys8, keys4, keys2)
    g = n * BP + tl.arange(0, BP)
    bias = _level_of(g, end8, end4).to(tl.float32)
    # At most one group is smaller than its zoom: the last of its level.
    size8, size4, size2 = keys8 % 8, keys4 % 4, keys2 % 2
    partial = tl.where(size8 > 0, end8, tl.where(size4 > 0, end4, end2)) - 1
    size = size8 + size4 + size2
    bias = tl.where((g == partial) & (size > 0), tl.log2(tl.maximum(size, 1).to(tl.float32)), bias)
    return tl.where((g < end2)[None, :], s + (bias * (1.0 / scale2))[None, :], float("-inf"))


@triton.jit
def head_means(
    means_ptr, b, kv_head, kv_heads, col_blocks, HEAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns a pointer to the means of a key/value head."""
    rows = (first_tile(1, col_blocks) + tl.cdiv(col_blocks, 2)) * BLOCK
    return means_ptr + (b.to(tl.int64) * kv_heads + kv_head) * rows * (2 * HEAD)


@triton.jit
def load_means(means_ptr, row, V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Loads rows of the means of K (V = 0) or V (V = 1), ``[rows, COLS]``."""
    d = tl.arange(0, COLS)
    p = means_ptr + row.to(tl.int64)[:, None] * (2 * HEAD) + d[None, :] + V * HEAD
    if HEAD == COLS:
        return tl.load(p)
    return tl.load(p, mask=(d < HEAD)[None, :], other=0.0)


@triton.jit
def store_means(means_ptr, x, row, exists, V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Stores those rows of the means of K or V that exist."""
    d = tl.arange(0, COLS)
    p = means_ptr + row.to(tl.int64)[:, None] * (2 * HEAD) + d[None, :] + V * HEAD
    tl.store(p, x.to(means_ptr.dtype.element_ty), mask=exists[:, None] & (d < HEAD)[None, :])


# --- pooling kernel ---


@triton.jit(do_not_specialize=["col_blocks"])
def _pool_kernel(
    k_ptr, v_ptr, means_ptr, kv_start_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, num_keys, col_blocks,
    HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program pools KEYS keys, a multiple of 8, of K and of V."""
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first_key, _, keys, _, _ = sequence_span(kv_start_ptr, b, 0, num_keys, 0)
    u0 = tl.program_id(0) * KEYS
    k_ptr += b * stride_kb + h * stride_kh + (first_key + u0).to(tl.int64) * stride_kn
    v_ptr += b * stride_vb + h * stride_vh + (first_key + u0).to(tl.int64) * stride_vn
    means_ptr = head_means(means_ptr, b, h, tl.num_programs(1), col_blocks, HEAD, BLOCK)
    _pool(k_ptr, stride_kn, means_ptr, u0, keys, col_blocks, 0, HEAD, COLS, BLOCK, KEYS)
    _pool(v_ptr, stride_vn, means_ptr, u0, keys, col_blocks, 1, HEAD, COLS, BLOCK, KEYS)


@triton.jit
def _pool(
    x_ptr, stride, means_ptr, u0, keys, col_blocks,
    V: tl.constexpr, HEAD: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Stores means of 2, 4 and 8 keys from key u0 on, over the keys that exist."""
    i, d = tl.arange(0, KEYS), tl.arange(0, COLS)
    p = x_ptr + i.to(tl.int64)[:, None] * stride + d[None, :]
    total = tl.load(p, mask=(u0 + i < keys)[:, None] & (d < HEAD)[None, :], other=0.0).to(
        tl.float32
    )
    for level in tl.static_range(1, 4):  # type: ignore[misc]
        total = tl.sum(tl.reshape(total, [KEYS >> level, 2, COLS]), 1)
        group = (u0 >> level) + tl.arange(0, KEYS >> level)
        row = first_tile(level, col_blocks) * BLOCK + group
        exists = group < tl.cdiv(col_blocks, 1 << level) * BLOCK
        if u0 + KEYS <= keys:
            store_means(means_ptr, total * (0.5**level), row, exists, V, HEAD, COLS)
        else:
            # IEEE division, because a mean of 16-bit numbers is often half way between two of them:
            # its last bit decides.
            size = tl.maximum(group_size(group << level, level, keys), 1).to(tl.float32)
            mean = tl.div_rn(total, tl.broadcast_to(size[:, None], total.shape))
            store_means(means_ptr, mean, row, exists, V, HEAD, COLS)

"""Kernels of split-K attention of a few queries over a long cache, which may be paged.

    s_ij  = score_mod(scale * q_i k_j), -inf where i does not see j
    out_i = softmax_j(s_ij) v_j

The keys are divided into splits, which run as separate programs. There are two variants:

- `partial`: each split keeps its own row maximum m_s, with l_s = sum exp(s - m_s) and o_s = sum
  exp(s - m_s) v. A second kernel rescales and adds them:
  ``out = sum exp(m_s - m) o_s / sum exp(m_s - m) l_s``.
- `global`: a first pass over the keys alone finds the row maxima. The second pass starts from the
  largest of them, m, so that its sums add up without rescaling. Every program of the second pass
  reduces the maxima of all splits itself: they are few, and another kernel would take longer than
  reading them.

``lse = m + log l`` in both.

Decoding is memory-bound: N * group rows need 4 * N * group * D FLOPs for the 4 * D bytes of a
16-bit key and value, so tensor cores wait for memory up to a few hundred rows. All queries of a
key/value head's group are therefore packed into the rows of one tile, which reads keys and values
once: 2 * M * D * Hkv numbers in total, the minimum for exact attention. `global` reads the keys
twice (50 % more bytes) and saves exp(m_s - m) for the N * group rows of each split. The results of
the splits add D + 2 fp32 numbers per row and split.

Whole tiles are loaded through tensor descriptors if the rows of keys and values are aligned,
because few long requests come closer to the peak memory bandwidth than many short ones. The last,
partial tile of a split, and caches in any other layout, are loaded through pointers.

The keys may be in pages. Descriptors then load tiles of a page, if pages are a multiple of the
tile.

Tiles: BM rows (row r = query r % N of the group's head r // N), BN keys, BD head size. Layouts:
part_max, part_sum ``[B, Hkv, G * N, S]``, in base 2 and not normalized; part_out
``[B, Hkv, G * N, S, D]``. For a single split, part_sum and part_out are the result itself. Grid:
(split, block of rows), key/value head, sequence; then the merge kernel.
"""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import has_aligned_rows
from msattn.kernels.common.fp8 import FP8, head_stride, load_scale, queries_of_products
from msattn.kernels.common.paged_tiles import load_pages
from msattn.kernels.common.primitives import (
    LN_2,
    LOG2_E,
    capability,
    load_tile,
    num_sms,
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    precision,
    softmax_step,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.common.splits import choose_splits, merge_splits
from msattn.kernels.tuned import Tile
from msattn.kernels.types import ScoreMod


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    variant: str,
    causal: bool,
    scale: float,
    splits: int | None,
    table: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Launches the kernels.

    With a ``table``, int32 ``[B, pages]`` with contiguous rows, ``k`` and ``v`` are pages
    ``[P, Hkv, page_size, D]``, maybe in FP8 with the ``scales`` of both (:mod:`.fp8`). The grid
    depends only on shapes, so that a captured CUDA graph serves any lengths.
    """
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    rows, cols, page_size = q_heads // kv_heads * num_queries, padded_head(head), None
    tile = default_tile(rows, cols, q.element_size(), capability(q.device))
    if table is not None:
        page_size, num_keys = num_keys, num_keys * table.shape[1]
        tile = _tile_of_pages(tile, page_size, k.dtype == FP8)
    row_blocks, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(num_keys, tile.keys)
    if splits is None:
        efficiency = 1.0 if row_blocks == 1 else 0.95  # merging many rows is expensive
        splits = choose_splits(
            batch * kv_heads * row_blocks, tile.programs * num_sms(q.device), tiles, efficiency
        )
    splits = min(splits, tiles)

    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    part_max = q.new_empty((batch, kv_heads, rows, splits), dtype=torch.float32)
    if splits == 1:  # the kernel writes the result itself
        part_sum, part_out = lse, out
    else:
        part_sum, part_out = torch.empty_like(part_max), part_max.new_empty((*part_max.shape, head))
    # Descriptors cannot have strides of 0, nor tiles that cross pages.
    aligned = all(has_aligned_rows(x) and 0 not in x.stride() for x in (k, v))
    aligned &= page_size is None or page_size % tile.keys == 0
    views = [tile_view(x, tile.keys) if aligned else None for x in (k, v)]
    kernel, mod_arguments, window = None, (), num_keys + num_queries
    if score_mod is not None:
        kernel, mod_arguments = score_mod.kernel, (*score_mod.tensors, *score_mod.numbers)
        window = window if score_mod.window is None else score_mod.window
    for step in ("max", "sum") if variant == "global" else ("partial",):
        _split_dense_decode_kernel[(splits * row_blocks, kv_heads, batch)](
            q, k, v, *views, part_max, part_sum, part_out,
            kv_start, kv_len, table, *scales, mod_arguments,
            *q.stride(), *k.stride(), *v.stride(), 0 if table is None else table.stride(0),
            *map(head_stride, scales),
            q_heads // kv_heads, num_queries, num_keys, row_blocks,
            window, scale, LOG2_E if score_mod else scale * LOG2_E,
            STEP=step, SINGLE=splits == 1, MOD=kernel, CAUSAL=causal, PAGE=page_size,
            HEAD=head, BM=tile.rows, BN=tile.keys, BD=cols, PRECISION=precision(q.dtype),
            # without V, the same bytes in flight
            num_warps=tile.warps, num_stages=tile.stages * (2 if step == "max" else 1),
            **pdl_args(q.device),
        )  # fmt: skip
    if splits > 1:
        merge_splits(part_max, part_sum, part_out, out, lse, rebase=variant == "partial")
    return out, lse


def _tile_of_pages(tile: Tile, page_size: int, in_fp8: bool) -> Tile:
    """Returns a tile for pages.

    It divides pages, so that descriptors can load it, unless it would have fewer than 64 keys. Keys
    are loaded after the entry of the table that they depend on, which takes as many pipeline stages
    again. In FP8, where programs convert while others load, another program takes their memory.
    """
    if in_fp8 and page_size % tile.keys == 0:
        return tile._replace(programs=2 * tile.programs)
    divisor = math.gcd(tile.keys, page_size)
    keys = divisor if divisor >= min(64, tile.keys) else tile.keys
    return tile._replace(
        keys=keys, stages=2 * tile.stages - 1, programs=tile.programs * tile.keys // keys
    )


def default_tile(rows: int, cols: int, itemsize: int, sm: int) -> Tile:
    """Returns the tile for ``rows`` = group * N and a padded head size of ``cols``.

    Up to 128 rows, or 32 of heads of 512, share one read of keys and values. Shared memory holds
    three tiles of each. A tile has up to 32 KiB where shared memory has 227 KiB (compute
    capabilities 9.0 to 11.x), else up to 16 KiB.
    """
    if itemsize == 4:  # fp32 runs on CUDA cores
        stages = 3 if cols <= 256 else 1
        return Tile(
            rows=max(16, min(32, triton.next_power_of_2(rows))),
            keys=16,
            warps=8,
            stages=stages,
            programs=2,
        )
    rows = max(16, min(128 if cols <= 256 else 32, triton.next_power_of_2(rows)))
    large = 90 <= sm < 120 and rows < 128
    keys = max(
        16, min(128, 32768 // (cols * itemsize)) if large else min(64, 16384 // (cols * itemsize))
    )
    programs = 2 if rows < 128 and keys * cols * itemsize <= 16384 else 1
    return Tile(rows=rows, keys=keys, warps=4 if rows < 128 else 8, stages=3, programs=programs)


@triton.jit(
    do_not_specialize=["stride_tb", "group", "num_queries", "num_keys", "row_blocks", "window"]
)
def _split_dense_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, part_max_ptr, part_sum_ptr, part_out_ptr, kv_start_ptr,
    kv_len_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    mod_arguments,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_km, stride_kd,
    stride_vb, stride_vh, stride_vm, stride_vd, stride_tb, stride_k_scale, stride_v_scale,
    group, num_queries, num_keys, row_blocks, window, scale, scale2,
    STEP: tl.constexpr, SINGLE: tl.constexpr,
    MOD: tl.constexpr, CAUSAL: tl.constexpr, PAGE: tl.constexpr,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Processes one split of the keys for a block of rows.

    ``STEP`` "max" computes row maxima, "sum" sums relative to the maxima of all splits, and
    "partial" both, for the split alone. With ``SINGLE`` there is one split, and the kernel writes
    the final result.
    """
    pdl_wait(PDL)
    if STEP != "max" and not SINGLE:  # the dependent is the merge kernel
        pdl_launch_dependents(PDL)
    split, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    num_splits = tl.num_programs(0) // row_blocks
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    rows = group * num_queries
    row = row_block * BM + tl.arange(0, BM)
    packed = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    head = kv_head * group + packed // num_queries
    begin, end, first_key, offset = _split_range(
        kv_start_ptr,
        kv_len_ptr,
        batch,
        split,
        num_splits,
        num_queries,
        num_keys,
        window,
        CAUSAL,
        BN,
    )
    i = offset + packed % num_queries  # positions of the rows' queries

    # scores are products with stored keys, and acc is a sum of stored values
    k_scale = load_scale(k_scale_ptr, kv_head, stride_k_scale)
    scale *= k_scale
    if MOD is None:
        scale2 *= k_scale
    o_d = tl.arange(0, BD)
    m_d = o_d < HEAD
    q_ptrs = (
        q_ptr
        + batch.to(tl.int64) * stride_qb
        + (head.to(tl.int64) * stride_qh + packed % num_queries * stride_qn)[:, None]
    )
    b_q = tl.load(q_ptrs + o_d[None, :] * stride_qd, mask=m_d[None, :], other=0.0)  # [BM, BD]
    b_q = queries_of_products(b_q, k_ptr)
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    if PAGE is not None:
        table_ptr += batch.to(tl.int64) * stride_tb
    part = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * rows + row
    part = part * num_splits + split  # [BM]
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    if STEP == "sum":
        m = _row_max(part_max_ptr + (part - split), row < rows, num_splits, BM)
    base = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN

    by_pointer = begin  # keys from here on are loaded through pointers
    if k_desc is not None:
        by_pointer += tl.maximum(end - begin, 0) // BN * BN
        for j0 in tl.range(begin, by_pointer, BN):
            j = j0 + tl.arange(0, BN)
            block, first = _block_and_row(table_ptr, batch, j0, True, PAGE)
            s = tl.dot(
                b_q,
                tl.trans(load_tile(k_desc, block, kv_head, first, BN, BD).to(b_q.dtype)),
                input_precision=PRECISION,
            )
            s = _modify(
                s, batch, head, i, j, first_key, num_keys, scale, mod_arguments, MOD, CAUSAL
            )
            if STEP == "max":
                m = tl.maximum(m, tl.max(s, 1) * scale2)
            else:
                b_v = load_tile(v_desc, block, kv_head, first, BN, BD).to(b_q.dtype)
                m, l, acc = _add_values(s, b_v, m, l, acc, base, scale2, STEP, PRECISION)
    for j0 in tl.range(by_pointer, end, BN):
        j = j0 + tl.arange(0, BN)
        live = j < end
        m_tile = live[:, None] & m_d[None, :]
        block, row_of = _block_and_row(table_ptr, batch, j, live, PAGE)
        block, row_of = block.to(tl.int64), row_of.to(tl.int64)
        k_ptrs = (
            k_ptr + (block * stride_kb + row_of * stride_km)[:, None] + o_d[None, :] * stride_kd
        )
        b_k = tl.load(k_ptrs, mask=m_tile, other=0.0).to(b_q.dtype)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        s = _modify(s, batch, head, i, j, first_key, num_keys, scale, mod_arguments, MOD, CAUSAL)
        s = tl.where(live[None, :], s, float("-inf"))
        if STEP == "max":
            m = tl.maximum(m, tl.max(s, 1) * scale2)
        else:
            v_ptrs = (
                v_ptr + (block * stride_vb + row_of * stride_vm)[:, None] + o_d[None, :] * stride_vd
            )
            b_v = tl.load(v_ptrs, mask=m_tile, other=0.0).to(b_q.dtype)  # [BN, BD]
            m, l, acc = _add_values(s, b_v, m, l, acc, base, scale2, STEP, PRECISION)

    # dependent programs that start earlier would be distributed unevenly over the SMs
    if STEP == "max" or SINGLE:
        pdl_launch_dependents(PDL)
    if STEP == "max" or (STEP == "partial" and not SINGLE):
        tl.store(part_max_ptr + part, m, mask=row < rows)
    if STEP != "max":
        acc *= load_scale(v_scale_ptr, kv_head, stride_v_scale)
        if SINGLE:  # part_sum and part_out are lse and out
            l = tl.where(l != 0, l, 1.0)  # l and acc are 0 where no key is visible
            acc = acc / l[:, None]
            l = (m + tl.log2(l)) * LN_2
        tl.store(part_sum_ptr + part, l, mask=row < rows)
        out_ptrs = part_out_ptr + part[:, None] * HEAD + o_d[None, :]
        tl.store(
            out_ptrs,
            acc.to(part_out_ptr.dtype.element_ty),
            mask=(row < rows)[:, None] & m_d[None, :],
        )


@triton.jit
def _block_and_row(table_ptr, batch, j, live, PAGE: tl.constexpr):
    """Returns where keys j are: their page and rows of it, or sequence and position if there are no
    pages.
    """
    if PAGE is None:
        block, row = batch, j
    else:
        block, row = load_pages(table_ptr, j, live, PAGE)
    return block, row


@triton.jit
def _modify(
    s, batch, head, i, j, first_key, num_keys, scale, mod_arguments, MOD: tl.constexpr,
    CAUSAL: tl.constexpr
):  # fmt: skip
    """Modifies and masks the scores ``s [BM, BN]`` of queries i and keys j."""
    if MOD is not None:
        # valid positions, also for masked scores
        i_valid, j_valid = tl.maximum(i, 0), tl.minimum(j, num_keys - 1)
        s = MOD(s * scale, batch, head[:, None], i_valid[:, None], j_valid[None, :], *mod_arguments)
    seen = (i >= first_key)[:, None]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _add_values(s, v, m, l, acc, base, scale2, STEP: tl.constexpr, PRECISION: tl.constexpr):
    """Adds a tile to sums relative to m ("partial") or to ``base`` ("sum")."""
    if STEP == "partial":
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    else:
        p = tl.exp2(s * scale2 - base[:, None])
        l += tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return m, l, acc


@triton.jit
def _split_range(
    kv_start_ptr, kv_len_ptr, batch, split, num_splits, num_queries, num_keys, window,
    CAUSAL: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Returns begin and end of a split, the first unpadded key, query 0's position.

    Visible keys are divided into splits with equal numbers of tiles.
    """
    first_key = tl.maximum(tl.load(kv_start_ptr + batch), 0) if kv_start_ptr is not None else 0
    stop = tl.minimum(tl.load(kv_len_ptr + batch), num_keys) if kv_len_ptr is not None else num_keys
    offset = stop - num_queries
    if not CAUSAL:
        offset = tl.maximum(offset, 0)
    begin = tl.maximum(first_key, offset + 1 - window)
    share = tl.cdiv(tl.maximum(stop - begin, 0), num_splits * BN) * BN
    begin += split * share
    return begin, tl.minimum(begin + share, stop), first_key, offset


@triton.jit
def _row_max(part_ptrs, exists, num_splits, BM: tl.constexpr):
    """Returns the maximum over all splits of each row, from pointers ``parts [BM]``."""
    largest = tl.full([BM, 32], float("-inf"), tl.float32)
    for first in tl.range(0, num_splits, 32):  # type: ignore[misc]
        s = first + tl.arange(0, 32)[None, :]
        m_s = exists[:, None] & (s < num_splits)
        largest = tl.maximum(
            largest, tl.load(part_ptrs[:, None] + s, mask=m_s, other=float("-inf"))
        )
    return tl.max(largest, 1)

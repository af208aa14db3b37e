"""Matrix products of materialized probabilities or score gradients.

The backward passes of ``conv_attention`` and ``head_mix_attention`` write probabilities or score
gradients of a chunk of query rows to a scratch buffer, ``matrix [B, H, rows, M]``, which is a
factor of these products:

    matmul_accumulate             out_h += matrix_h Y_z
    matmul_accumulate_transposed  out_z += sum over heads h of group z of matrix_h^T X_h

Y are keys and ``out [B, H, N, D]`` in the first, X queries and ``out [B, Z, M, D]`` in the second.

With ``terms > 1``, term t pairs row i of the matrix with row ``i + t - (terms - 1)`` of the output
(of X, if transposed). The plain product sums over the terms; the transposed one has an output for
each. Before the start of a sequence the matrix is 0, and X and Y are finite. Each output tile is
summed by one program in a fixed order, so that results are bitwise reproducible. Grid: (tile,
output, sequence).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset
from msattn.kernels.common.primitives import (
    load_tile,
    padded_head,
    precision,
    sequence_span,
    tile_view,
    tl,
    triton,
    tuned_tile,
)

SCRATCH_ELEMENTS = 2**29  # limit for a scratch buffer, and for prepared keys: 1 GiB in 16 bits


class Rows(NamedTuple):
    """Chunk of queries ``begin <= i < end``, and the parameters of their mask.

    Query i has position ``i + offset``.
    """

    begin: int
    end: int
    offset: int
    causal: bool
    kv_start: Tensor | None


def zero_padding(
    kv_start: Tensor | None, causal: bool, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Copies queries and keys with zeros in the left padding, in the layout of ``empty_like``, as
    fake kernels state.

    Queries before the first key count as padding. Padding may hold NaN, and kernels multiply it by
    0. They do not mask factors inside the product loop, because code compiled by Triton 3.6 then
    has a race.
    """
    offset = query_offset(queries[0].shape[2], keys[0].shape[2], causal)
    if kv_start is None:
        if offset >= 0:
            return *queries, *keys
        kv_start = torch.zeros(1, dtype=torch.int32, device=queries[0].device)

    def zero_rows_before(x: Tensor, first: Tensor) -> Tensor:
        before = torch.arange(x.shape[2], device=x.device) < first[:, None]
        return x.clone().masked_fill_(before[:, None, :, None], 0)

    return *(zero_rows_before(x, kv_start - offset) for x in queries), *(
        zero_rows_before(x, kv_start) for x in keys
    )


def row_chunks(
    q: Tensor,
    k: Tensor,
    dtype: torch.dtype,
    matrices: int,
    min_rows: int,
    causal: bool,
    kv_start: Tensor | None,
) -> Iterator[tuple[Rows, Tensor]]:
    """Yields chunks of rows, each with a scratch buffer ``[matrices, B, H, rows, M]``.

    A chunk has as many rows as :data:`SCRATCH_ELEMENTS` allows, at least ``min_rows``. The buffer
    is uninitialized. Products read whole tiles, so writers must zero :func:`reach` keys past the
    causal limit; later keys are never read.
    """
    (batch, heads, num_queries, _), num_keys = q.shape, k.shape[2]
    columns = -(-num_keys // 16) * 16  # a row starts at a multiple of 16 bytes
    size = min(
        num_queries, max(min_rows, SCRATCH_ELEMENTS // (batch * heads * columns) // 128 * 128)
    )
    scratch = q.new_empty((matrices, batch, heads, size, columns), dtype=dtype)
    offset = query_offset(num_queries, num_keys, causal)
    for begin in range(0, num_queries, size):
        end = min(begin + size, num_queries)
        yield Rows(begin, end, offset, causal, kv_start), scratch[..., : end - begin, :num_keys]


def reach(x: Tensor) -> int:
    """Returns the number of keys past the causal limit that a product may read.

    It is the number of rows plus the number of keys of the tile for ``x``.
    """
    tile = tuned_tile("score_products", x)
    return tile.rows + tile.keys


def matmul_accumulate_transposed(
    matrix: Tensor, x: Tensor, out: Tensor, rows: Rows, terms: int = 1
) -> None:
    """Adds ``matrix^T x`` to fp32 ``out [B, Z * terms, M, D]``.

    The product is summed over the H / Z heads of each group; Z divides H.
    """
    batch, total, num_keys, head = out.shape
    tile = tuned_tile("score_products", x)
    _matmul_transposed_kernel[(triton.cdiv(num_keys, tile.rows), total, batch)](
        tile_view(matrix, tile.keys, tile.rows), tile_view(x, tile.keys), out, rows.kv_start,
        terms, matrix.shape[1] * terms // total, x.shape[2],
        num_keys, rows.begin, rows.end, rows.offset,
        HEAD=head, COLS=padded_head(head), BM=tile.keys, BN=tile.rows,
        CAUSAL=rows.causal, PRECISION=precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["terms", "group", "begin", "end"])
def _matmul_transposed_kernel(
    matrix_desc, x_desc, out_ptr, kv_start_ptr, terms,
    group, num_queries, num_keys, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, z, j0 = tl.program_id(2), tl.program_id(1), tl.program_id(0) * BN
    _, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    shift = z % terms - (terms - 1)
    first = tl.maximum(first_query - begin, 0)  # row of the matrix
    if CAUSAL:
        first = tl.maximum(first, j0 - offset - begin)
    first = first // BM * BM
    tiles = tl.cdiv(tl.maximum(end - begin - first, 0), BM)
    acc = tl.zeros([BN, COLS], tl.float32)
    for n in tl.range(0, group * tiles):  # type: ignore[misc]
        h, row = z // terms * group + n // tiles, first + n % tiles * BM
        matrix = tl.reshape(matrix_desc.load([b, h, row, j0]), [BM, BN])
        x = load_tile(x_desc, b, h, begin + row + shift, BM, COLS)
        acc = tl.dot(tl.trans(matrix), x, acc, input_precision=PRECISION)
    add_tile(out_ptr, acc, b * tl.num_programs(1) + z, j0, 0, num_keys, num_keys, HEAD, BN, COLS)


def matmul_accumulate(matrix: Tensor, y: Tensor, out: Tensor, rows: Rows, terms: int = 1) -> None:
    """Adds ``matrix y``, summed over terms, to fp32 ``out [B, H, N, D]``.

    ``y`` is ``[B, Z * terms, M, D]``, where Z divides H.
    """
    batch, heads, num_queries, head = out.shape
    tile, num_keys = tuned_tile("score_products", y), y.shape[2]
    first = max(rows.begin - (terms - 1), 0)
    _matmul_kernel[(triton.cdiv(rows.end - first, tile.rows), heads, batch)](
        tile_view(matrix, tile.rows, tile.keys), tile_view(y, tile.keys), out, rows.kv_start,
        terms, heads * terms // y.shape[1], num_queries,
        num_keys, first, rows.begin, rows.end, rows.offset,
        HEAD=head, COLS=padded_head(head), BM=tile.rows, BN=tile.keys,
        CAUSAL=rows.causal, PRECISION=precision(y.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["terms", "group", "first", "begin", "end"])
def _matmul_kernel(
    matrix_desc, y_desc, out_ptr, kv_start_ptr, terms,
    group, num_queries, num_keys, first, begin, end, offset,
    HEAD: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, i0 = tl.program_id(2), tl.program_id(1), first + tl.program_id(0) * BM
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    acc = tl.zeros([BM, COLS], tl.float32)
    for term in tl.range(0, terms):  # type: ignore[misc]
        row = i0 + terms - 1 - term
        last = num_keys
        if CAUSAL:
            last = tl.minimum(num_keys, tl.minimum(row + BM, end) + offset)
        for j in tl.range(first_key // BN * BN, last, BN):  # type: ignore[misc]
            matrix = tl.reshape(matrix_desc.load([b, h, row - begin, j]), [BM, BN])
            y = load_tile(y_desc, b, h // group * terms + term, j, BN, COLS)
            acc = tl.dot(matrix, y, acc, input_precision=PRECISION)
    add_tile(
        out_ptr, acc, b * tl.num_programs(1) + h, i0, first_query, end, num_queries, HEAD, BM, COLS
    )


@triton.jit
def add_tile(
    out_ptr, tile, head, row, first, end, num_rows, HEAD: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr
):  # fmt: skip
    """Adds a tile to a head of ``out [heads, num_rows, D]``, from ``row`` on.

    Only rows in ``[first, end)`` are changed.
    """
    r, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    place = out_ptr + (head.to(tl.int64) * num_rows + row) * HEAD + (r[:, None] * HEAD + d[None, :])
    inside = ((row + r >= first) & (row + r < end))[:, None] & (d < HEAD)[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + tile, mask=inside)

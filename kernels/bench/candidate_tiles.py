"""Candidate tiles of each kernel, and the choice of the fastest after a sweep.

Candidates are for 16-bit heads of 128. A tile is (rows, keys, warps, stages, programs per SM); see
:class:`msattn.kernels.tuned.Tile`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

from msattn.kernels import tuned
from msattn.kernels.bench.rows import BenchRow
from msattn.kernels.operations import OPERATIONS
from msattn.kernels.tuned import Tile

SHIPPED = "shipped"  # name of the variant that uses the tiles of the package
MIN_SPEEDUP = 1.02  # over the shipped tile; two runs of one tile differ by less


def _tiles(names: str) -> list[Tile]:
    """Returns tiles from their numbers, "rows-keys-warps-stages[-programs]", one program per SM by
    default.
    """
    return [Tile(*map(int, name.split("-"))) for name in names.split()]


# One program per block of 64 queries.
BLOCK_SPARSE = _tiles("64-64-4-2 64-64-4-3 64-64-4-4 64-64-8-3 64-32-4-3 64-32-4-5 64-32-4-6")
# Tiles of several blocks, which are loaded a stage later than those of descriptors.
GATHERED = _tiles("64-64-4-2 64-64-4-3 64-64-4-4 64-32-4-3 64-32-4-4 64-128-4-2 64-128-4-3")
# Dependent loads of list, page and keys use pipeline stages.
PAGED_BLOCK_SPARSE = _tiles(
    "64-64-4-3 64-64-4-5 64-64-4-7 64-64-8-3 64-64-8-5 64-32-4-3 64-32-4-5 64-32-4-7 64-16-4-5"
)
# Two tiles of each input and one or two accumulators are live at the same time.
BACKWARD = _tiles(
    "64-64-4-1 64-64-4-2 64-64-4-3 64-64-8-2 64-64-8-3 64-32-4-2 64-32-4-3 32-64-4-2 32-64-4-3"
)
DENSE = _tiles(
    "128-128-8-2 128-128-8-3 128-64-8-2 128-64-8-3 128-64-8-4 128-64-4-2 128-64-4-3 64-64-4-2 "
    "64-64-4-3 64-128-4-3"
)
DECODE = _tiles(
    "16-128-4-3 16-64-4-3-2 16-64-4-5 16-64-4-5-2 16-64-4-5-3 16-64-4-7-2"
    " 16-32-4-5-2 16-32-4-7-4 16-32-2-7-4 16-64-8-5-2 16-128-4-3-2 16-128-8-5"
)
# keyed by the name that `tuned` uses for the kernel, or by operation if the tile depends on the
# shape
CANDIDATES = {
    "maxpool_attention": _tiles(
        "128-128-8-3 128-128-8-2 128-64-8-3 128-64-8-4 128-64-8-5 128-64-4-2-2 64-128-4-2 "
        "64-64-4-3-2 64-64-4-2-2"
    ),
    "block_sparse_attention": BLOCK_SPARSE,
    "block_sparse_attention_gathered": GATHERED,
    "paged_block_sparse_attention": PAGED_BLOCK_SPARSE,
    "block_sparse_attention_dq": BACKWARD,
    "block_sparse_attention_dkv": BACKWARD,
    "multiscale_attention": BLOCK_SPARSE,
    "multiscale_attention_dq": BACKWARD,
    "multiscale_attention_dkv": BACKWARD,
    "conv_attention": DENSE,
    "conv_attention_scores": DENSE,
    "conv_attention_resident": DENSE,
    "conv_attention_scores_resident": DENSE,
    "score_products": DENSE,
    "head_mix_scores": DENSE,
    "materialized_attention": DENSE,
    "materialized_attention_backward": BACKWARD,
    "bucket_decode": DECODE,
    "paged_bucket_decode": DECODE,
    "flash_decode": DECODE,
    # 64-64-4-4-3 has enough registers to overlap a product with the exponentials of the previous
    # tile.
    "bucket_mass": _tiles(
        "128-64-8-4-2 128-64-8-6-2 128-128-8-3 256-64-16-4 64-64-4-2-4 64-64-4-4-3 64-128-4-2-3 "
        "64-128-4-3-2"
    ),
    "nearest_centroid": _tiles(
        "128-128-8-3 128-64-8-2 128-64-8-3 128-64-4-2 64-128-4-2 64-64-4-2 256-64-8-2"
    ),
    "bucket_sums": _tiles(
        "128-64-8-3 128-64-8-4-2 128-32-8-3-2 128-128-8-3 64-64-4-3-3 64-64-4-4-4 64-128-4-3-2"
    ),
}
FORWARD_KERNELS = {name: [name] for name in OPERATIONS if name in CANDIDATES} | {
    "block_sparse_attention": ["block_sparse_attention", "block_sparse_attention_gathered"],
    "conv_attention": ["conv_attention", "conv_attention_resident"],
    "head_mix_attention": ["head_mix_scores", "materialized_attention"],
    "paged_flash_decode": ["flash_decode"],
}
BACKWARD_KERNELS = {
    "block_sparse_attention": ["block_sparse_attention_dq", "block_sparse_attention_dkv"],
    "multiscale_attention": ["multiscale_attention_dq", "multiscale_attention_dkv"],
    "conv_attention": ["conv_attention_scores", "conv_attention_scores_resident", "score_products"],
    "head_mix_attention": ["head_mix_scores", "materialized_attention_backward", "score_products"],
}
SHAPE_DEPENDENT = {  # modules whose ``default_tile`` depends on the shape
    "bucket_decode": "msattn.kernels.bucket_decode",
    "bucket_mass": "msattn.kernels.bucket_mass.forward",
    "flash_decode": "msattn.kernels.common.dense_decode",
    "paged_bucket_decode": "msattn.kernels.paged.bucket_decode",
}


def list_candidates(operation: str, backward: bool) -> list[tuple[str, Tile]]:
    """Returns (kernel, tile) for every candidate of an operation's pass."""
    kernels = (BACKWARD_KERNELS if backward else FORWARD_KERNELS).get(operation, [])
    return [(kernel, tile) for kernel in kernels for tile in CANDIDATES[kernel]]


def variant_name(kernel: str, tile: Tile) -> str:
    """Returns the name of a kernel's tile in the rows of a sweep."""
    return f"{kernel} {'-'.join(map(str, tile))}"


def faster_tiles(
    operation: str, backward: bool, rows: Sequence[BenchRow]
) -> dict[str, tuple[Tile, float]]:
    """Returns the tiles that are faster than the shipped ones by ``MIN_SPEEDUP``.

    The result is ``{kernel: (tile, speedup)}``, at most one tile per kernel. The speedup is the
    geometric mean over all problems; a tile that failed on one of them is not considered.
    """
    timed: dict[str, dict[tuple[int, int, str], float]] = {}
    for row in rows:
        if row.ms is not None:
            timed.setdefault(row.variant, {})[row.length, row.queries, row.setting] = row.ms
    shipped = timed.get(SHIPPED, {})
    faster: dict[str, tuple[Tile, float]] = {}
    for kernel, tile in list_candidates(operation, backward):
        candidate = timed.get(variant_name(kernel, tile), {})
        if not shipped or candidate.keys() != shipped.keys():
            continue
        speedup = geometric_mean(shipped[problem] / ms for problem, ms in candidate.items())
        if speedup > max(MIN_SPEEDUP, faster[kernel][1] if kernel in faster else 0.0):
            faster[kernel] = tile, speedup
    return faster


def override_tile(kernel: str, tile: Tile) -> AbstractContextManager[Any]:
    """Temporarily overrides the tile of ``kernel``, for all inputs."""
    if kernel not in tuned.FULL_PRECISION:
        return patch.object(
            import_module(SHAPE_DEPENDENT[kernel]), "default_tile", lambda *sizes: tile
        )
    pick = tuned.pick
    return patch.object(
        tuned, "pick", lambda name, *others: tile if name == kernel else pick(name, *others)
    )

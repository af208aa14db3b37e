"""Tiles to try in place of the shipped ones, for 16-bit heads of 128: rows, keys, warps, stages, resident programs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from statistics import geometric_mean
from typing import Any

from msattn.kernels import tuned
from msattn.kernels.bench.rows import BenchRow
from msattn.kernels.tuned import Tile

SHIPPED = "shipped"  # the variant that is timed with the package's own tiles
CLEARLY = 1.02  # times faster than shipped tiles, to be kept: two runs differ by less

BLOCK_ROWS = [  # a program owns a block of 64 queries
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 4),
    Tile(64, 64, 8, 3),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 4, 5),
    Tile(64, 32, 4, 6),
]
GRADIENT = [  # two tiles of each input, and accumulators of one or two
    Tile(64, 64, 4, 1),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 8, 2),
    Tile(64, 64, 8, 3),
    Tile(64, 32, 4, 2),
    Tile(64, 32, 4, 3),
    Tile(32, 64, 4, 2),
    Tile(32, 64, 4, 3),
]
LONG_ROWS = [
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(128, 64, 4, 2),
    Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 3),
]
MEMORY_BOUND = [
    Tile(16, 128, 4, 3, 1),
    Tile(16, 64, 4, 3, 2),
    Tile(16, 64, 4, 5, 1),
    Tile(16, 64, 4, 5, 2),
    Tile(16, 64, 4, 5, 3),
    Tile(16, 64, 4, 7, 2),
    Tile(16, 32, 4, 5, 2),
    Tile(16, 32, 4, 7, 4),
    Tile(16, 32, 2, 7, 4),
    Tile(16, 64, 8, 5, 2),
    Tile(16, 128, 4, 3, 2),
    Tile(16, 128, 8, 5, 1),
]
TILES = {  # by kernel, as `tuned` calls it, or by operation where that chooses for itself
    "maxpool_attention": [
        Tile(128, 128, 8, 3),
        Tile(128, 128, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 8, 4),
        Tile(128, 64, 8, 5),
        Tile(128, 64, 4, 2, 2),
        Tile(64, 128, 4, 2, 1),
        Tile(64, 64, 4, 3, 2),
        Tile(64, 64, 4, 2, 2),
    ],
    "block_sparse_attention": BLOCK_ROWS,
    "block_sparse_attention_dq": GRADIENT,
    "block_sparse_attention_dkv": GRADIENT,
    "multiscale_attention": BLOCK_ROWS,
    "multiscale_attention_dq": GRADIENT,
    "multiscale_attention_dkv": GRADIENT,
    "conv_attention": LONG_ROWS,
    "conv_attention_scores": LONG_ROWS,
    "conv_attention_resident": LONG_ROWS,
    "conv_attention_scores_resident": LONG_ROWS,
    "score_products": LONG_ROWS,
    "head_mix_scores": LONG_ROWS,
    "materialized_attention": LONG_ROWS,
    "materialized_attention_backward": GRADIENT,
    "bucket_decode": MEMORY_BOUND,
    "flash_decode": MEMORY_BOUND,
    "bucket_mass": [
        Tile(128, 64, 8, 4, 2),
        Tile(128, 64, 8, 6, 2),
        Tile(128, 128, 8, 3, 1),
        Tile(256, 64, 16, 4, 1),
        Tile(64, 64, 4, 2, 4),
        Tile(64, 64, 4, 4, 3),  # registers for a product beside the exponentials of the tile before
        Tile(64, 128, 4, 2, 3),
        Tile(64, 128, 4, 3, 2),
    ],
    "nearest_centroid": [
        Tile(128, 128, 8, 3),
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 2),
        Tile(64, 128, 4, 2),
        Tile(64, 64, 4, 2),
        Tile(256, 64, 8, 2),
    ],
    "bucket_sums": [
        Tile(128, 64, 8, 3, 1),
        Tile(128, 64, 8, 4, 2),
        Tile(128, 32, 8, 3, 2),
        Tile(128, 128, 8, 3, 1),
        Tile(64, 64, 4, 3, 3),
        Tile(64, 64, 4, 4, 4),
        Tile(64, 128, 4, 3, 2),
    ],
}
FORWARD = {
    "maxpool_attention": ["maxpool_attention"],
    "block_sparse_attention": ["block_sparse_attention"],
    "multiscale_attention": ["multiscale_attention"],
    "conv_attention": ["conv_attention", "conv_attention_resident"],
    "head_mix_attention": ["head_mix_scores", "materialized_attention"],
    "bucket_decode": ["bucket_decode"],
    "flash_decode": ["flash_decode"],
    "bucket_mass": ["bucket_mass"],
    "nearest_centroid": ["nearest_centroid", "bucket_sums"],
}
BACKWARD = {
    "block_sparse_attention": ["block_sparse_attention_dq", "block_sparse_attention_dkv"],
    "multiscale_attention": ["multiscale_attention_dq", "multiscale_attention_dkv"],
    "conv_attention": ["conv_attention_scores", "conv_attention_scores_resident", "score_products"],
    "head_mix_attention": ["head_mix_scores", "materialized_attention_backward", "score_products"],
}
CHOOSES_BY_SHAPE = {  # modules whose ``default_tile`` follows the shape
    "bucket_decode": "msattn.kernels.bucket_decode",
    "bucket_mass": "msattn.kernels.bucket_mass.forward",
    "flash_decode": "msattn.kernels.flash_decode.forward",
}


def to_try(operation: str, backward: bool) -> list[tuple[str, Tile]]:
    """Each kernel of an operation's pass with each of its tiles; empty where there is nothing to choose."""
    kernels = (BACKWARD if backward else FORWARD).get(operation, [])
    return [(kernel, tile) for kernel in kernels for tile in TILES[kernel]]


def variant(kernel: str, tile: Tile) -> str:
    """What a row of a sweep calls a kernel's tile."""
    return f"{kernel} {'-'.join(map(str, tile))}"


def fastest(operation: str, backward: bool, rows: Sequence[BenchRow]) -> dict[str, tuple[Tile, float]]:
    """Of each kernel the tile that a sweep found clearly faster than the shipped one on the whole.

    Returns
    -------
    dict
        ``{kernel: (tile, how many times faster)}``: the geometric mean over the problems, all of which the tile must have run.
    """
    timed: dict[str, dict[tuple[int, int, str], float]] = {}
    for row in rows:
        if row.ms is not None:
            timed.setdefault(row.variant, {})[row.length, row.queries, row.setting] = row.ms
    shipped = timed.get(SHIPPED, {})
    found: dict[str, tuple[Tile, float]] = {}
    for kernel, tile in to_try(operation, backward):
        own = timed.get(variant(kernel, tile), {})
        if not shipped or own.keys() != shipped.keys():
            continue
        gain = geometric_mean(shipped[problem] / ms for problem, ms in own.items())
        if gain > max(CLEARLY, found[kernel][1] if kernel in found else 0.0):
            found[kernel] = tile, gain
    return found


@contextmanager
def shipped_alone() -> Iterator[None]:
    """Meanwhile no kernel runs with a tile of the user's own."""
    own = tuned.own_tiles
    tuned.own_tiles = dict
    try:
        yield
    finally:
        tuned.own_tiles = own


@contextmanager
def launched_with(kernel: str, tile: Tile) -> Iterator[None]:
    """Meanwhile ``kernel`` runs with ``tile``, whatever its inputs."""
    shared = kernel in tuned.FULL_PRECISION
    place, name = (tuned, "pick") if shared else (import_module(CHOOSES_BY_SHAPE[kernel]), "default_tile")
    shipped = getattr(place, name)

    def choose(*inputs: Any) -> Tile:
        return shipped(*inputs) if shared and inputs[0] != kernel else tile

    setattr(place, name, choose)
    try:
        yield
    finally:
        setattr(place, name, shipped)

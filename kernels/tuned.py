"""Tile choices, the user's own before those that ship with the package; and from which length on sparse prefill pays.

Nothing is tuned when a kernel is called. ``msattn bench bench.tune=true`` writes the tiles that were faster on a GPU to the
user's file for it, which is read once a process.
"""

import json
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

FORMAT = 2  # of the user's file; raised when a kernel takes its tile otherwise, so that old choices are left aside


class Tile(NamedTuple):
    """How a kernel is cut: query rows and keys of a tile, warps, pipeline stages, and programs resident on a multiprocessor."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1


# (operation, bytes of a padded head, compute capability) -> tile. Full-precision fp32 has tiles of its own: it runs on
# CUDA cores, and compiles for long.
TILES: dict[tuple[str, int, int], Tile] = {
    ("maxpool_attention", 128, 90): Tile(128, 128, 8, 3),
    ("maxpool_attention", 256, 90): Tile(128, 128, 8, 3),
    ("maxpool_attention", 512, 90): Tile(128, 64, 8, 2),
    ("maxpool_attention", 128, 80): Tile(128, 64, 8, 3),
    ("maxpool_attention", 256, 80): Tile(128, 64, 8, 2),
    ("maxpool_attention", 512, 80): Tile(128, 32, 8, 1),
    ("block_sparse_attention", 128, 90): Tile(64, 64, 4, 2),
    ("block_sparse_attention", 256, 90): Tile(64, 64, 4, 3),
    ("block_sparse_attention", 512, 90): Tile(64, 64, 4, 2),
    ("block_sparse_attention", 128, 80): Tile(64, 64, 4, 3),
    ("block_sparse_attention", 256, 80): Tile(64, 64, 4, 2),
    ("block_sparse_attention", 512, 80): Tile(64, 32, 4, 1),
    ("block_sparse_attention_dq", 128, 90): Tile(64, 64, 4, 3),
    ("block_sparse_attention_dq", 256, 90): Tile(64, 64, 4, 3),
    ("block_sparse_attention_dq", 512, 90): Tile(64, 32, 4, 2),
    ("block_sparse_attention_dq", 128, 80): Tile(64, 32, 4, 2),
    ("block_sparse_attention_dq", 256, 80): Tile(64, 64, 8, 2),
    ("block_sparse_attention_dq", 512, 80): Tile(32, 32, 8, 2),
    ("block_sparse_attention_dkv", 128, 90): Tile(64, 64, 4, 3),
    ("block_sparse_attention_dkv", 256, 90): Tile(64, 64, 4, 2),
    ("block_sparse_attention_dkv", 512, 90): Tile(32, 64, 8, 2),
    ("block_sparse_attention_dkv", 128, 80): Tile(32, 64, 4, 2),
    ("block_sparse_attention_dkv", 256, 80): Tile(32, 64, 8, 2),
    ("block_sparse_attention_dkv", 512, 80): Tile(32, 32, 8, 1),
    ("multiscale_attention", 128, 90): Tile(64, 64, 4, 3),
    ("multiscale_attention", 256, 90): Tile(64, 64, 4, 3),
    ("multiscale_attention", 512, 90): Tile(64, 64, 4, 2),
    ("multiscale_attention", 128, 80): Tile(64, 64, 4, 3),
    ("multiscale_attention", 256, 80): Tile(64, 64, 4, 2),
    ("multiscale_attention", 512, 80): Tile(64, 32, 4, 1),
    ("multiscale_attention_dq", 128, 90): Tile(64, 64, 4, 3),
    ("multiscale_attention_dq", 256, 90): Tile(64, 64, 4, 3),
    ("multiscale_attention_dq", 512, 90): Tile(64, 32, 4, 2),
    ("multiscale_attention_dq", 128, 80): Tile(64, 64, 4, 2),
    ("multiscale_attention_dq", 256, 80): Tile(64, 64, 8, 2),
    ("multiscale_attention_dq", 512, 80): Tile(64, 32, 8, 1),
    ("multiscale_attention_dkv", 128, 90): Tile(64, 64, 4, 3),
    ("multiscale_attention_dkv", 256, 90): Tile(64, 64, 4, 2),
    ("multiscale_attention_dkv", 512, 90): Tile(32, 64, 8, 2),
    ("multiscale_attention_dkv", 128, 80): Tile(64, 64, 4, 2),
    ("multiscale_attention_dkv", 256, 80): Tile(64, 64, 8, 2),
    ("multiscale_attention_dkv", 512, 80): Tile(32, 64, 8, 1),
    ("conv_attention", 128, 90): Tile(64, 128, 4, 3),
    ("conv_attention", 256, 90): Tile(128, 128, 8, 3),
    ("conv_attention", 512, 90): Tile(64, 64, 8, 2),
    ("conv_attention", 128, 80): Tile(128, 64, 4, 3),
    ("conv_attention", 256, 80): Tile(128, 64, 8, 2),
    ("conv_attention", 512, 80): Tile(64, 32, 8, 2),
    ("conv_attention_scores", 128, 90): Tile(128, 128, 8, 3),
    ("conv_attention_scores", 256, 90): Tile(128, 128, 8, 2),
    ("conv_attention_scores", 512, 90): Tile(64, 64, 8, 2),
    ("conv_attention_scores", 128, 80): Tile(128, 64, 4, 3),
    ("conv_attention_scores", 256, 80): Tile(128, 64, 8, 2),
    ("conv_attention_scores", 512, 80): Tile(64, 32, 4, 2),
    ("conv_attention_resident", 128, 90): Tile(64, 64, 4, 2),
    ("conv_attention_resident", 256, 90): Tile(64, 64, 4, 2),
    ("conv_attention_resident", 128, 80): Tile(64, 64, 4, 2),
    ("conv_attention_resident", 256, 80): Tile(64, 64, 4, 2),
    ("conv_attention_scores_resident", 128, 90): Tile(64, 64, 4, 2),
    ("conv_attention_scores_resident", 256, 90): Tile(64, 64, 4, 2),
    ("conv_attention_scores_resident", 128, 80): Tile(64, 64, 4, 2),
    ("conv_attention_scores_resident", 256, 80): Tile(64, 64, 8, 2),
    ("score_products", 128, 90): Tile(128, 64, 4, 4),
    ("score_products", 256, 90): Tile(128, 64, 8, 4),
    ("score_products", 512, 90): Tile(64, 64, 8, 3),
    ("score_products", 128, 80): Tile(128, 64, 4, 3),
    ("score_products", 256, 80): Tile(128, 64, 8, 3),
    ("score_products", 512, 80): Tile(64, 64, 8, 2),
    ("head_mix_scores", 128, 90): Tile(128, 128, 8, 3),
    ("head_mix_scores", 256, 90): Tile(64, 128, 4, 3),
    ("head_mix_scores", 512, 90): Tile(128, 64, 8, 2),
    ("head_mix_scores", 128, 80): Tile(128, 64, 4, 3),
    ("head_mix_scores", 256, 80): Tile(128, 64, 8, 2),
    ("head_mix_scores", 512, 80): Tile(64, 64, 8, 2),
    ("materialized_attention", 128, 90): Tile(64, 128, 4, 3),
    ("materialized_attention", 256, 90): Tile(64, 64, 4, 4),
    ("materialized_attention", 512, 90): Tile(64, 64, 8, 3),
    ("materialized_attention", 128, 80): Tile(128, 64, 4, 3),
    ("materialized_attention", 256, 80): Tile(128, 64, 8, 3),
    ("materialized_attention", 512, 80): Tile(64, 64, 8, 2),
    ("materialized_attention_backward", 128, 90): Tile(64, 128, 8, 3),
    ("materialized_attention_backward", 256, 90): Tile(64, 64, 4, 3),
    ("materialized_attention_backward", 512, 90): Tile(64, 64, 8, 2),
    ("materialized_attention_backward", 128, 80): Tile(64, 64, 4, 2),
    ("materialized_attention_backward", 256, 80): Tile(64, 64, 8, 2),
    ("materialized_attention_backward", 512, 80): Tile(32, 64, 8, 1),
    ("nearest_centroid", 128, 90): Tile(128, 128, 8, 3),  # rows: keys, keys: centroids
    ("nearest_centroid", 256, 90): Tile(128, 128, 8, 2),
    ("nearest_centroid", 512, 90): Tile(128, 64, 8, 2),
    ("nearest_centroid", 128, 80): Tile(128, 128, 8, 2),
    ("nearest_centroid", 256, 80): Tile(128, 64, 8, 2),
    ("nearest_centroid", 512, 80): Tile(64, 32, 4, 2),
    ("bucket_sums", 128, 90): Tile(128, 32, 8, 4, 2),  # rows: buckets, keys: keys
    ("bucket_sums", 256, 90): Tile(128, 32, 8, 4, 2),
    ("bucket_sums", 512, 90): Tile(128, 32, 8, 4),
    ("bucket_sums", 128, 80): Tile(128, 32, 8, 3, 2),
    ("bucket_sums", 256, 80): Tile(128, 32, 8, 3, 2),
    ("bucket_sums", 512, 80): Tile(64, 32, 8, 3),
}
FULL_PRECISION = {
    "maxpool_attention": Tile(128, 16, 8, 1),
    "block_sparse_attention": Tile(64, 16, 8, 1),
    "block_sparse_attention_dq": Tile(16, 16, 8, 1),
    "block_sparse_attention_dkv": Tile(16, 32, 8, 1),
    "multiscale_attention": Tile(64, 16, 8, 1),
    "multiscale_attention_dq": Tile(32, 16, 8, 1),
    "multiscale_attention_dkv": Tile(16, 32, 8, 1),
    "conv_attention": Tile(64, 16, 8, 1),
    "conv_attention_scores": Tile(64, 16, 8, 1),
    "conv_attention_resident": Tile(64, 16, 8, 1),
    "conv_attention_scores_resident": Tile(64, 16, 8, 1),
    "score_products": Tile(64, 16, 8, 1),
    "head_mix_scores": Tile(64, 16, 8, 1),
    "materialized_attention": Tile(64, 16, 8, 1),
    "materialized_attention_backward": Tile(16, 32, 8, 1),
    "nearest_centroid": Tile(64, 32, 8, 2),
    "bucket_sums": Tile(64, 32, 8, 2, 2),
}


def pick(operation: str, padded_head: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile for heads of the given padded size; a GPU without rows of its own takes those of the next older one."""
    if dtype == torch.float32:
        return FULL_PRECISION[operation]
    size = head_bytes(padded_head, dtype)
    own = own_tiles().get((operation, size))
    known = [sm for name, width, sm in TILES if name == operation and width == size and sm <= capability]
    return own or TILES[operation, size, max(known, default=80)]


def head_bytes(padded_head: int, dtype: torch.dtype) -> int:
    """Size of a head, by which tiles are chosen."""
    return max(128, padded_head * dtype.itemsize)


def own_path(gpu: str) -> Path:
    """The user's file of tiles for a GPU, below ``$MSATTN_CACHE`` (default: ``msattn`` in the user's folder of caches)."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("MSATTN_CACHE") or Path(caches, "msattn"))
    return folder / "tiles" / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def own_key(gpu: str) -> dict[str, str | int]:
    """What a file of tiles must have been made with to be read."""
    from triton import __version__  # not its package's, which has other names too

    return {"format": FORMAT, "gpu": gpu, "triton": __version__}


def read_own(gpu: str) -> dict[tuple[str, int], Tile]:
    """``{(kernel, bytes of a padded head): tile}`` from the user's file for a GPU.

    Nothing where there is no file; a warning, and nothing, where it was made with something else or is damaged.
    """
    path = own_path(gpu)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        stale = [f"{key}={found.get(key)}, here {value}" for key, value in own_key(gpu).items() if found.get(key) != value]
        if stale:
            raise ValueError(f"made with {stale[0]}")
        rows = found["tiles"]
        return {(row["kernel"], row["head_bytes"]): Tile(*(int(row[field]) for field in Tile._fields)) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} is not read, shipped tiles serve: {error or type(error).__name__}", stacklevel=2)
        return {}


def own_tiles() -> dict[tuple[str, int], Tile]:
    """The user's tiles for the current GPU, read once."""
    return _own_tiles_of(torch.cuda.current_device()) if torch.cuda.is_available() else {}


@cache
def _own_tiles_of(device: int) -> dict[tuple[str, int], Tile]:
    return read_own(torch.cuda.get_device_name(device))

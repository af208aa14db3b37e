"""Tile of each kernel: from the user's tile file, or the shipped one.

Kernels are not tuned at run time. ``msattn bench bench.tune=true`` writes the tiles that are faster
than the shipped ones to the user's file for the GPU. The file is read once per process.
"""

import json
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# version of the user's file; raised when a kernel interprets its tile differently, so that old
# files are ignored
FORMAT = 3


class Tile(NamedTuple):
    """Query rows and keys of a tile, warps, pipeline stages, and programs per SM."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1


# Tiles of heads of 128, 256 and 512 bytes, by kernel and compute capability.
_SHIPPED = {
    ("maxpool_attention", 90): [Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(128, 64, 8, 2)],
    ("maxpool_attention", 80): [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 32, 8, 1)],
    ("block_sparse_attention", 90): [Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)],
    ("block_sparse_attention", 80): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)],
    ("block_sparse_attention_gathered", 90): [
        Tile(64, 128, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2),
    ],
    ("block_sparse_attention_gathered", 80): [
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 1),
    ],
    ("paged_block_sparse_attention", 90): [
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2),
    ],
    ("paged_block_sparse_attention", 80): [
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, 3),
    ],
    ("block_sparse_attention_dq", 90): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)],
    ("block_sparse_attention_dq", 80): [Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)],
    ("block_sparse_attention_dkv", 90): [
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2),
        Tile(32, 64, 8, 2),
    ],
    ("block_sparse_attention_dkv", 80): [
        Tile(32, 64, 4, 2),
        Tile(32, 64, 8, 2),
        Tile(32, 32, 8, 1),
    ],
    ("multiscale_attention", 90): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)],
    ("multiscale_attention", 80): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)],
    ("multiscale_attention_dq", 90): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)],
    ("multiscale_attention_dq", 80): [Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)],
    ("multiscale_attention_dkv", 90): [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 8, 2)],
    ("multiscale_attention_dkv", 80): [Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 1)],
    ("conv_attention", 90): [Tile(64, 128, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 8, 2)],
    ("conv_attention", 80): [Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)],
    ("conv_attention_scores", 90): [Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 8, 2)],
    ("conv_attention_scores", 80): [Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)],
    ("conv_attention_resident", 90): [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)],
    ("conv_attention_resident", 80): [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)],
    ("conv_attention_scores_resident", 90): [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)],
    ("conv_attention_scores_resident", 80): [Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)],
    ("score_products", 90): [Tile(128, 64, 4, 4), Tile(128, 64, 8, 4), Tile(64, 64, 8, 3)],
    ("score_products", 80): [Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)],
    ("head_mix_scores", 90): [Tile(128, 128, 8, 3), Tile(64, 128, 4, 3), Tile(128, 64, 8, 2)],
    ("head_mix_scores", 80): [Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)],
    ("materialized_attention", 90): [Tile(64, 128, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 8, 3)],
    ("materialized_attention", 80): [Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)],
    ("materialized_attention_backward", 90): [
        Tile(64, 128, 8, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 64, 8, 2),
    ],
    ("materialized_attention_backward", 80): [
        Tile(64, 64, 4, 2),
        Tile(64, 64, 8, 2),
        Tile(32, 64, 8, 1),
    ],
    # rows: keys, keys: centroids
    ("nearest_centroid", 90): [Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 8, 2)],
    ("nearest_centroid", 80): [Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)],
    # rows: buckets, keys: keys
    ("bucket_sums", 90): [Tile(128, 32, 8, 4, 2), Tile(128, 32, 8, 4, 2), Tile(128, 32, 8, 4)],
    ("bucket_sums", 80): [Tile(128, 32, 8, 3, 2), Tile(128, 32, 8, 3, 2), Tile(64, 32, 8, 3)],
}
# (kernel, bytes of a padded head, compute capability) -> tile
TILES = {
    (kernel, size, sm): tile
    for (kernel, sm), tiles in _SHIPPED.items()
    for size, tile in zip((128, 256, 512), tiles, strict=False)
}
# fp32 has separate tiles, since it runs on CUDA cores and takes long to compile.
FULL_PRECISION = dict.fromkeys((kernel for kernel, _ in _SHIPPED), Tile(64, 16, 8, 1)) | {
    "maxpool_attention": Tile(128, 16, 8, 1),
    "block_sparse_attention_dq": Tile(16, 16, 8, 1),
    "block_sparse_attention_dkv": Tile(16, 32, 8, 1),
    "multiscale_attention_dq": Tile(32, 16, 8, 1),
    "multiscale_attention_dkv": Tile(16, 32, 8, 1),
    "materialized_attention_backward": Tile(16, 32, 8, 1),
    "nearest_centroid": Tile(64, 32, 8, 2),
    "bucket_sums": Tile(64, 32, 8, 2, 2),
}


def pick(kernel: str, padded_head: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of a kernel for heads of the given padded size.

    A GPU without entries in ``TILES`` uses those of the next older compute capability. Heads of 512
    have the tile of heads of 256 with half the rows and keys, which has as many bytes.
    """
    if padded_head > 256 and (kernel, head_bytes(padded_head, dtype)) not in user_tiles():
        tile = pick(kernel, 256, dtype, capability)
        return tile._replace(rows=max(16, tile.rows // 2), keys=max(16, tile.keys // 2))
    if dtype == torch.float32:
        return FULL_PRECISION[kernel]
    size = head_bytes(padded_head, dtype)
    tuned_by_user = user_tiles().get((kernel, size))
    known = [
        sm for name, width, sm in TILES if name == kernel and width == size and sm <= capability
    ]
    return tuned_by_user or TILES[kernel, size, max(known, default=80)]


def head_bytes(padded_head: int, dtype: torch.dtype) -> int:
    """Returns the size of a head in bytes, the key by which tiles are chosen."""
    return max(128, padded_head * dtype.itemsize)


def user_tiles_path(gpu: str) -> Path:
    """Returns the user's tile file for a GPU.

    It lies in the folder ``tiles`` of ``$MSATTN_CACHE``, by default ``$XDG_CACHE_HOME/msattn`` or
    ``~/.cache/msattn``.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("MSATTN_CACHE") or Path(caches, "msattn"))
    return folder / "tiles" / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def user_tiles_header(gpu: str) -> dict[str, str | int]:
    """Returns the header that the tile file must match to be read."""
    # importlib.metadata would need the distribution's name, of which there are several
    from triton import __version__

    return {"format": FORMAT, "gpu": gpu, "triton": __version__}


def read_user_tiles(gpu: str) -> dict[tuple[str, int], Tile]:
    """Reads ``{(kernel, head bytes): tile}`` from the user's file for a GPU.

    Returns an empty dict if there is no file. If the file is damaged or its header differs, it also
    warns.
    """
    path = user_tiles_path(gpu)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        for key, value in user_tiles_header(gpu).items():
            if document.get(key) != value:
                raise ValueError(
                    f"it was written for {key}={document.get(key)}, this is {key}={value}"
                )
        rows = document["tiles"]
        return {
            (row["kernel"], row["head_bytes"]): Tile(*(int(row[field]) for field in Tile._fields))
            for row in rows
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is ignored and the shipped tiles are used: {error or type(error).__name__}",
            stacklevel=2,
        )
        return {}


def user_tiles() -> dict[tuple[str, int], Tile]:
    """Returns the user's tiles for the current GPU, read once per process."""
    return _user_tiles_of(torch.cuda.current_device()) if torch.cuda.is_available() else {}


@cache
def _user_tiles_of(device: int) -> dict[tuple[str, int], Tile]:
    return read_user_tiles(torch.cuda.get_device_name(device))

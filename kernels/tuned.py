"""Tile choices that ship with the package: measured where a row says so, safe elsewhere."""

from typing import NamedTuple

import torch


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
    ("block_sparse_attention", 128, 90): Tile(64, 64, 4, 3),
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
    ("multiscale_attention_dq", 256, 90): Tile(64, 64, 4, 2),
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
    ("summed_attention", 128, 90): Tile(128, 128, 8, 3),
    ("summed_attention", 256, 90): Tile(128, 128, 8, 2),
    ("summed_attention", 512, 90): Tile(64, 64, 8, 2),
    ("summed_attention", 128, 80): Tile(128, 64, 4, 3),
    ("summed_attention", 256, 80): Tile(128, 64, 8, 2),
    ("summed_attention", 512, 80): Tile(64, 32, 8, 2),
    ("summed_attention_scores", 128, 90): Tile(128, 128, 8, 3),
    ("summed_attention_scores", 256, 90): Tile(128, 128, 8, 2),
    ("summed_attention_scores", 512, 90): Tile(128, 64, 8, 2),
    ("summed_attention_scores", 128, 80): Tile(128, 64, 4, 3),
    ("summed_attention_scores", 256, 80): Tile(128, 64, 8, 2),
    ("summed_attention_scores", 512, 80): Tile(64, 32, 4, 2),
    ("score_products", 128, 90): Tile(128, 64, 4, 4),
    ("score_products", 256, 90): Tile(128, 64, 8, 4),
    ("score_products", 512, 90): Tile(64, 64, 8, 3),
    ("score_products", 128, 80): Tile(128, 64, 4, 3),
    ("score_products", 256, 80): Tile(128, 64, 8, 3),
    ("score_products", 512, 80): Tile(64, 64, 8, 2),
    ("head_mix_scores", 128, 90): Tile(128, 128, 8, 3),
    ("head_mix_scores", 256, 90): Tile(128, 128, 8, 2),
    ("head_mix_scores", 512, 90): Tile(128, 64, 8, 2),
    ("head_mix_scores", 128, 80): Tile(128, 64, 4, 3),
    ("head_mix_scores", 256, 80): Tile(128, 64, 8, 2),
    ("head_mix_scores", 512, 80): Tile(64, 64, 8, 2),
    ("stored_attention", 128, 90): Tile(128, 128, 8, 3),
    ("stored_attention", 256, 90): Tile(128, 128, 8, 3),
    ("stored_attention", 512, 90): Tile(64, 64, 8, 3),
    ("stored_attention", 128, 80): Tile(128, 64, 4, 3),
    ("stored_attention", 256, 80): Tile(128, 64, 8, 3),
    ("stored_attention", 512, 80): Tile(64, 64, 8, 2),
    ("stored_attention_backward", 128, 90): Tile(64, 128, 8, 3),
    ("stored_attention_backward", 256, 90): Tile(64, 128, 8, 3),
    ("stored_attention_backward", 512, 90): Tile(64, 64, 8, 2),
    ("stored_attention_backward", 128, 80): Tile(64, 64, 4, 2),
    ("stored_attention_backward", 256, 80): Tile(64, 64, 8, 2),
    ("stored_attention_backward", 512, 80): Tile(32, 64, 8, 1),
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
    "summed_attention": Tile(64, 16, 8, 1),
    "summed_attention_scores": Tile(64, 16, 8, 1),
    "score_products": Tile(64, 16, 8, 1),
    "head_mix_scores": Tile(64, 16, 8, 1),
    "stored_attention": Tile(64, 16, 8, 1),
    "stored_attention_backward": Tile(16, 32, 8, 1),
    "nearest_centroid": Tile(64, 32, 8, 2),
    "bucket_sums": Tile(64, 32, 8, 2, 2),
}


def pick(operation: str, padded_head: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile for heads of the given padded size; a GPU without rows of its own takes those of the next older one."""
    if dtype == torch.float32:
        return FULL_PRECISION[operation]
    head_bytes = max(128, padded_head * dtype.itemsize)
    known = [sm for name, size, sm in TILES if name == operation and size == head_bytes and sm <= capability]
    return TILES[operation, head_bytes, max(known, default=80)]

"""Reference implementation of every operation in plain PyTorch.

References are written to be read. They process inputs in chunks to bound memory, and are the ``"torch"`` backend, the default
for CPU tensors.
"""

from msattn.kernels.reference.best_blocks import best_blocks, block_softmax
from msattn.kernels.reference.block_sparse_attention import block_sparse_attention, block_sparse_attention_backward
from msattn.kernels.reference.bucket_decode import bucket_decode
from msattn.kernels.reference.bucket_mass import bucket_mass
from msattn.kernels.reference.conv_attention import conv_attention, conv_attention_backward, conv_attention_forward
from msattn.kernels.reference.conv_decode import conv_decode
from msattn.kernels.reference.flash_decode import flash_decode
from msattn.kernels.reference.gate_scores import gate_scores
from msattn.kernels.reference.head_mix_attention import (
    head_mix_attention,
    head_mix_attention_backward,
    head_mix_attention_forward,
)
from msattn.kernels.reference.maxpool_attention import maxpool_attention
from msattn.kernels.reference.merge_states import merge_states
from msattn.kernels.reference.multiscale_attention import multiscale_attention, multiscale_attention_backward
from msattn.kernels.reference.nearest_centroid import bucket_sums, nearest_centroid
from msattn.kernels.reference.paged_block_sparse_attention import paged_block_sparse_attention
from msattn.kernels.reference.paged_bucket_decode import paged_bucket_decode
from msattn.kernels.reference.paged_bucket_sizes import paged_bucket_sizes
from msattn.kernels.reference.paged_flash_decode import paged_flash_decode
from msattn.kernels.reference.pool_blocks import pool_blocks
from msattn.kernels.reference.probe_buckets import probe_buckets

__all__ = [
    "best_blocks",
    "block_softmax",
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "bucket_decode",
    "bucket_mass",
    "bucket_sums",
    "conv_attention",
    "conv_attention_backward",
    "conv_attention_forward",
    "conv_decode",
    "flash_decode",
    "gate_scores",
    "head_mix_attention",
    "head_mix_attention_backward",
    "head_mix_attention_forward",
    "maxpool_attention",
    "merge_states",
    "multiscale_attention",
    "multiscale_attention_backward",
    "nearest_centroid",
    "paged_block_sparse_attention",
    "paged_bucket_decode",
    "paged_bucket_sizes",
    "paged_flash_decode",
    "pool_blocks",
    "probe_buckets",
]

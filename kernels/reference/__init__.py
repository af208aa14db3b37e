"""Every operation in plain PyTorch: readable, bounded in memory by chunks, and what serves on a CPU."""

from msattn.kernels.reference.block_sparse_attention import block_sparse_attention, block_sparse_attention_backward
from msattn.kernels.reference.bucket_decode import bucket_decode
from msattn.kernels.reference.bucket_mass import bucket_mass
from msattn.kernels.reference.maxpool_attention import maxpool_attention
from msattn.kernels.reference.merge_states import merge_states

__all__ = [
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "bucket_decode",
    "bucket_mass",
    "maxpool_attention",
    "merge_states",
]

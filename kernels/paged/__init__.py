"""Attention over a paged cache (:class:`msattn.kernels.types.PagedKeys`), as servers keep it, for
inference.

One module an operation; none imports another.
"""

from msattn.kernels.paged.block_sparse_attention import paged_block_sparse_attention
from msattn.kernels.paged.bucket_decode import paged_bucket_decode
from msattn.kernels.paged.bucket_sizes import paged_bucket_sizes
from msattn.kernels.paged.flash_decode import paged_flash_decode

__all__ = [
    "paged_block_sparse_attention",
    "paged_bucket_decode",
    "paged_bucket_sizes",
    "paged_flash_decode",
]

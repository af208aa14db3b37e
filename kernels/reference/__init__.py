"""Reference implementation of every operation in plain PyTorch; those of multi-token attention are
in ``msattn.kernels.multi_token.reference``.

References are written to be read. They process inputs in chunks to bound memory, and are the
``"torch"`` backend, the default for CPU tensors. The operations have checked their arguments;
references check values that these do not read: padding, lengths, probes, offsets, bucket numbers,
zooms.
"""

from msattn.kernels.reference.best_blocks import best_blocks as best_blocks
from msattn.kernels.reference.best_blocks import block_softmax as block_softmax
from msattn.kernels.reference.block_sparse_attention import (
    block_sparse_attention as block_sparse_attention,
)
from msattn.kernels.reference.block_sparse_attention import (
    block_sparse_attention_backward as block_sparse_attention_backward,
)
from msattn.kernels.reference.bucket_decode import bucket_decode as bucket_decode
from msattn.kernels.reference.bucket_mass import bucket_mass as bucket_mass
from msattn.kernels.reference.flash_decode import flash_decode as flash_decode
from msattn.kernels.reference.flash_decode import merge_states as merge_states
from msattn.kernels.reference.gate_scores import gate_scores as gate_scores
from msattn.kernels.reference.maxpool_attention import maxpool_attention as maxpool_attention
from msattn.kernels.reference.multiscale_attention import (
    multiscale_attention as multiscale_attention,
)
from msattn.kernels.reference.multiscale_attention import (
    multiscale_attention_backward as multiscale_attention_backward,
)
from msattn.kernels.reference.nearest_centroid import bucket_sums as bucket_sums
from msattn.kernels.reference.nearest_centroid import nearest_centroid as nearest_centroid
from msattn.kernels.reference.paged import (
    paged_block_sparse_attention as paged_block_sparse_attention,
)
from msattn.kernels.reference.paged import paged_bucket_decode as paged_bucket_decode
from msattn.kernels.reference.paged import paged_bucket_sizes as paged_bucket_sizes
from msattn.kernels.reference.paged import paged_flash_decode as paged_flash_decode
from msattn.kernels.reference.pool_blocks import pool_blocks as pool_blocks
from msattn.kernels.reference.probe_buckets import probe_buckets as probe_buckets

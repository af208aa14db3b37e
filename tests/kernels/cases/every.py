"""The cases of all functions of kernels, by name."""

from msattn.kernels.operations import DIFFERENTIABLE
from tests.kernels.cases import buckets, decoding, gates, layers, paged, prefill

CASES = prefill.CASES | decoding.CASES | buckets.CASES | gates.CASES | paged.CASES | layers.CASES
# whose interpreted kernels take seconds
SLOW = {
    *DIFFERENTIABLE,
    "conv_decode",
    "flash_decode",
    "paged_block_sparse_attention",
    "paged_bucket_decode",
}

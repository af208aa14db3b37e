"""Construction of the bucket index: the list of keys in each bucket."""

import torch
from torch import Tensor

from msattn.kernels.types import BucketIndex


def build_bucket_index(buckets: Tensor, num_buckets: int) -> BucketIndex:
    """Builds the lists of the keys in each bucket, without a host synchronization.

    ``buckets``, int32 ``[B, Hkv, n]``, is the bucket of the key at each cache position, 0 to C - 1;
    -1 excludes a key (padding). The keys of a bucket are in order of position, excluded keys come
    after the last offset.
    """
    by_bucket, order = torch.where(buckets < 0, num_buckets, buckets).sort(dim=-1, stable=True)
    edges = torch.arange(num_buckets + 1, dtype=buckets.dtype, device=buckets.device)
    offsets = torch.searchsorted(
        by_bucket, edges.expand(*buckets.shape[:2], -1).contiguous(), out_int32=True
    )
    return BucketIndex(offsets, order.to(torch.int32))

"""Lists of the keys in each bucket, which decoding over buckets reads."""

import torch
from torch import Tensor

from msattn.kernels.types import BucketIndex


def build_bucket_index(buckets: Tensor, num_buckets: int) -> BucketIndex:
    """Lists of the keys of each bucket, made on the device without waiting for it.

    Parameters
    ----------
    buckets : Tensor
        int32 ``[B, Hkv, n]``: the bucket of the key at each cache position; -1 leaves a key (padding) out.
    num_buckets : int
        ``C``; buckets are 0 to C - 1.

    Returns
    -------
    BucketIndex
        ``offsets [B, Hkv, C + 1]`` and ``order [B, Hkv, n]``, int32; a bucket's keys by position. Keys that are left
        out stand behind the last offset.
    """
    by_bucket, order = torch.where(buckets < 0, num_buckets, buckets).sort(dim=-1, stable=True)
    edges = torch.arange(num_buckets + 1, dtype=buckets.dtype, device=buckets.device)
    offsets = torch.searchsorted(by_bucket, edges.expand(*buckets.shape[:2], -1).contiguous(), out_int32=True)
    return BucketIndex(offsets, order.to(torch.int32))

"""Reference of ``paged_bucket_sizes``."""

from torch import Tensor

from msattn.kernels.common.paged_checks import check_paged_bucket_sizes
from msattn.kernels.reference.common import filled_slots


def paged_bucket_sizes(buckets: Tensor, table: Tensor, kv_len: Tensor, *, num_buckets: int) -> Tensor:
    """Reference of :func:`msattn.kernels.paged.bucket_sizes.paged_bucket_sizes`.

    Raises
    ------
    ValueError
        If an argument is invalid, a length is outside the table, or a filled page outside the cache.
    """
    check_paged_bucket_sizes(buckets, table, kv_len, num_buckets)
    sizes = table.new_zeros((len(table), buckets.shape[2], num_buckets))
    for own, (page, offset) in zip(sizes, filled_slots(table, kv_len, *buckets.shape[:2]), strict=True):
        bucket = buckets[page, offset].T.long()  # [Hkv, kv_len]
        counted = (bucket >= 0) & (bucket < num_buckets)
        own.scatter_add_(1, bucket.where(counted, 0), counted.to(own.dtype))
    return sizes

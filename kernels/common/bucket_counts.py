"""Counts of the keys that a decoding step over buckets reads, for statistics."""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.types import BucketIndex


def keys_read(
    index: BucketIndex, buckets: Tensor, probes: Tensor, *, indexed: int, recent: int, sink: int, kv_start: Tensor | None = None
) -> Tensor:
    """Counts the keys that :func:`~msattn.kernels.bucket_decode.bucket_decode` reads.

    A key in the dense window and in a probed bucket counts once. Only the index's offsets and the buckets of the window are
    read.

    Parameters
    ----------
    index : BucketIndex
        Lists of the keys at positions ``[0, indexed)``.
    buckets : Tensor int32 ``[B, Hkv, M]``
        The bucket of each key, with contiguous rows; -1 for padding.
    probes : Tensor int32 ``[B, Hkv, L]``
        Probed buckets; repetitions count once.
    indexed : int
        Number of indexed keys.
    recent, sink : int
        Numbers of last and first keys in the dense window.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.

    Returns
    -------
    Tensor int64 ``[B, Hkv]``
    """
    recent = min(recent, buckets.shape[2])
    if probes.is_cuda:
        with torch.cuda.device_of(probes):
            return launch(index.offsets, buckets, probes, indexed, recent, sink, kv_start)
    num_keys, num_buckets = buckets.shape[2], index.offsets.shape[2] - 1
    visited = torch.zeros(*probes.shape[:2], num_buckets, dtype=torch.bool).scatter_(2, probes.long(), True)
    start = torch.zeros(len(probes), 1, dtype=torch.int32) if kv_start is None else kv_start[:, None]
    first = start + torch.arange(sink)
    last = torch.arange(num_keys - recent, num_keys).expand(len(start), -1)
    # Keys of the dense window that exist, each counted once: [B, 1, sink + recent].
    exact = torch.cat([first < num_keys, last >= start + sink], dim=1)[:, None]
    position = torch.cat([first.clamp(max=num_keys - 1), last], dim=1)[:, None].expand(-1, probes.shape[1], -1)
    bucket = buckets.gather(2, position.long()).clamp(min=0).long()
    listed_too = exact & (position < indexed) & visited.gather(2, bucket)
    return (index.offsets.diff() * visited).sum(-1) + exact.sum(-1) - listed_too.sum(-1)


def launch(
    offsets: Tensor, buckets: Tensor, probes: Tensor, indexed: int, recent: int, sink: int, kv_start: Tensor | None
) -> Tensor:
    """Launches the kernel, one program per key/value head and sequence."""
    batch, heads, num_probes = probes.shape
    counts = torch.empty(batch, heads, dtype=torch.int64, device=probes.device)
    _keys_read_kernel[(heads, batch)](
        offsets.contiguous(), buckets, probes.contiguous(), kv_start, counts, *buckets.stride()[:2],
        offsets.shape[2] - 1, num_probes, buckets.shape[2], indexed, recent, sink,
    )  # fmt: skip
    return counts


@triton.jit(do_not_specialize=["num_buckets", "num_probes", "num_keys", "indexed", "recent", "sink"])
def _keys_read_kernel(
    p_offsets, p_buckets, p_probes, p_kv_start, p_counts, stride_b, stride_h,
    num_buckets, num_probes, num_keys, indexed, recent, sink,
):  # fmt: skip
    heads, h, b = tl.num_programs(0), tl.program_id(0), tl.program_id(1)
    head = b * heads + h
    p_offsets += head.to(tl.int64) * (num_buckets + 1)
    p_probes += head.to(tl.int64) * num_probes
    p_buckets += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    start = tl.load(p_kv_start + b) if p_kv_start is not None else 0
    o_chunk = tl.arange(0, 256)
    count = tl.zeros([256], tl.int32)
    for first in tl.range(0, num_buckets, 256):  # type: ignore[misc]
        bucket = first + o_chunk
        inside = bucket < num_buckets
        size = tl.load(p_offsets + bucket + 1, mask=inside, other=0) - tl.load(p_offsets + bucket, mask=inside, other=0)
        count += tl.where(_visited(p_probes, bucket, num_probes), size, 0)
    for first in tl.range(0, sink + recent, 256):  # type: ignore[misc]
        n = first + o_chunk
        position = tl.where(n < sink, start + n, num_keys - recent + n - sink)
        exact = (position < num_keys) & ((n < sink) | (position >= start + sink))
        bucket = tl.load(p_buckets + position, mask=exact & (position < indexed), other=-1)
        count += (exact & ~_visited(p_probes, bucket, num_probes)).to(tl.int32)
    tl.store(p_counts + head, tl.sum(count, 0).to(tl.int64))


@triton.jit
def _visited(p_probes, bucket, num_probes):
    """Returns True for each bucket ``[n]`` that is probed; -1 is not."""
    found = tl.zeros_like(bucket)
    for first in tl.range(0, num_probes, 32):  # type: ignore[misc]
        place = first + tl.arange(0, 32)
        probe = tl.load(p_probes + place, mask=place < num_probes, other=-2)
        found = tl.maximum(found, tl.max((bucket[:, None] == probe[None, :]).to(tl.int32), 1))
    return found > 0

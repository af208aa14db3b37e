"""Reference of ``paged_bucket_decode``, which gathers the keys that are read."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.paged_checks import check_paged_bucket_decode
from msattn.kernels.reference.common import masked_attention, paged_slots
from msattn.kernels.types import PagedKeys, SparseAttention


def paged_bucket_decode(
    q: Tensor,
    cache: PagedKeys,
    buckets: Tensor,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    counts: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.bucket_decode.paged_bucket_decode`.

    Raises
    ------
    ValueError
        If an argument is invalid, a length is outside the table, or a filled page outside the cache.
    """
    check_paged_bucket_decode(q, cache, buckets, probes, recent, sink, counts)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    batch, q_heads, _, head_size = q.shape
    kv_heads, statistics = cache.k.shape[2], statistics_dtype(q)
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, head_size).to(statistics)
    out, lse = torch.empty_like(grouped), grouped.new_empty(grouped.shape[:3])
    newest = recent.tolist() if isinstance(recent, Tensor) else [recent] * batch
    for b, (page, offset) in enumerate(paged_slots(cache)):
        position = torch.arange(len(page), device=q.device)
        dense = (position < sink) | (position >= len(page) - newest[b])
        for h in range(kv_heads):
            bucket = buckets[page, offset, h]
            read = dense | (torch.isin(bucket, probes[b, h]) & (bucket >= 0))
            keys, values = (x[page[read], offset[read], h].to(statistics) for x in (cache.k, cache.v))
            seen = read.new_ones(1, len(keys))
            out[b, h], lse[b, h] = masked_attention(grouped[b, h], keys, values, seen, scale, softcap=softcap)
            if counts is not None:
                counts[b, h] += len(keys)
    return SparseAttention(out.to(q.dtype).view(q.shape), lse.view(batch, q_heads, 1))

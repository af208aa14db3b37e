"""One query over a dense window and the keys of probed buckets, gathered."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.bucket_checks import check_bucket_decode
from msattn.kernels.common.checks import resolve_scale, statistics_dtype
from msattn.kernels.reference.common import masked_attention
from msattn.kernels.types import BucketIndex, SparseAttention


def bucket_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BucketIndex,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.bucket_decode.bucket_decode`: lists the keys to read and gathers those alone.

    Raises
    ------
    ValueError
        If arguments do not fit, a probe names no bucket, offsets lead out of ``index.order``, or lengths out of the cache.
    """
    check_bucket_decode(q, k, v, index, probes, recent, sink, kv_start, kv_len)
    scale = resolve_scale(scale, q.shape[3])
    batch, q_heads, _, head_size = q.shape
    kv_heads, num_keys = k.shape[1:3]
    statistics = statistics_dtype(q)
    start, sink_end, recent_begin, end = _dense_window(recent, sink, kv_start, kv_len, batch, num_keys, q.device)
    position = torch.arange(1 + int((sink_end - start + end - recent_begin).max()), device=q.device)
    window = torch.where(position < sink_end - start, start + position, recent_begin - sink_end + start + position)
    member, is_member = _bucket_members(index, probes)
    is_member &= (member >= sink_end) & (member < recent_begin)  # a key of the dense window is counted there
    key = torch.cat([window.expand(-1, kv_heads, -1), member], -1)  # [B, Hkv, S]
    read = torch.cat([(window < end).expand(-1, kv_heads, -1), is_member], -1)
    filling = key.gather(-1, read.byte().argmax(-1, keepdim=True))  # what is read anyway
    key = key.where(read, filling).clamp(0, num_keys - 1)

    head = torch.arange(kv_heads, device=q.device)[:, None]
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, head_size)
    out, lse = q.new_empty(grouped.shape), q.new_empty(grouped.shape[:3], dtype=statistics)
    for b in range(batch):  # one sequence at a time bounds what is gathered
        keys, values = (x[b][head, key[b]].to(statistics) for x in (k, v))  # [Hkv, S, D]
        attended, lse[b] = masked_attention(grouped[b].to(statistics), keys, values, read[b][:, None], scale)
        out[b] = attended.masked_fill(lse[b][..., None] == -math.inf, 0)  # where nothing is read, what fills is anything
    return SparseAttention(out.reshape(q.shape), lse.reshape(batch, q_heads, 1))


def _dense_window(
    recent: int | Tensor,
    sink: int,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    batch: int,
    num_keys: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds ``[B, 1, 1]`` of the dense window: keys ``start <= j < sink_end`` and ``recent_begin <= j < end``."""

    def column(name: str, x: Tensor | int) -> Tensor:
        x = torch.as_tensor(x, device=device).long().expand(batch)
        if not (int(x.min()) >= 0 and (name == "recent" or int(x.max()) <= num_keys)):
            raise ValueError(f"{name}={x.tolist()}: expected 0 or more, and positions within the cache of {num_keys}")
        return x.view(batch, 1, 1)

    start = column("kv_start", 0 if kv_start is None else kv_start)
    end = column("kv_len", num_keys if kv_len is None else kv_len).maximum(start)
    sink_end = (start + sink).minimum(end)
    return start, sink_end, (end - column("recent", recent)).maximum(sink_end), end


def _bucket_members(index: BucketIndex, probes: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[B, Hkv, S]`` of the probed buckets, bucket after bucket, and which entries are keys (the rest is filling)."""
    offsets, num_buckets = index.offsets.long(), index.offsets.shape[2] - 1
    if probes.numel() and not (int(probes.min()) >= -1 and int(probes.max()) < num_buckets):
        raise ValueError(f"probes: {int(probes.min())} to {int(probes.max())}, expected -1 (none) to {num_buckets - 1}")
    if bool((offsets.diff() < 0).any()) or int(offsets.min()) < 0 or int(offsets.max()) > index.order.shape[2]:
        raise ValueError(f"index.offsets: expected to rise from 0 to at most {index.order.shape[2]}, the length of index.order")
    none = torch.full_like(offsets[..., :1], -1)
    bucket = torch.cat([none, probes.long().sort(-1).values], -1)  # [B, Hkv, 1 + L]
    first_time = bucket.diff(prepend=none) > 0
    bucket = bucket.clamp(min=0)
    begin = offsets.gather(-1, bucket)
    list_end = ((offsets.gather(-1, bucket + 1) - begin) * first_time).cumsum(-1)
    position = torch.arange(int(list_end.max()), device=offsets.device).expand(*offsets.shape[:2], -1)
    slot = torch.searchsorted(list_end, position.contiguous(), right=True).clamp(max=bucket.shape[2] - 1)
    is_member = position < list_end[..., -1:]
    list_begin = list_end.gather(-1, (slot - 1).clamp(min=0))  # slot 0 is empty: no position falls into it
    listed = (begin.gather(-1, slot) + position - list_begin).where(is_member, 0)
    return index.order.gather(-1, listed).long(), is_member

"""Reference of ``bucket_decode``, which gathers the keys that are read."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
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
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    counts: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.bucket_decode.bucket_decode`."""
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    batch, q_heads, _, head_size = q.shape
    kv_heads, num_keys = k.shape[1:3]
    statistics = statistics_dtype(q)
    start, sink_end, recent_begin, end = _dense_window(
        recent, sink, kv_start, kv_len, batch, num_keys, q.device
    )
    position = torch.arange(1 + int((sink_end - start + end - recent_begin).max()), device=q.device)
    window = torch.where(
        position < sink_end - start, start + position, recent_begin - sink_end + start + position
    )
    member, is_member = _bucket_members(index, probes)
    # keys of the dense window are already in `window`
    is_member &= (member >= sink_end) & (member < recent_begin)
    key = torch.cat([window.expand(-1, kv_heads, -1), member], -1)  # [B, Hkv, S]
    read = torch.cat([(window < end).expand(-1, kv_heads, -1), is_member], -1)
    if counts is not None:
        counts += read.sum(-1)
    # masked entries repeat a key that is read, which is finite
    filler = key.gather(-1, read.byte().argmax(-1, keepdim=True))
    key = key.where(read, filler).clamp(0, num_keys - 1)

    head = torch.arange(kv_heads, device=q.device)[:, None]
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, head_size)
    out, lse = q.new_empty(grouped.shape), q.new_empty(grouped.shape[:3], dtype=statistics)
    for b in range(batch):  # one sequence at a time, to bound memory
        keys, values = (x[b][head, key[b]].to(statistics) for x in (k, v))  # [Hkv, S, D]
        queries = grouped[b].to(statistics)
        attended, lse[b] = masked_attention(
            queries, keys, values, read[b][:, None], scale, softcap=softcap
        )
        # the filler is arbitrary if no key is read
        out[b] = attended.masked_fill(lse[b][..., None] == -math.inf, 0)
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
    """Returns the bounds ``[B, 1, 1]`` of the dense window.

    Its keys are ``start <= j < sink_end`` and ``recent_begin <= j < end``.
    """

    def column(name: str, x: Tensor | int) -> Tensor:
        x = torch.as_tensor(x, device=device).long().expand(batch)
        if not (int(x.min()) >= 0 and (name == "recent" or int(x.max()) <= num_keys)):
            raise ValueError(
                f"{name}={x.tolist()}: expected 0 or more, and kv_start and kv_len at most "
                f"{num_keys}"
            )
        return x.view(batch, 1, 1)

    start = column("kv_start", 0 if kv_start is None else kv_start)
    end = column("kv_len", num_keys if kv_len is None else kv_len).maximum(start)
    sink_end = (start + sink).minimum(end)
    return start, sink_end, (end - column("recent", recent)).maximum(sink_end), end


def _bucket_members(index: BucketIndex, probes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys of probed buckets ``[B, Hkv, S]``, and a mask of valid ones."""
    offsets, num_buckets = index.offsets.long(), index.offsets.shape[2] - 1
    if probes.numel() and not (int(probes.min()) >= -1 and int(probes.max()) < num_buckets):
        raise ValueError(
            f"probes: {int(probes.min())} to {int(probes.max())}, expected -1 (no bucket) to "
            f"{num_buckets - 1}"
        )
    if (
        bool((offsets.diff() < 0).any())
        or int(offsets.min()) < 0
        or int(offsets.max()) > index.order.shape[2]
    ):
        raise ValueError(
            f"index.offsets: {int(offsets.min())} to {int(offsets.max())}, expected ascending "
            f"offsets within 0 to {index.order.shape[2]}, the length of index.order"
        )
    none = torch.full_like(offsets[..., :1], -1)
    bucket = torch.cat([none, probes.long().sort(-1).values], -1)  # [B, Hkv, 1 + L]
    first_time = bucket.diff(prepend=none) > 0
    bucket = bucket.clamp(min=0)
    begin = offsets.gather(-1, bucket)
    list_end = ((offsets.gather(-1, bucket + 1) - begin) * first_time).cumsum(-1)
    position = torch.arange(int(list_end.max()), device=offsets.device).expand(
        *offsets.shape[:2], -1
    )
    entry = torch.searchsorted(list_end, position.contiguous(), right=True).clamp(
        max=bucket.shape[2] - 1
    )
    is_member = position < list_end[..., -1:]
    # entry 0 is empty, so that no position is in it
    list_begin = list_end.gather(-1, (entry - 1).clamp(min=0))
    listed = (begin.gather(-1, entry) + position - list_begin).where(is_member, 0)
    return index.order.gather(-1, listed).long(), is_member

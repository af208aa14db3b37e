"""Every operation in plain PyTorch: readable, bounded in memory by chunks, and what serves on a CPU."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.checks import (
    check_block_mask,
    check_block_size,
    check_bucket_decode,
    check_bucket_mass,
    check_per_sequence,
    check_qkv,
    check_states,
    query_offset,
    resolve_scale,
)
from msattn.kernels.types import BucketIndex, BucketMass, MaxPoolAttention, SparseAttention

SCORES_AT_ONCE = 2**22  # scores a chunk holds: 16 MiB in fp32


def maxpool_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> MaxPoolAttention:
    """Reference of :func:`msattn.kernels.maxpool_attention.maxpool_attention`: the scores of a few row blocks at a time.

    Raises
    ------
    ValueError
        If arguments do not fit, or a sequence starts outside of the keys.
    """
    check_qkv(q, k, v)
    check_block_size(block_size)
    check_per_sequence("kv_start", kv_start, q)
    scale = resolve_scale(scale, q.shape[3])
    statistics = _statistics(q)
    blocks = [-(-x.shape[2] // block_size) for x in (q, k)]
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics)
    pooled = q.new_zeros((*q.shape[:2], *blocks), dtype=statistics)

    for batch, first_query, first_key, delta in _sequences(q, k, kv_start, causal):
        queries = q[batch, :, first_query:].unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, n, D]
        keys, values = (x[batch, :, None, first_key:].to(statistics) for x in (k, v))  # [B, Hkv, 1, m, D]
        n, m = queries.shape[3], keys.shape[3]
        if m == 0:
            continue
        row_blocks = max(1, SCORES_AT_ONCE // (queries[..., 0, 0].numel() * m * block_size))
        for t in torch.arange(n, device=q.device).split(row_blocks * block_size):
            begin, end = int(t[0]), int(t[-1]) + 1
            last = min(m, end + delta) if causal else m
            scores = queries[..., begin:end, :].to(statistics) @ keys[..., :last, :].mT * scale
            if causal:
                scores.masked_fill_(torch.arange(last, device=q.device) > t[:, None] + delta, -math.inf)
            maxima = _blocks(scores, -1, block_size).amax(-1)  # [B, Hkv, G, rows, c]
            row_lse = scores.logsumexp(-1)
            probs = scores.sub_(row_lse[..., None]).exp_()
            block_map = _blocks(maxima - row_lse[..., None], -2, block_size).amax(-2).exp()  # [B, Hkv, G, r, c]
            rows = slice(first_query + begin, first_query + end)
            out[batch, :, rows] = (probs @ values[..., :last, :]).flatten(1, 2).to(q.dtype)
            lse[batch, :, rows] = row_lse.flatten(1, 2)
            r = begin // block_size
            pooled[batch, :, r : r + block_map.shape[-2], : block_map.shape[-1]] = block_map.flatten(1, 2)
    return MaxPoolAttention(out, lse, pooled)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.block_sparse_attention.block_sparse_attention`, differentiable: gathers, attends.

    Raises
    ------
    ValueError
        If arguments do not fit, or a sequence starts outside of the keys.
    """
    check_qkv(q, k, v)
    check_block_mask(block_mask, q, k, block_size)
    check_per_sequence("kv_start", kv_start, q)
    scale = resolve_scale(scale, q.shape[3])
    statistics = _statistics(q)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics)
    for b, h, i, j, exists, seen in _selected(q, k, block_mask, block_size, causal, kv_start):
        keys, values = (x[b, h // group, j].to(statistics) for x in (k, v))
        rows_out, rows_lse = _attend(q[b, h, i].to(statistics), keys, values, seen, scale)
        rows = b.expand_as(i)[exists], h.expand_as(i)[exists], i[exists]
        out[rows] = rows_out[exists].to(q.dtype)
        lse[rows] = rows_lse[exists]
    return SparseAttention(out, lse)


def block_sparse_attention_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: Tensor,
    *,
    block_size: int,
    causal: bool,
    scale: float,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: ``dS = P * (dP - rowsum(dO * O) + dlse)``, with P made again from the LSE."""
    statistics = _statistics(q)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=statistics) for x in (q, k, v))
    for b, h, i, j, exists, seen in _selected(q, k, block_mask, block_size, causal, kv_start):
        queries, dout_rows, out_rows = (x[b, h, i].to(statistics) for x in (q, dout, out))
        keys, values = (x[b, h // group, j].to(statistics) for x in (k, v))
        probs = (queries @ keys.mT * scale - lse[b, h, i][..., None]).masked_fill(~seen, -math.inf).exp()
        rows = (dlse[b, h, i] - (dout_rows * out_rows).sum(-1))[..., None]
        dscores = (probs * (dout_rows @ values.mT + rows)).masked_fill(~seen, 0) * scale
        dq[b.expand_as(i)[exists], h.expand_as(i)[exists], i[exists]] = (dscores @ keys)[exists]
        dk.index_put_((b, h // group, j), dscores.mT @ queries, accumulate=True)
        dv.index_put_((b, h // group, j), probs.mT @ dout_rows, accumulate=True)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _selected(
    q: Tensor, k: Tensor, block_mask: Tensor, block_size: int, causal: bool, kv_start: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """What a block mask selects, some R row blocks at a time: those with lists of like length go together.

    Yields sequence ``b [R, 1]`` and query head ``h [R, 1]``, queries ``i [R, block]`` and keys ``j [R, S]``, which of the
    queries exist ``[R, block]``, and which of the keys they see ``[R, block, S]``.
    """
    within = torch.arange(block_size, device=q.device)
    mask = block_mask.expand(q.shape[0], -1, -1, -1)
    for batch, first_query, first_key, delta in _sequences(q, k, kv_start, causal):
        n, m = q.shape[2] - first_query, k.shape[2] - first_key
        first_t, first_u = (torch.arange(x, device=q.device) * block_size for x in mask.shape[2:])
        last = (first_t + block_size).clamp(max=n) + delta if causal else torch.full_like(first_t, m)
        readable = (first_u < last[:, None]) & (first_u < m) & (first_t < n)[:, None]
        selected = (mask[batch] & readable).repeat_interleave(q.shape[1] // mask.shape[1], dim=1)  # [B, Hq, Tr, Tc]
        lengths = selected.sum(-1)
        rows = lengths.flatten().argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
        while rows.numel():
            width = int(lengths.flatten()[rows[0]])
            some, rows = rows.tensor_split([max(1, SCORES_AT_ONCE // (block_size**2 * width))])
            b, h, r = torch.unravel_index(some, lengths.shape)
            on, c = selected[b, h, r].to(torch.uint8).sort(dim=-1, descending=True, stable=True)
            on, c = on[:, :width].bool(), c[:, :width]
            c = c.where(on, c[:, :1])  # a shorter list is filled with what it reads anyway
            u = (c[..., None] * block_size + within).flatten(1)
            t = r[:, None] * block_size + within
            exists = t < n
            seen = exists[..., None] & (on.repeat_interleave(block_size, 1) & (u < m))[:, None]
            if causal:
                seen = seen & (u[:, None] <= t[..., None] + delta)
            i, j = first_query + t.clamp(max=n - 1), first_key + u.clamp(max=m - 1)
            yield b[:, None] + (batch.start or 0), h[:, None], i, j, exists, seen


def merge_states(outs: Tensor, lses: Tensor) -> SparseAttention:
    """Reference of :func:`msattn.kernels.merge_states.merge_states`.

    Raises
    ------
    ValueError
        If the parts do not fit each other.
    """
    check_states(outs, lses)
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None]
    out = (outs.to(lses.dtype) * weights).masked_fill(weights == 0, 0).sum(0)
    return SparseAttention(out.to(outs.dtype), lse)


def _statistics(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sequences(q: Tensor, k: Tensor, kv_start: Tensor | None, causal: bool) -> Iterator[tuple[slice, int, int, int]]:
    """What can be computed together: (part of the batch, first query, first key, delta), the padding cut off.

    Counted from there, causal query t sees keys ``u <= t + delta``.
    """
    offset = query_offset(q.shape[2], k.shape[2], causal)
    if kv_start is None:
        yield slice(None), max(-offset, 0), 0, max(offset, 0)
        return
    starts = kv_start.tolist()
    if not all(0 <= start <= k.shape[2] for start in starts):
        raise ValueError(f"kv_start={starts}: expected 0 to {k.shape[2]}, positions within the keys")
    for b, start in enumerate(starts):
        yield slice(b, b + 1), min(max(start - offset, 0), q.shape[2]), start, max(offset - start, 0)


def _blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut a dimension, counted from the end, into ``(blocks, size)``; the last block is filled up with -inf."""
    missing = -x.shape[dim] % size
    return torch.nn.functional.pad(x, (0, 0) * (-dim - 1) + (0, missing), value=-math.inf).unflatten(dim, (-1, size))


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over what fits in memory: ``out, lse`` of ``q [R, n, D]``, ``k, v [R, m, D]``, ``seen [R, n, m]``."""
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    nothing = ~seen.any(-1)
    lse = scores.masked_fill(nothing[..., None], 0).logsumexp(-1)  # finite everywhere, and so are the gradients
    out = (scores - lse[..., None]).exp() @ v
    return out, lse.masked_fill(nothing, -math.inf)


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
    statistics = _statistics(q)
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
        attended, lse[b] = _attend(grouped[b].to(statistics), keys, values, read[b][:, None], scale)
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


def bucket_mass(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    *,
    num_buckets: int,
    causal: bool = False,
    scale: float | None = None,
    min_distance: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
) -> BucketMass:
    """Reference of :func:`msattn.kernels.bucket_mass.bucket_mass`: scores and their sums for a few queries at a time.

    Raises
    ------
    ValueError
        If arguments do not fit, or a bucket number is out of range.
    """
    check_bucket_mass(q, k, buckets, num_buckets, min_distance, q_pos, k_pos)
    scale, statistics = resolve_scale(scale, q.shape[3]), _statistics(q)
    batch, q_heads, num_queries, _ = q.shape
    kv_heads, num_keys = k.shape[1:3]
    if not (int(buckets.min()) >= -1 and int(buckets.max()) < num_buckets):
        raise ValueError(f"buckets: {int(buckets.min())} to {int(buckets.max())}, expected -1 (none) to {num_buckets - 1}")
    q_pos = torch.arange(num_keys - num_queries, num_keys, device=q.device) if q_pos is None else q_pos
    k_pos = torch.arange(num_keys, device=q.device) if k_pos is None else k_pos
    keys = k.to(statistics).transpose(-1, -2)  # [B, Hkv, D, n_k]
    grouped = q.unflatten(1, (kv_heads, -1))  # [B, Hkv, G, n_q, D]
    column = buckets.long().clamp(min=0)[:, :, None, None]
    shape = (*grouped.shape[:3], num_queries)
    mass = q.new_zeros((*shape, num_buckets), dtype=statistics)
    lse = q.new_empty(shape, dtype=statistics)
    top_key = torch.empty(shape, dtype=torch.int32, device=q.device)

    for rows in torch.arange(num_queries).split(max(1, SCORES_AT_ONCE // (batch * q_heads * num_keys))):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        distance = q_pos[part, None] - k_pos[None, :]
        seen = (buckets >= 0)[:, :, None, None]  # [B, Hkv, 1, 1, n_k]
        if causal:
            seen = seen & (distance >= 0)
        if min_distance is not None:
            seen = seen & (distance.abs() > min_distance)
        queries = grouped[:, :, :, part].to(statistics)
        scores = (queries.flatten(2, 3) @ keys).mul_(scale).unflatten(2, queries.shape[2:4])  # [B, Hkv, G, rows, n_k]
        scores.masked_fill_(~seen, -math.inf)
        row_max, top = scores.max(-1)
        nothing = row_max == -math.inf
        weights = scores.sub_(row_max.masked_fill(nothing, 0)[..., None]).exp_()
        sums = mass[..., part, :].scatter_add_(-1, column.expand_as(weights), weights)
        total = sums.sum(-1).masked_fill_(nothing, 1)
        sums /= total[..., None]
        lse[..., part] = row_max + total.log()
        top_key[..., part] = top.masked_fill_(nothing, -1)
    return BucketMass(mass.flatten(1, 2), lse.flatten(1, 2), top_key.flatten(1, 2))

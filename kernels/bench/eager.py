"""Each operation in eager PyTorch, with all scores materialized, where that differs from its
reference.

These functions compute in the precision of their input. They are a peer of the kernels, and their
rounding error sets the tolerance in the check of the kernels. There is no padding, and prefill has
as many queries as keys.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv2d, one_hot, pad

from msattn.kernels.bench.rows import BLOCK
from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.testing import (
    block_numbers,
    capped,
    dense_attention,
    pool_over_blocks,
    tokens_of_blocks,
    visible,
)
from msattn.kernels.types import BucketIndex, PagedKeys


def maxpool_attention(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense attention, and the maximum probability of each block."""
    batch, _, n, _ = q.shape
    out, lse, probs = dense_attention(
        q, k, v, _causal(q, k), dtype=q.dtype, score_mod=capped(softcap)
    )
    blocks = -(-n // BLOCK)
    rows, cols = block_numbers(batch, n, n, True, None, BLOCK)
    return out, lse, pool_over_blocks(probs, rows, cols, (blocks, blocks))


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    softcap: float | None = None,
    key_block_size: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Dense attention with the block mask expanded to tokens."""
    read = tokens_of_blocks(
        block_mask,
        q.shape[0],
        q.shape[1],
        q.shape[2],
        k.shape[2],
        True,
        None,
        BLOCK,
        key_block_size,
    )
    return dense_attention(q, k, v, read & _causal(q, k), dtype=q.dtype, score_mod=capped(softcap))[
        :2
    ]


def multiscale_attention(
    q: Tensor, k: Tensor, v: Tensor, zoom: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention in which a key at zoom z is replaced by the mean of its group.

    The z equal scores of a group have the weight of one score plus log z, so no further correction
    is needed.
    """
    n = q.shape[2]
    first = torch.arange(zoom.shape[2], device=q.device) * BLOCK
    # blocks whose means could include keys past the causal limit
    near = (first + BLOCK).clamp(max=n) - 1 > first[:, None]
    zoom = zoom.where(~near | (zoom == 0), 1).repeat_interleave(q.shape[1] // zoom.shape[1], dim=1)
    zoom = zoom.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, :n, :n]
    group = q.shape[1] // k.shape[1]
    scores, cap = torch.full((), -torch.inf, device=q.device), capped(softcap)
    for z in (1, 2, 4, 8):
        keys = _means(k, z).repeat_interleave(group, 1)
        level = (q @ keys.mT).to(statistics_dtype(q)) * q.shape[3] ** -0.5
        scores = torch.where(zoom == z, cap(level) if cap else level, scores)
    scores = scores.masked_fill(~_causal(q, k), -torch.inf)
    probs = scores.softmax(-1).to(q.dtype)
    parts = [(probs * (zoom == z)) @ _means(v, z).repeat_interleave(group, 1) for z in (1, 2, 4, 8)]
    return sum(parts[1:], parts[0]), scores.logsumexp(-1)


def _means(x: Tensor, z: int) -> Tensor:
    """Replaces each token of ``x [B, H, M, D]`` by the mean of its group of z."""
    tokens = x.shape[2]
    groups = pad(x.to(statistics_dtype(x)), (0, 0, 0, -tokens % z)).unflatten(2, (-1, z)).sum(3)
    counts = (tokens - torch.arange(groups.shape[2], device=x.device) * z).clamp(max=z)[:, None]
    return (groups / counts).to(x.dtype).repeat_interleave(z, 2)[:, :, :tokens]


def conv_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, before: int | None = None
) -> Tensor:
    """Softmax attention with a convolution over the scores; ``before`` rows of zeros (default: c_q
    - 1) precede them.
    """
    mask, group = _causal(q, k), q.shape[1] // k.shape[1]
    c_q, c_k = weight.shape[1:]
    scores = (q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5).masked_fill(~mask, 0)
    scores = pad(scores, ((c_k - 1) // 2, c_k // 2, c_q - 1 if before is None else before, 0))
    mixed = conv2d(scores, weight[:, None], groups=q.shape[1])
    return _softmax_attention(mixed, mask[:, :, -mixed.shape[2] :], v.repeat_interleave(group, 1))


def conv_decode(q_window: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Computes the last row of :func:`conv_attention` from the last ``c_q`` queries."""
    return conv_attention(q_window, k, v, weight, before=0)


def head_mix_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Softmax attention with scores mixed over heads."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    mixed = torch.einsum("hg,bgij->bhij", weight, scores)
    return _softmax_attention(mixed, _causal(q, k), v.repeat_interleave(group, 1))


def flash_decode(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention of the newest queries, without or with a causal mask."""
    seen = _causal(q, k) if causal else torch.ones((), dtype=torch.bool, device=q.device)
    return dense_attention(q, k, v, seen, dtype=q.dtype, score_mod=capped(softcap))[:2]


def bucket_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BucketIndex,
    probes: Tensor,
    recent: int,
    sink: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of one query with a mask over the cache."""
    read = keys_read(index, probes, recent, sink).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return dense_attention(q, k, v, read[:, :, None], dtype=q.dtype, score_mod=capped(softcap))[:2]


def paged_flash_decode(
    q: Tensor, cache: PagedKeys, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention over the gathered cache; all sequences have the length of the first."""
    k, v = (_gather_pages(x, cache.table, cache.kv_len) for x in (cache.k, cache.v))
    return flash_decode(q, k, v, True, softcap)


def paged_bucket_decode(
    q: Tensor,
    cache: PagedKeys,
    buckets: Tensor,
    probes: Tensor,
    recent: int,
    sink: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention with a mask over the gathered cache.

    Assumes that all sequences have the length of the first, that each key is in a bucket and each
    probe is valid.
    """
    k, v, bucket = (
        _gather_pages(x, cache.table, cache.kv_len) for x in (cache.k, cache.v, buckets)
    )
    position, size = torch.arange(k.shape[2], device=q.device), k.shape[2]
    probed = torch.zeros((*probes.shape[:2], 2**15), dtype=torch.bool, device=q.device).scatter_(
        2, probes.long(), True
    )
    read = probed.gather(2, bucket.long())
    read = (read | (position < sink) | (position >= size - recent)).repeat_interleave(
        q.shape[1] // k.shape[1], dim=1
    )
    return dense_attention(q, k, v, read[:, :, None], dtype=q.dtype, score_mod=capped(softcap))[:2]


def paged_bucket_sizes(buckets: Tensor, table: Tensor, kv_len: Tensor, num_buckets: int) -> Tensor:
    """Counts the gathered bucket ids. Assumes that each key is in a bucket."""
    bucket = buckets[table.long()].flatten(1, 2).transpose(1, 2)  # [B, Hkv, pages * page_size]
    live = (torch.arange(bucket.shape[2], device=table.device) < kv_len[:, None, None]).expand_as(
        bucket
    )
    sizes = table.new_zeros((*bucket.shape[:2], num_buckets))
    return sizes.scatter_add_(2, bucket.long().masked_fill(~live, 0), live.to(table.dtype))


def _gather_pages(x: Tensor, table: Tensor, kv_len: Tensor) -> Tensor:
    """Returns ``x [P, page_size, Hkv, ...]`` in order of position, ``[B, Hkv, M, ...]``."""
    return x[table.long()].flatten(1, 2).transpose(1, 2)[:, :, : int(kv_len[0])]


def keys_read(index: BucketIndex, probes: Tensor, recent: int, sink: int) -> Tensor:
    """Returns the keys that ``bucket_decode`` reads, bool ``[B, Hkv, M]``.

    Assumes that each key is in a bucket and each probe is valid.
    """
    size = index.order.shape[2]
    position = torch.arange(size, dtype=torch.int32, device=probes.device)
    bucket = (
        torch.searchsorted(index.offsets, position.expand_as(index.order).contiguous(), right=True)
        - 1
    )
    probed = torch.zeros_like(index.offsets, dtype=torch.bool).scatter_(2, probes.long(), True)
    members = torch.zeros_like(index.order, dtype=torch.bool).scatter_(
        2, index.order.long(), probed.gather(2, bucket)
    )
    return members | (position < sink) | (position >= size - recent)


def bucket_mass(
    q: Tensor, k: Tensor, buckets: Tensor, num_buckets: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Sums all attention probabilities by the bucket of their key."""
    all_visible = torch.ones((), dtype=torch.bool, device=q.device)
    _, lse, probs = dense_attention(q, k, k, all_visible, dtype=q.dtype, score_mod=capped(softcap))
    of_key = (
        buckets.long()
        .repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, None]
        .expand_as(probs)
    )
    return probs.new_zeros((*probs.shape[:3], num_buckets)).scatter_add_(3, of_key, probs), lse


def nearest_centroid(k: Tensor, centroids: Tensor) -> tuple[Tensor]:
    """Returns the maximum over the materialized products with all centroids."""
    return ((k.to(centroids.dtype) @ centroids.mT).amax(-1),)


def bucket_sums(k: Tensor, buckets: Tensor, num_buckets: int) -> tuple[Tensor]:
    """Multiplies a materialized one-hot matrix with the keys."""
    return (one_hot(buckets.long(), num_buckets).to(k.dtype).mT @ k,)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the parts, each weighted by its share of the softmax denominator."""
    lse = lses.logsumexp(0)
    return ((lses - lse).exp()[..., None].to(outs.dtype) * outs).sum(0), lse


def pool_blocks(x: Tensor, poolings: list[str]) -> Tensor:
    """Pools full blocks, then a partial last one, in one pass per pooling."""
    whole = x.shape[2] // BLOCK * BLOCK
    parts = [
        x[:, :, :whole].unflatten(2, (-1, BLOCK)),
        *([x[:, :, None, whole:]] if whole < x.shape[2] else []),
    ]
    pool = {
        "avg": partial(torch.mean, dim=3, dtype=statistics_dtype(x)),
        "max": partial(torch.amax, dim=3),
        "min": partial(torch.amin, dim=3),
    }
    return torch.cat(
        [
            torch.cat([pool[name](part).to(statistics_dtype(x)) for name in poolings], -1)
            for part in parts
        ],
        2,
    )


def best_blocks(scores: Tensor, counts: Tensor, visible: Tensor, always: Tensor) -> Tensor:
    """Selects the ``counts`` best visible blocks of each row by sorting."""
    best = (
        scores.masked_fill(~visible, -1)
        .masked_fill_(always, torch.inf)
        .topk(scores.shape[-1], dim=-1)
        .indices
    )
    keep = torch.arange(scores.shape[-1], device=scores.device) < torch.minimum(
        counts, visible.sum(-1, keepdim=True)
    )
    return (
        torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, keep.expand_as(best)) | always
    )


def _causal(q: Tensor, k: Tensor) -> Tensor:
    return visible(1, q.shape[2], k.shape[2], True, None, q.device)


def _softmax_attention(scores: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    probs = scores.to(statistics_dtype(v)).masked_fill(~mask, -torch.inf).softmax(-1)
    return probs.to(v.dtype) @ v

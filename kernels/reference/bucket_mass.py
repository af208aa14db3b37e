"""Reference of ``bucket_mass``, some queries at a time."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.reference.common import SCORES_AT_ONCE, cap_scores
from msattn.kernels.types import BucketMass


def bucket_mass(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    *,
    num_buckets: int,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    min_distance: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
) -> BucketMass:
    """Reference of :func:`msattn.kernels.bucket_mass.bucket_mass`."""
    scale = resolve_scale(scale, q.shape[3])
    softcap = resolve_softcap(softcap)
    statistics = statistics_dtype(q)
    batch, q_heads, num_queries, _ = q.shape
    kv_heads, num_keys = k.shape[1:3]
    if not (int(buckets.min()) >= -1 and int(buckets.max()) < num_buckets):
        raise ValueError(
            f"buckets: {int(buckets.min())} to {int(buckets.max())}, expected -1 (excluded) to "
            f"{num_buckets - 1}"
        )
    q_pos = (
        torch.arange(num_keys - num_queries, num_keys, device=q.device) if q_pos is None else q_pos
    )
    k_pos = torch.arange(num_keys, device=q.device) if k_pos is None else k_pos
    keys = k.to(statistics).transpose(-1, -2)  # [B, Hkv, D, n_k]
    grouped = q.unflatten(1, (kv_heads, -1))  # [B, Hkv, G, n_q, D]
    column = buckets.long().clamp(min=0)[:, :, None, None]
    shape = (*grouped.shape[:3], num_queries)
    mass = q.new_zeros((*shape, num_buckets), dtype=statistics)
    lse = q.new_empty(shape, dtype=statistics)
    top_key = torch.empty(shape, dtype=torch.int32, device=q.device)

    for rows in torch.arange(num_queries).split(
        max(1, SCORES_AT_ONCE // (batch * q_heads * num_keys))
    ):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        distance = q_pos[part, None] - k_pos[None, :]
        seen = (buckets >= 0)[:, :, None, None]  # [B, Hkv, 1, 1, n_k]
        if causal:
            seen = seen & (distance >= 0)
        if min_distance is not None:
            seen = seen & (distance.abs() > min_distance)
        queries = grouped[:, :, :, part].to(statistics)
        # [B, Hkv, G, rows, n_k]
        scores = (queries.flatten(2, 3) @ keys).mul_(scale).unflatten(2, queries.shape[2:4])
        scores = cap_scores(scores, softcap).masked_fill_(~seen, -math.inf)
        row_max, top = scores.max(-1)
        nothing = row_max == -math.inf
        weights = scores.sub_(row_max.masked_fill(nothing, 0)[..., None]).exp_()
        sums = mass[..., part, :].scatter_add_(-1, column.expand_as(weights), weights)
        total = sums.sum(-1).masked_fill_(nothing, 1)
        sums /= total[..., None]
        lse[..., part] = row_max + total.log()
        top_key[..., part] = top.masked_fill_(nothing, -1)
    return BucketMass(mass.flatten(1, 2), lse.flatten(1, 2), top_key.flatten(1, 2))

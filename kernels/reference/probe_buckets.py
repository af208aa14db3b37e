"""Reference of ``probe_buckets``."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype
from msattn.kernels.common.densities import bucket_densities, dense_buckets


def probe_buckets(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    kv_heads: int,
    probes: int,
    sizes: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.probe_buckets.probe_buckets`."""
    batch, classifiers = len(q), len(weight_in)
    # [H, B * queries per classifier, D]
    rows = q[:, :, 0].unflatten(1, (classifiers, -1)).transpose(0, 1).flatten(1, 2)
    logits = torch.baddbmm(bias_out, torch.baddbmm(bias_in, rows, weight_in).relu(), weight_out)
    # [B, Hq, C]
    probs = (
        logits.to(statistics_dtype(q))
        .softmax(-1)
        .unflatten(1, (batch, -1))
        .transpose(0, 1)
        .flatten(1, 2)
    )
    scores = probs.unflatten(1, (kv_heads, -1)).sum(2)
    if sizes is None or threshold is None:
        return scores.topk(probes, dim=-1, sorted=False).indices.int()
    return dense_buckets(bucket_densities(scores, sizes), threshold, probes)

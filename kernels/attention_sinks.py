"""Attention sinks: a logit for each query head that takes part in the softmax without a value
(gpt-oss).

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse') = out * sigmoid(lse - sink)

A sink is one more column of the scores whose value is 0, so it only rescales a row. Sums of a row's
probabilities, such as the mass of :func:`msattn.kernels.bucket_mass.bucket_mass`, are rescaled by
the same factor. A block map is not: its entries are maxima over rows with different LSEs, hence the
argument ``sinks`` of :func:`msattn.kernels.maxpool_attention.maxpool_attention`.
"""

import math

from torch import Tensor

from msattn.kernels.common.checks import check_sinks
from msattn.kernels.types import SparseAttention


def apply_sinks(state: SparseAttention, sinks: Tensor) -> SparseAttention:
    """Adds attention sinks to the softmax of a result, in plain PyTorch.

    Parameters
    ----------
    state : SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` of any operation: the whole result, after merging.
    sinks : Tensor ``[Hq]``
        Finite logits of any floating-point dtype, one for each query head. They are neither scaled
        nor capped.

    Returns
    -------
    SparseAttention
        Of the same shapes and dtypes. A row without visible keys, whose LSE is -inf, has
        ``out = 0`` and the sink as its ``lse``. Differentiable in ``out``, ``lse`` and ``sinks``.

    Raises
    ------
    ValueError
        If ``sinks`` is not a floating-point vector with a logit for each query head, on the device
        of the result.
    """
    out, lse = state
    check_sinks(sinks, lse.shape[1], lse)
    logits = sinks.to(lse.dtype)[:, None]
    # share of the keys in the softmax
    share = (lse - logits).sigmoid().masked_fill(lse == -math.inf, 0)
    return SparseAttention((out * share[..., None]).to(out.dtype), lse.logaddexp(logits))

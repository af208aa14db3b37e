"""Reference of ``merge_states``."""

import math

from torch import Tensor

from msattn.kernels.types import SparseAttention


def merge_states(outs: Tensor, lses: Tensor) -> SparseAttention:
    """Reference of :func:`msattn.kernels.merge_states.merge_states`."""
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None]
    out = (outs.to(lses.dtype) * weights).masked_fill(weights == 0, 0).sum(0)
    return SparseAttention(out.to(outs.dtype), lse)

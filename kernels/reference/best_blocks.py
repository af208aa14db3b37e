"""References of ``block_softmax`` and ``best_blocks``."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def block_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Reference of :func:`msattn.kernels.best_blocks.block_softmax`."""
    lowest = torch.finfo(logits.dtype).min
    return F.softmax(logits.masked_fill(~visible, lowest), dim=-1).masked_fill(~visible, 0)


def block_softmax_backward(gradient: Tensor, probabilities: Tensor) -> Tensor:
    """Returns the gradient of the logits, on both backends."""
    return torch.ops.aten._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype)


def best_blocks(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    always: Tensor,
    threshold: float = math.inf,
    exponent: float = 0.0,
    edge_exponent: float = 0.0,
    above: float = 0.0,
) -> Tensor:
    """Reference of :func:`msattn.kernels.best_blocks.best_blocks`, by sorting."""
    ranked = (
        scores.nan_to_num(nan=torch.finfo(scores.dtype).max)
        .masked_fill(always, math.inf)
        .masked_fill(~visible, -math.inf)
    )
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    taken = torch.arange(scores.shape[-1], device=scores.device) < counts
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, taken.expand_as(order))
    v = visible.sum(-1, keepdim=True).clamp(min=1).float()
    edge = (1 - above / v).where(v > above, 1)
    limit = threshold * (exponent * v.log2() + edge_exponent * edge.log2()).exp2()
    return (mask | always | ((v > above) & (scores >= limit))) & visible

"""Policies: from block scores to a mask, ``policy(scores, visible, always)``.

``scores`` fp32 ``[B, H, Tr, Tc]``, rows of probabilities; ``visible`` and ``always`` bool ``[B | 1, 1, Tr, Tc]``: the blocks
that may be read, and those that must be.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Policy(Protocol):
    """Gives bool ``[B, H, Tr, Tc]``, True in ``always`` and nowhere but in ``visible``."""

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TopK:
    """The best ``max(1, round((1 - sparsity) * v))`` of the ``v`` visible blocks of each row and head."""

    sparsity: float

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        share = 1 - self.sparsity
        counts = (visible.sum(-1, keepdim=True).double() * share).round().clamp(min=1)
        return keep_best(scores, counts, max(1, round(share * scores.shape[-1])), visible, always)


@dataclass(frozen=True)
class TokenBudget:
    """The best blocks that hold ``tokens`` keys together, in each row and head; one block at least."""

    tokens: int
    block_size: int

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        count = max(1, self.tokens // self.block_size)
        return keep_best(scores, torch.full_like(visible[..., :1], count, dtype=torch.long), count, visible, always)


@dataclass(frozen=True)
class Threshold:
    """Every block whose score is at least ``threshold``."""

    threshold: float

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        return (scores >= self.threshold) & visible | always


@dataclass(frozen=True)
class Calibrated:
    """What ``floor`` keeps for each row, and every block that reaches the ``threshold`` solved for the rest of the budget."""

    floor: TopK
    threshold: Threshold

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        return self.floor(scores, visible, always) | self.threshold(scores, visible, always)


@dataclass(frozen=True)
class Nucleus:
    """The fewest blocks of each row whose scores sum to ``mass``, what is always read among them."""

    mass: float

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        order = scores.masked_fill(always, torch.inf).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, before < self.mass)
        return mask & visible | always


def keep_best(scores: Tensor, counts: Tensor, most: int, visible: Tensor, always: Tensor) -> Tensor:
    """The ``counts`` best visible blocks of each row, those in ``always`` first.

    Parameters
    ----------
    scores : fp32 ``[B, H, Tr, Tc]``.
    counts : blocks a row, ``[B | 1, 1, Tr, 1]``; where more are in ``always``, those are read and no others.
    most : the largest of ``counts``, known without asking the device.
    """
    counts = torch.minimum(counts, visible.sum(-1, keepdim=True))
    ranked = scores.masked_fill(~visible, -1).masked_fill_(always, torch.inf)
    best = ranked.topk(min(most, scores.shape[-1]), dim=-1).indices
    keep = torch.arange(best.shape[-1], device=scores.device) < counts
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, keep.expand_as(best))
    return mask | always

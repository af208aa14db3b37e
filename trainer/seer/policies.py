"""Policies: from block scores to a block mask or a zoom map, ``policy(scores, visible, always)``.

``scores`` fp32 ``[B, H, Tr, Tc]``, rows of probabilities; ``visible`` and ``always`` bool ``[B | 1, 1, Tr, Tc]``: the blocks
that may be read, and those that must be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ZOOMS = (1, 2, 4, 8)


class Policy(Protocol):
    """Gives ``[B, H, Tr, Tc]``: bool, True in ``always`` and nowhere but in ``visible``; or uint8 zooms, 1 in ``always`` and
    0 (skip) outside of ``visible``."""

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


@dataclass(frozen=True)
class Multiscale:
    """The best blocks whole, the next ones at half, a quarter and an eighth of their tokens; the rest is skipped.

    ``shares`` of the visible blocks of each row and head are read at zoom 1, 2, 4 and 8; what must be read is read whole,
    within the first share. A row reads ``cost`` of its tokens.
    """

    shares: Sequence[float]

    @property
    def cost(self) -> float:
        """Share of the visible tokens that is read: a pooled token counts as one."""
        return sum(share / zoom for share, zoom in zip(self.shares, ZOOMS, strict=True))

    def __call__(self, scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
        order = scores.masked_fill(always, torch.inf).masked_fill(~visible, -1).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
        counts = visible.sum(-1, keepdim=True).double()
        levels = torch.zeros_like(rank)  # how many of the ranges a block's rank lies beyond
        for end in torch.tensor(self.shares, dtype=torch.float64).cumsum(0).tolist():
            levels += rank >= (counts * end).round()
        zooms = torch.tensor([*ZOOMS, 0], dtype=torch.uint8, device=scores.device)[levels]
        return zooms.masked_fill(~visible, 0).masked_fill(always, 1)


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

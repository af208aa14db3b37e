"""Policies: from block scores to a block mask or a zoom map, ``policy(scores, among)``.

``scores`` fp32 ``[B, H, Tr, Tc]``, rows of probabilities; ``among``: the blocks that may be read, and those that must be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from msattn.kernels.best_blocks import best_blocks
from msattn.trainer.seer.blocks import Candidates

ZOOMS = (1, 2, 4, 8)


class Policy(Protocol):
    """Gives ``[B, H, Tr, Tc]``: bool, True in ``among.always`` and nowhere but in ``among.visible``; or uint8 zooms, 1 in
    ``among.always`` and 0 (skip) outside of ``among.visible``."""

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor: ...


@dataclass(frozen=True)
class TopK:
    """The best ``max(1, round((1 - sparsity) * v))`` of the ``v`` visible blocks of each row and head."""

    sparsity: float

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        return _best(scores, among, 1 - self.sparsity)


@dataclass(frozen=True)
class TokenBudget:
    """The best blocks that hold ``tokens`` keys together, in each row and head; one block at least."""

    tokens: int
    block_size: int

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        counts = torch.full_like(among.visible[..., :1], max(1, self.tokens // self.block_size), dtype=torch.int32)
        return best_blocks(scores, counts, among.visible, among.always)


@dataclass(frozen=True)
class Threshold:
    """Every block whose score is at least ``threshold``."""

    threshold: float

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        return _best(scores, among, 0.0, self.threshold)


@dataclass(frozen=True)
class Calibrated:
    """What ``floor`` keeps for each row, and every block that reaches the ``threshold`` solved for the rest of the budget."""

    floor: TopK
    threshold: Threshold

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        return _best(scores, among, 1 - self.floor.sparsity, self.threshold.threshold)


@dataclass(frozen=True)
class Nucleus:
    """The fewest blocks of each row whose scores sum to ``mass``, what is always read among them."""

    mass: float

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        order = scores.masked_fill(among.always, torch.inf).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, before < self.mass)
        return mask & among.visible | among.always


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

    def __call__(self, scores: Tensor, among: Candidates) -> Tensor:
        zooms = torch.zeros_like(scores, dtype=torch.uint8)
        ends = torch.tensor(self.shares, dtype=torch.float64).cumsum(0).tolist()
        for end, zoom in reversed(list(zip(ends, ZOOMS, strict=True))):  # the finer ones last: they are among the coarser
            zooms.masked_fill_(_best(scores, among, end), zoom)
        return zooms


def _best(scores: Tensor, among: Candidates, share: float, threshold: float = math.inf) -> Tensor:
    """The best blocks of each row, a share of the visible ones, and all that reach the threshold."""
    return best_blocks(scores, among.share(share), among.visible, among.always, threshold=threshold)

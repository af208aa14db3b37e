"""Policies that select blocks by their scores: ``policy(scores, candidates)`` returns a block mask or a zoom map.

``scores`` are fp32 ``[B, H, Tr, Tc]``, each row a probability distribution over the visible blocks, or larger in a last row
(:class:`msattn.trainer.methods.gate.attn_gate.GateScores`). ``candidates`` holds the
blocks that may be read, and those that must be read. In a zoom map, a block at zoom z is read at 1 / z of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from msattn.kernels.best_blocks import best_blocks
from msattn.trainer.methods.blocks import Candidates

ZOOMS = (1, 2, 4, 8)


class Policy(Protocol):
    """Interface of a policy, which returns a mask or a zoom map ``[B, H, Tr, Tc]``.

    A mask is bool, True in ``candidates.always`` and False outside of ``candidates.visible``. A zoom map is uint8, 1 in
    ``candidates.always`` and 0 (skip) outside of ``candidates.visible``.
    """

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor: ...


@dataclass(frozen=True)
class TopK:
    """Selects the best ``max(1, round((1 - sparsity) * v))`` of the ``v`` visible blocks of each row and head."""

    sparsity: float

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        return _best_blocks(scores, candidates, 1 - self.sparsity)


@dataclass(frozen=True)
class TokenBudget:
    """Selects the best blocks of each row and head that together hold ``tokens`` keys, at least one block."""

    tokens: int
    block_size: int

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        counts = torch.full_like(candidates.visible[..., :1], max(1, self.tokens // self.block_size), dtype=torch.int32)
        return best_blocks(scores, counts, candidates.visible, candidates.always)


@dataclass(frozen=True)
class Threshold:
    """Selects every block whose score is at least ``threshold``."""

    threshold: float

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        return _best_blocks(scores, candidates, 0.0, threshold=self.threshold)


@dataclass(frozen=True)
class Calibrated:
    """Selects a share ``floor`` of each row's visible blocks, the best ones, and every block with a high enough score.

    Of a row with ``v > above`` visible blocks, those are the blocks with a score of at least
    ``threshold * v ** exponent * (1 - above / v) ** edge_exponent``, see ``thresholds``. It depends on
    the row alone, so prompts that are read in chunks select the same blocks.
    """

    floor: float
    threshold: float
    exponent: float
    edge_exponent: float
    above: float

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        limit = {"exponent": self.exponent, "edge_exponent": self.edge_exponent, "above": self.above}
        return _best_blocks(scores, candidates, self.floor, threshold=self.threshold, **limit)


@dataclass(frozen=True)
class Nucleus:
    """Selects the fewest blocks of each row with a share ``mass`` of its scores, including those that are always read."""

    mass: float

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        order = scores.masked_fill(candidates.always, torch.inf).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, before < self.mass * ranked.sum(-1, keepdim=True))
        return mask & candidates.visible | candidates.always


@dataclass(frozen=True)
class Multiscale:
    """Selects the best blocks whole, the next ones at a half, a quarter and an eighth of their tokens, and skips the rest.

    ``shares`` of the visible blocks of each row and head are read at zoom 1, 2, 4 and 8. Blocks that must be read are read
    whole and count within the first share.
    """

    shares: Sequence[float]

    @property
    def cost(self) -> float:
        """Share of the visible tokens that is read, where a pooled token counts as one."""
        return sum(share / zoom for share, zoom in zip(self.shares, ZOOMS, strict=True))

    def __call__(self, scores: Tensor, candidates: Candidates) -> Tensor:
        zooms = torch.zeros_like(scores, dtype=torch.uint8)
        ends = torch.tensor(self.shares, dtype=torch.float64).cumsum(0).tolist()
        for end, zoom in reversed(list(zip(ends, ZOOMS, strict=True))):  # finer zooms overwrite coarser ones
            zooms.masked_fill_(_best_blocks(scores, candidates, end), zoom)
        return zooms


def _best_blocks(scores: Tensor, candidates: Candidates, share: float, **limit: Any) -> Tensor:
    """Selects the best blocks of each row, a share of the visible ones, and all blocks that reach the ``limit``."""
    return best_blocks(scores, candidates.share(share), candidates.visible, candidates.always, **limit)

"""Policies, which turn block scores into the blocks to read; the names and ranges of their keys are
those of SelectConfig.

``policy(scores, candidates)`` returns the blocks to read. ``scores`` are fp32 ``[B, H, Tr, Tc]``,
each row a distribution over the visible blocks (larger in the last row of a gate). The result has
the shape of the scores: a bool mask, or uint8 zooms (a block at zoom z is read at 1 / z of its
tokens, at 0 not at all). It contains ``candidates.always`` (zoom 1) and nothing outside of
``candidates.visible``. Nothing here imports torch before it runs: ``--help`` shows the first lines
of the classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from msattn.trainer.config.select import POLICIES, SelectConfig

if TYPE_CHECKING:
    from torch import Tensor

    from msattn.trainer.methods.blocks import Candidates

ZOOMS = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Policy:
    """A policy whose fields are keys of ``select``; raises UserError for a value that SelectConfig
    refuses.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        SelectConfig(self.name, **{key: getattr(self, key) for key in POLICIES[self.name]})


class Best:
    """A policy that selects the best blocks of each row, and those that reach a threshold.

    ``rule(candidates)`` returns the number of the best blocks of each row and the arguments of the
    threshold, as :func:`~msattn.kernels.best_blocks.best_blocks` takes them. With a gate's scores
    :func:`~msattn.kernels.gate_blocks.gate_blocks` follows this rule, and the scores are not held.
    """

    def rule(self, candidates: "Candidates") -> tuple["Tensor", dict[str, Any]]:
        raise NotImplementedError

    def __call__(self, scores: "Tensor", candidates: "Candidates") -> "Tensor":
        counts, limit = self.rule(candidates)
        return candidates.best(scores, counts, **limit)


@dataclass(frozen=True)
class TopK(Best, _Policy):
    """Selects the best blocks of each row, ``1 - sparsity`` of the visible ones.

    Parameters
    ----------
    sparsity : share of the causally visible blocks that is not read, from 0 to less than 1;
        UserError for others.
    """

    name = "topk"
    sparsity: float

    def rule(self, candidates: "Candidates") -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(1 - self.sparsity), {}


@dataclass(frozen=True)
class Calibrated(Best):
    """Selects part of each row's top-k share, and blocks above a threshold.

    ``floor`` is this part, as a share of the visible blocks. The threshold of a row with ``v``
    visible blocks is ``scale * v ** exponent * (1 - above / v) ** edge_exponent``, with the layer's
    parameters (:mod:`msattn.trainer.methods.thresholds`), so ``select.sparsity`` is the mean over
    the rows and heads of a layer. It depends only on the row, so prompts that are read in chunks
    select the same blocks.
    """

    name = "calibrated"
    floor: float
    scale: float
    exponent: float
    edge_exponent: float
    above: float

    def rule(self, candidates: "Candidates") -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(self.floor), {
            "threshold": self.scale,
            "exponent": self.exponent,
            "edge_exponent": self.edge_exponent,
            "above": self.above,
        }


@dataclass(frozen=True)
class Threshold(Best, _Policy):
    """Selects every block whose row-normalised score is at least ``threshold``."""

    name = "threshold"
    threshold: float

    def rule(self, candidates: "Candidates") -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(0.0), {"threshold": self.threshold}


@dataclass(frozen=True)
class Nucleus(_Policy):
    """Selects the fewest blocks of each row whose scores sum to ``mass``."""

    name = "nucleus"
    mass: float

    def __call__(self, scores: "Tensor", candidates: "Candidates") -> "Tensor":
        order = scores.masked_fill(candidates.always, float("inf")).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        needed = before < self.mass * ranked.sum(-1, keepdim=True)
        return needed.scatter(-1, order, needed) & candidates.visible | candidates.always


@dataclass(frozen=True)
class TokenBudget(Best, _Policy):
    """Selects the best blocks of each row, of ``block_size`` keys each, that together hold
    ``tokens`` keys.
    """

    name = "token_budget"
    tokens: int
    block_size: int = 64

    def rule(self, candidates: "Candidates") -> tuple["Tensor", dict[str, Any]]:
        return candidates.number(max(1, self.tokens // self.block_size)), {}


@dataclass(frozen=True)
class Multiscale(_Policy):
    """Selects the best blocks whole and the next ones at lower resolution.

    A block at zoom z is read at 1 / z of its tokens.
    """

    name = "multiscale"
    shares: Sequence[float]

    @property
    def cost(self) -> float:
        """Share of the visible tokens that is read, where a pooled token counts as one."""
        return sum(share / zoom for share, zoom in zip(self.shares, ZOOMS, strict=True))

    def __call__(self, scores: "Tensor", candidates: "Candidates") -> "Tensor":
        import torch

        zooms = torch.zeros_like(scores, dtype=torch.uint8)
        # finer zooms overwrite coarser ones
        for end, zoom in reversed([*zip(accumulate(self.shares), ZOOMS, strict=True)]):
            zooms.masked_fill_(candidates.best(scores, candidates.share(end)), zoom)
        return zooms


BY_NAME: dict[str, Any] = {
    kind.name: kind for kind in (TopK, Calibrated, Threshold, Nucleus, TokenBudget, Multiscale)
}

"""Policies, which turn block scores into the blocks to read. A policy is its own schema: its fields
made by :func:`key` are keys of ``select``.

``policy(scores, candidates)`` returns the blocks to read. ``scores`` are fp32 ``[B, H, Tr, Tc]``,
each row a distribution over the visible blocks (larger in the last row of a gate). The result has
the shape of the scores: a bool mask, or uint8 zooms (a block at zoom z is read at 1 / z of its
tokens, at 0 not at all). It contains ``candidates.always`` (zoom 1) and nothing outside of
``candidates.visible``. Nothing here imports torch before it runs: ``--help`` shows the first lines
of the classes.
"""

from dataclasses import dataclass, fields, make_dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from annotated_types import Interval
from pydantic import AfterValidator

from msattn.kernels.common.choices import ZOOMS
from msattn.trainer.config.schema import Number, Share, Sparsity, Tokens, key, schema
from msattn.trainer.config.values import require

if TYPE_CHECKING:
    from torch import Tensor

SPARSITY = (
    "share of the causally visible blocks that is not read; with select=calibrated a mean over "
    "rows and heads"
)


class Candidates(Protocol):
    """The blocks to select from, see :class:`msattn.trainer.methods.blocks.RowCandidates`."""

    @property
    def visible(self) -> "Tensor": ...
    @property
    def always(self) -> "Tensor": ...
    def share(self, share: float) -> "Tensor": ...
    def number(self, blocks: int) -> "Tensor": ...
    def best(self, scores: "Tensor", counts: "Tensor", **limit: float) -> "Tensor": ...


class Best:
    """A policy that selects the best blocks of each row, and those that reach a threshold.

    ``rule(candidates)`` returns the number of the best blocks of each row and the arguments of the
    threshold, as :func:`~msattn.kernels.best_blocks.best_blocks` takes them. With a gate's scores
    :func:`~msattn.kernels.gate_blocks.gate_blocks` follows this rule, and the scores are not held.
    """

    def rule(self, candidates: Candidates) -> tuple["Tensor", dict[str, Any]]:
        raise NotImplementedError

    def __call__(self, scores: "Tensor", candidates: Candidates) -> "Tensor":
        counts, limit = self.rule(candidates)
        return candidates.best(scores, counts, **limit)


@schema("select.")
class TopK(Best):
    """Selects the best blocks of each row, ``1 - sparsity`` of the visible ones."""

    sparsity: Sparsity = key(SPARSITY, default=0.5)

    def rule(self, candidates: Candidates) -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(1 - self.sparsity), {}


@schema("select.")
class Calibrated:
    """Selects part of each row's top-k share, and blocks above a threshold.

    The threshold depends on the layer, and in it only on the row, so prompts that are read in
    chunks select the same blocks, except in short rows; see :class:`CalibratedLayer`.
    """

    sparsity: Sparsity = key(SPARSITY, default=0.5)


@dataclass(frozen=True)
class CalibratedLayer(Best):
    """The policy ``calibrated`` of one layer.

    ``floor`` is the part of the top-k share, as a share of the visible blocks. The threshold of a
    row with ``v`` visible blocks is ``scale * v ** exponent * (1 - above / v) ** edge_exponent``,
    with the layer's parameters (:mod:`msattn.trainer.methods.thresholds`), so ``select.sparsity``
    is the mean over the rows and heads of a layer.
    """

    floor: float
    scale: float
    exponent: float
    edge_exponent: float
    above: float

    def rule(self, candidates: Candidates) -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(self.floor), {
            "threshold": self.scale,
            "exponent": self.exponent,
            "edge_exponent": self.edge_exponent,
            "above": self.above,
        }


@schema("select.")
class Threshold(Best):
    """Selects every block whose row-normalized score is at least ``threshold``."""

    threshold: Sparsity = key("smallest row-normalized score that is read", default=0.002)

    def rule(self, candidates: Candidates) -> tuple["Tensor", dict[str, Any]]:
        return candidates.share(0.0), {"threshold": self.threshold}


@schema("select.")
class Nucleus:
    """Selects the fewest blocks of each row whose scores sum to ``mass``."""

    mass: Annotated[Number, Interval(gt=0, le=1)] = key(
        "sum of the row-normalized scores of the blocks read", default=0.95
    )

    def __call__(self, scores: "Tensor", candidates: Candidates) -> "Tensor":
        order = scores.masked_fill(candidates.always, float("inf")).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        needed = before < self.mass * ranked.sum(-1, keepdim=True)
        return needed.scatter(-1, order, needed) & candidates.visible | candidates.always


@schema("select.")
class TokenBudget(Best):
    """Selects the best blocks of each row, of ``block_size`` keys each, that together hold
    ``tokens`` keys.
    """

    tokens: Tokens = key(
        "largest number of keys that a query block reads, at least the blocks that are always read",
        default=1024,
    )
    block_size: int = 64  # of the scores

    def rule(self, candidates: Candidates) -> tuple["Tensor", dict[str, Any]]:
        return candidates.number(max(1, self.tokens // self.block_size)), {}


def _four_shares(shares: list[float]) -> list[float]:
    fits = len(shares) == 4 and 0 < sum(shares) <= 1 + 1e-9
    require(
        fits,
        "select.shares",
        shares,
        "expected four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]",
    )
    return shares


@schema("select.")
class Multiscale:
    """Selects the best blocks whole and the next ones at lower resolution.

    A block at zoom z is read at 1 / z of its tokens.
    """

    shares: Annotated[list[Share], AfterValidator(_four_shares)] = key(
        "shares of the visible blocks, best first, that are read at zooms 1, 2, 4 and 8",
        default=[0.1, 0.1, 0.2, 0.4],
    )

    @property
    def cost(self) -> float:
        """Share of the visible tokens that is read, where a pooled token counts as one."""
        return sum(share / zoom for share, zoom in zip(self.shares, ZOOMS, strict=True))

    def __call__(self, scores: "Tensor", candidates: Candidates) -> "Tensor":
        import torch

        zooms = torch.zeros_like(scores, dtype=torch.uint8)
        # finer zooms overwrite coarser ones
        for end, zoom in reversed([*zip(accumulate(self.shares), ZOOMS, strict=True)]):
            zooms.masked_fill_(candidates.best(scores, candidates.share(end)), zoom)
        return zooms


POLICIES: dict[str, type[Any]] = {
    "topk": TopK,
    "calibrated": Calibrated,
    "threshold": Threshold,
    "nucleus": Nucleus,
    "token_budget": TokenBudget,
    "multiscale": Multiscale,
}


def own_keys(policy: str) -> dict[str, Any]:
    """Returns the keys of ``select`` that a policy has, with its defaults."""
    default = POLICIES[policy]()
    return {
        item.name: getattr(default, item.name)
        for item in fields(default)
        if "help" in item.metadata
    }


OWN_KEYS = {
    item.name: item
    for policy in POLICIES.values()
    for item in fields(policy)
    if "help" in item.metadata
}
if TYPE_CHECKING:

    @schema(kw_only=True)
    class PolicyKeys(TopK, Threshold, Nucleus, TokenBudget, Multiscale):
        """The keys of all policies; null stands for the default of the policy."""

else:
    PolicyKeys = make_dataclass(
        "PolicyKeys",
        [
            (name, item.type | None, key(item.metadata["help"], default=None))
            for name, item in OWN_KEYS.items()
        ],
        frozen=True,
        kw_only=True,
    )

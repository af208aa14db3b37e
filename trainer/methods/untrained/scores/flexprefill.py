"""Block scores of FlexPrefill, which chooses a pattern for each head (Lai et al. 2025, arXiv
2502.20766, Algorithms 1 to 4).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows
from msattn.trainer.methods.last_queries import pattern_mass
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.methods.untrained.scores.vertical_slash import VerticalSlash
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class FlexPrefill(UntrainedScorer):
    """Scores blocks by mean-pooled queries and keys where that predicts a head's last queries, by
    vertical-slash elsewhere.

    The pooled estimate of the last queries' attention to each block is compared with the true
    attention by the square root of their Jensen-Shannon divergence. Heads below ``tau`` use the
    query-aware pattern, other heads the vertical-slash pattern of the same queries. FlexPrefill
    then reads the fewest blocks of a head whose estimates sum to a share gamma; ``select=nucleus``
    does so for each row, and other policies read their own share.

    Attributes
    ----------
    tau : largest distance at which a head is query-aware.
    """

    method: ClassVar = Method(
        "flexprefill", "FlexPrefill", style={"color": "#D55E00", "marker": "P"}
    )
    tau: float = 0.1

    def __call__(self, x: LayerInputs) -> Tensor:
        vertical, slash = pattern_mass(x, *self.sizes)
        true = normalize_rows(vertical.unflatten(-1, (-1, self.sizes.keys)).sum(-1))
        query_aware = divergence(self.estimate(x), true).sqrt() < self.tau
        slashes = VerticalSlash(*self.sizes).from_mass(x, vertical, slash)
        return torch.where(query_aware[..., None, None], MeanPool(*self.sizes)(x), slashes)

    def estimate(self, x: LayerInputs) -> Tensor:
        """Returns the attention of the mean of the last ``block_size`` queries to the mean keys of
        blocks: ``[B, Hq, Tc]``.
        """
        queries = x.q[:, :, -self.sizes.queries :].float()
        keys = pool_blocks(x.k, ["avg"], block_size=self.sizes.keys, start=x.kv_start).float()
        length = torch.full_like(x.q[:, 0, 0, 0], x.num_keys, dtype=torch.long) - (
            0 if x.kv_start is None else x.kv_start
        )
        # the others are padding
        last = torch.arange(queries.shape[2], 0, -1, device=x.q.device) <= length[:, None]
        mean = (queries * last[:, None, :, None]).sum(2) / last.sum(1).clamp(min=1)[:, None, None]
        logits = (mean.unflatten(1, (keys.shape[1], -1)) @ keys.mT).flatten(1, 2)
        starts = torch.arange(keys.shape[2], device=x.q.device) * self.sizes.keys
        return (
            x.capped(logits * x.scale)
            .masked_fill((starts >= length[:, None])[:, None], -torch.inf)
            .softmax(-1)
        )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Returns the Jensen-Shannon divergence of distributions ``[..., n]``, in nats: ``[...]``, at
    least 0.
    """
    middle = (p + q) / 2
    nats = torch.xlogy(p, p) + torch.xlogy(q, q) - torch.xlogy(p + q, middle)
    return (nats.sum(-1) / 2).clamp(min=0)  # rounding may make it negative


scorer = FlexPrefill

"""Block scores by upper bounds (Quest, Tang et al. 2024)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from msattn.kernels.best_blocks import block_softmax
from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import aligned_blocks
from msattn.trainer.methods.untrained.base import UntrainedScorer, row_chunks
from msattn.trainer.models.layer_attention import LayerInputs

STYLE = {"color": "#009E73", "marker": "s"}


@dataclass(frozen=True)
class Quest(UntrainedScorer):
    """Scores blocks by upper bounds on the scores of the row block's queries with a block's keys;
    needs no training.

    The bound of Tang et al. 2024 (Quest, Eq. 1), ``sum_d max(q_d max_d, q_d min_d)``, is computed
    for each query, and the row block takes the largest.
    """

    method: ClassVar = Method("quest", "Quest bounds", style=STYLE)

    def __call__(self, x: LayerInputs) -> Tensor:
        # [B, Hq, Tr, block, D]
        queries = aligned_blocks(x.q, self.first_query(x), self.sizes.queries)
        # [B, Hkv, Tc, 2 D]
        bounds = pool_blocks(x.k, ["max", "min"], block_size=self.sizes.keys, start=x.kv_start)
        bounds = bounds.transpose(-1, -2)
        chunks = row_chunks(queries, self.sizes.queries * (bounds.shape[-1] + bounds.shape[-2]))
        logits = [x.capped(self._largest_bound(rows, bounds) * x.scale) for rows in chunks]
        return block_softmax(torch.cat(logits, dim=2), self.visible(x))

    def _largest_bound(self, rows: Tensor, bounds: Tensor) -> Tensor:
        signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], dim=-1).float()
        grouped = signed.unflatten(1, (bounds.shape[1], -1))  # [B, Hkv, G, rows, block, 2 D]
        products = grouped.flatten(2, 4) @ bounds
        return products.unflatten(2, grouped.shape[2:5]).amax(dim=4).flatten(1, 2)


scorer = Quest

"""Pages by upper bounds of the products of a query with their keys (Quest, Tang et al. 2024)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.methods.pages import page_products
from msattn.trainer.methods.untrained_pages import UntrainedPages

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs


class QuestPages(UntrainedPages):
    """Visits the pages with the largest bounds ``sum_d max(q_d max_d, q_d min_d)``, summed over the query group.

    ``max_d`` and ``min_d`` are the largest and the smallest value of channel d among a page's keys after RoPE.
    """

    def summarize(self, x: "LayerInputs") -> Tensor:
        """Returns the maximum and the minimum of each channel: fp32 ``[B, Hkv, P, 2 D]``, fp64 for fp64."""
        return pool_blocks(x.k, ["max", "min"], block_size=self.page_size, start=x.kv_start)

    def head_scores(self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor) -> Tensor:
        """Returns the bounds of each query head ``[B, Hq, P]``, with the dtype of ``summaries [B or 1, Hkv, P, 2 D]``."""
        signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)[:, :, -1].to(summaries.dtype)  # [B, Hq, 2 D]
        return page_products(signed.unflatten(1, (self.kv_heads, -1)), summaries).flatten(1, 2)

"""Pages by upper bounds of the products of a query with their keys (Quest, Tang et al. 2024)."""

import torch
from torch import Tensor

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.saap.pages import PAGE_SIZE, PageRouter


class QuestPages(PageRouter):
    """Visits the pages with the largest bounds ``sum_d max(q_d max_d, q_d min_d)``, summed over the query group.

    ``max_d`` and ``min_d`` are the largest and the smallest value of channel d among a page's keys after RoPE.
    """

    def summarize(self, k: Tensor, start: Tensor | None) -> Tensor:
        """Returns the maximum and the minimum of each channel: fp32 ``[B, Hkv, P, 2 D]``, fp64 for fp64."""
        return pool_blocks(k, ["max", "min"], block_size=PAGE_SIZE, start=start)

    def head_scores(self, summaries: Tensor, q: Tensor) -> Tensor:
        """Returns the bounds of each query head ``[B, Hq, P]``, with the dtype of ``summaries [B or 1, Hkv, P, 2 D]``."""
        sequences = len(summaries)  # one if the queries are those of one sequence, whose summaries are not copied
        signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)[:, :, -1].to(summaries.dtype)  # [B, Hq, 2 D]
        grouped = signed.unflatten(1, (self.kv_heads, -1)).unflatten(0, (sequences, -1))  # [sequences, n, Hkv, group, 2 D]
        bounds = grouped.transpose(1, 2).flatten(2, 3) @ summaries.mT  # [sequences, Hkv, n * group, P]
        return bounds.unflatten(2, grouped.shape[1::2]).transpose(1, 2).flatten(0, 1).flatten(1, 2)

"""Routing to blocks by upper bounds of their scores (Quest, Tang et al. 2024)."""

import torch
from torch import Tensor

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.key_blocks import block_products
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.methods.untrained.scores.quest import STYLE
from msattn.trainer.models.layer_attention import LayerInputs


class QuestBlocks(UntrainedBlocks):
    """Visits the blocks with the largest bounds ``sum_d max(q_d max_d, q_d min_d)``, summed over
    the query group.

    ``max_d`` and ``min_d`` are the largest and the smallest value of channel d among a block's keys
    after RoPE.
    """

    method = Method("Quest pages", style=STYLE)

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns the maximum and the minimum of each channel: fp32 ``[B, Hkv, P, 2 D]``, fp64 for
        fp64.
        """
        return pool_blocks(x.k, ["max", "min"], block_size=self.block_size, start=x.kv_start)

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the bounds of each query head ``[B, Hq, P]``, with the dtype of
        ``summaries [B or 1, Hkv, P, 2 D]``.
        """
        # [B, Hq, 2 D]
        signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)[:, :, -1].to(summaries.dtype)
        return block_products(signed.unflatten(1, (self.kv_heads, -1)), summaries).flatten(1, 2)


router = QuestBlocks

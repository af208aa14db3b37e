"""Block scores of FlashPrefill, single queries against mean keys (Fan et al. 2026, arXiv
2603.06199).
"""

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


@dataclass(frozen=True)
class FlashPrefill(UntrainedScorer):
    """Scores blocks by the exponentials of each query's products with mean-pooled keys, summed over
    the row block's queries.

    Queries are not pooled, so a single query that looks for a block counts. The sums of a row are
    normalized. FlashPrefill then reads the blocks that reach a fraction of the row's largest score,
    besides the first two and the last four; here the policy decides. FlashPrefill omits queries
    that do not see all of a block from the sum, which only affects diagonal blocks.
    """

    method: ClassVar = Method(
        "flashprefill", "FlashPrefill", style={"color": "#0072B2", "marker": "H"}
    )

    def __call__(self, x: LayerInputs) -> Tensor:
        keys = pool_blocks(x.k, ["avg"], block_size=self.sizes.keys, start=x.kv_start).float()
        # [B, Hq, Tr, block, D]
        queries = aligned_blocks(x.q, self.first_query(x), self.sizes.queries)
        rows = self.rows(x)
        repeated = (
            torch.arange(self.sizes.queries, device=x.q.device)
            > (rows.last - rows.first).clamp(min=0)[..., None]
        )
        logits, begin = [], 0
        for chunk in row_chunks(queries, self.sizes.queries * keys.shape[2]):
            part = slice(begin, begin := begin + chunk.shape[2])
            products = chunk.float().unflatten(1, (keys.shape[1], -1)).flatten(2, 4) @ keys.mT
            products = x.capped(products.view(*chunk.shape[:4], -1) * x.scale)
            logits.append(
                products.masked_fill(repeated[:, None, part, :, None], -torch.inf).logsumexp(3)
            )
        return block_softmax(torch.cat(logits, dim=2), self.visible(x))


scorer = FlashPrefill

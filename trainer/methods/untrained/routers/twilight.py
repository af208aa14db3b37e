"""The fewest keys that hold a share of a query's attention: the top-p of Twilight (Lin et al. 2025,
arXiv 2502.02770).
"""

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import aligned_blocks
from msattn.trainer.methods.key_blocks import NOT_FAR, block_products
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.models.layer_attention import LayerInputs

MASS = 0.95  # the paper has 0.85 and 0.95
LEVELS = 15  # steps between the smallest and the largest channel of a key, of 4 bits


class TopPKeys(UntrainedBlocks):
    """Reads the fewest far keys whose estimated attention sums to :data:`MASS`; a block is one key.

    Attention is estimated from 4-bit keys and averaged over the query group. The number of probes
    limits the keys, like the budget of Twilight's first stage; there Quest's pages fill the budget,
    here the keys with the largest estimates. A query with sharp attention reads fewer keys.
    """

    method = Method("Twilight", style={"color": "#8B4789", "marker": "P"})
    block_size = 1

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns the keys, rounded to 4 bits and scaled: fp32 ``[B, Hkv, M, D]``, from the end of
        the left padding on.
        """
        keys = aligned_blocks(x.k, x.kv_start, 1).squeeze(3)
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
        step = ((high - low) / LEVELS).clamp(min=torch.finfo(keys.dtype).tiny)
        return (((keys - low) / step).round() * step + low) * x.scale

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the scaled products of queries and rounded keys: ``[B, Hq, M]``, with the dtype
        of ``summaries``.
        """
        grouped = q[:, :, -1].to(summaries.dtype).unflatten(1, (self.kv_heads, -1))
        return block_products(grouped, summaries).flatten(1, 2)

    def far_scores(
        self, x: LayerInputs, summaries: Tensor, window: int | Tensor, *, by_head: bool = False
    ) -> Tensor:
        """Returns the estimated attention to the far keys, which sums to 1: ``[B, Hkv, M]``, see
        :class:`BlockRouter`.
        """
        logits = super().far_scores(x, summaries, window, by_head=True)
        capped = x.capped(logits).masked_fill(logits == NOT_FAR, NOT_FAR)
        mass = super().probabilities(capped).masked_fill(logits == NOT_FAR, NOT_FAR)
        return mass if by_head else mass.unflatten(1, (self.kv_heads, -1)).mean(2)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Returns ``scores [B, H, M]``, which are probabilities, with 0 for keys that are not
        far.
        """
        return scores.clamp(min=0)

    def best(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the first keys by ``scores [B, H, M]`` that sum to :data:`MASS`: int32
        ``[B, H, L]``, -1 in free places.
        """
        chosen = super().best(scores, probes)
        mass = scores.gather(-1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, 0)
        return chosen.masked_fill(mass.cumsum(-1) - mass >= MASS, -1)


router = TopPKeys

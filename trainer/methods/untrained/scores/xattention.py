"""Block scores of XAttention, sums of strided antidiagonals (Xu et al. 2025, arXiv 2503.16428,
Algorithm 1).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import aligned_blocks, normalize_rows
from msattn.trainer.methods.untrained.base import UntrainedScorer, row_chunks
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class XAttention(UntrainedScorer):
    """Scores blocks by the softmax over the mean scores on antidiagonals of ``stride`` x ``stride``
    tiles.

    Every vertical and every slash crosses an antidiagonal of each tile on its way. A row of tiles
    has a softmax over the tiles that it sees, and a block's score is the sum over its tiles.
    XAttention then reads the fewest blocks of a row whose scores sum to a threshold, which is
    ``select=nucleus``.

    Attributes
    ----------
    stride : tokens of a tile's side, a divisor of the keys of a block; the paper has 8 and 16.
    """

    method: ClassVar = Method("xattention", "XAttention", style={"color": "#CC79A7", "marker": "X"})
    stride: int = 8

    def __call__(self, x: LayerInputs) -> Tensor:
        sizes, heads = self.sizes, x.k.shape[1]
        keys = aligned_blocks(x.k, x.kv_start, sizes.keys).unflatten(3, (-1, self.stride))
        keys = keys.flatten(4).flatten(2, 3).float()  # [B, Hkv, Tc * tiles, stride * D]
        queries = aligned_blocks(x.q, self.first_query(x), sizes.queries).unflatten(
            3, (-1, self.stride)
        )
        # [B, Hq, Tr, tiles, stride * D]: query s meets key stride - 1 - s
        queries = queries.flip(4).flatten(4)
        rows = self.rows(x)
        # [B | 1, Tr, tiles]
        first = rows.first[..., None] + torch.arange(
            0, sizes.queries, self.stride, device=x.q.device
        )
        newest = torch.minimum(first + self.stride - 1, rows.last[..., None])
        filled = first <= rows.last[..., None]
        starts = torch.arange(keys.shape[2], device=x.q.device) * self.stride
        scores, begin = [], 0
        for chunk in row_chunks(queries, queries.shape[3] * keys.shape[2]):
            part = slice(begin, begin := begin + chunk.shape[2])
            logits = chunk.float().unflatten(1, (heads, -1)).flatten(2, 4) @ keys.mT
            logits = logits.view(*chunk.shape[:4], -1)  # [B, Hq, rows, tiles, Tc * tiles]
            seen = (starts <= newest[:, part, :, None])[:, None]
            mass = (
                x.capped(logits * (x.scale / self.stride))
                .masked_fill(~seen, -torch.inf)
                .softmax(-1)
            )
            mass = mass.masked_fill(~seen, 0) * filled[:, None, part, :, None]
            scores.append(mass.sum(3).unflatten(-1, (-1, sizes.keys // self.stride)).sum(-1))
        return normalize_rows(torch.cat(scores, 2) * self.visible(x))


scorer = XAttention

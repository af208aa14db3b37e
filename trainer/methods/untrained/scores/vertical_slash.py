"""Block scores of the vertical-slash pattern (Jiang et al. 2024, MInference 1.0, section 3.2);
needs no training.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows
from msattn.trainer.methods.last_queries import pattern_mass
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class VerticalSlash(UntrainedScorer):
    """Scores blocks by the attention of the last queries to columns (verticals) and to distances
    (slashes).

    A block's score is the largest mass of the verticals and slashes that cross it, so a threshold
    selects all blocks that are crossed by a vertical or slash above it. MInference instead fixes
    the numbers of verticals and slashes of each head, and always adds the first 30 columns and the
    last 100 diagonals (as ``minference`` does); here the policy decides. A partial last block
    counts as a whole block.

    Attributes
    ----------
    last_queries : number of queries at the end of the pass whose attention is computed.
    """

    method: ClassVar = Method(
        "vertical_slash", "vertical slash", style={"color": "#6B8E23", "marker": "p"}
    )
    last_queries: int = 64

    def __call__(self, x: LayerInputs) -> Tensor:
        return self.from_mass(x, *pattern_mass(x, self.last_queries, self.sizes.keys))

    def from_mass(self, x: LayerInputs, vertical: Tensor, slash: Tensor) -> Tensor:
        """Returns the block scores by the mass of verticals and slashes, see
        :func:`pattern_mass`.
        """
        columns = vertical.unflatten(-1, (-1, self.sizes.keys)).amax(-1)[:, :, None]
        return normalize_rows(
            torch.maximum(columns, self._largest_slash(x, slash)) * self.visible(x)
        )

    def _largest_slash(self, x: LayerInputs, slash: Tensor) -> Tensor:
        """Returns the largest mass of the distances between the queries and keys of each block:
        ``[B, Hq, Tr, Tc]``.
        """
        # The distances in a block are up to `less` below and up to `more` above that of its first
        # query and key.
        more, less = self.sizes.queries - 1, self.sizes.keys - 1
        # entry i: up to distance i
        largest = F.max_pool1d(F.pad(slash, (more + less, more)), more + less + 1, stride=1)
        first = self.rows(x).first
        columns = torch.arange(0, x.num_keys, self.sizes.keys, device=x.q.device)
        # [B | 1, Tr, Tc]; blocks outside the range are not visible.
        index = (first[..., None] - columns + more).clamp(0, largest.shape[2] - 1)
        return largest.gather(2, index.flatten(1)[:, None].expand(*slash.shape[:2], -1)).unflatten(
            2, index.shape[1:]
        )


scorer = VerticalSlash

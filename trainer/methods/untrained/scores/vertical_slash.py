"""Block scores of the vertical-slash pattern (Jiang et al. 2024, MInference 1.0, section 3.2); needs no training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import aligned_blocks, normalize_rows
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class VerticalSlash(UntrainedScorer):
    """Scores blocks by the attention of the last queries to columns (verticals) and to distances (slashes).

    A block's score is the largest mass of the verticals and slashes that cross it, so a threshold selects all blocks that are
    crossed by a vertical or slash above it. MInference instead fixes the numbers of verticals and slashes of each head, and
    always adds the first 30 columns and the last 100 diagonals (as ``minference`` does); here the policy decides. A partial
    last block counts as a whole block.

    Attributes
    ----------
    last_queries : number of queries at the end of the pass whose attention is computed.
    """

    method: ClassVar = Method("vertical_slash", "vertical slash", style={"color": "#6B8E23", "marker": "p"})
    last_queries: int = 64

    def __call__(self, x: LayerInputs) -> Tensor:
        return self.from_mass(x, *pattern_mass(x, self.last_queries, self.block_size))

    def from_mass(self, x: LayerInputs, vertical: Tensor, slash: Tensor) -> Tensor:
        """Returns the block scores by the mass of verticals and slashes, see :func:`pattern_mass`."""
        columns = vertical.unflatten(-1, (-1, self.block_size)).amax(-1)[:, :, None]
        return normalize_rows(torch.maximum(columns, self._largest_slash(x, slash)) * self.visible(x))

    def _largest_slash(self, x: LayerInputs, slash: Tensor) -> Tensor:
        """Returns the largest mass of the distances between the queries and keys of each block: ``[B, Hq, Tr, Tc]``."""
        reach = self.block_size - 1  # the distances in a block differ by up to this from that of its first query and key
        # Entry i is of the distances around i - reach: the first is -reach.
        largest = F.max_pool1d(F.pad(slash, (2 * reach, reach)), 2 * reach + 1, stride=1)
        first = self.rows(x).first
        columns = torch.arange(0, x.num_keys, self.block_size, device=x.q.device)
        # [B | 1, Tr, Tc]; blocks outside the range are not visible.
        index = (first[..., None] - columns + reach).clamp(0, largest.shape[2] - 1)
        return largest.gather(2, index.flatten(1)[:, None].expand(*slash.shape[:2], -1)).unflatten(2, index.shape[1:])


def pattern_mass(x: LayerInputs, last_queries: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the attention mass of the last queries by key position and by distance, fp32 ``[B, Hq, P]`` each.

    Positions count from the start of each sequence; P is the number of keys, rounded up to whole blocks.
    """
    positions = last_positions(x, min(last_queries, x.num_queries))
    keys = torch.arange(-(-x.num_keys // block_size) * block_size, device=x.q.device)
    distance = (positions[..., None] - keys)[:, None]  # [B | 1, 1, n, P]: of each key, and the key at each distance
    verticals, slashes = [], []
    for mass in last_attention(x, last_queries, block_size):
        verticals.append(mass.sum(2))
        slashes.append((mass.gather(3, distance.clamp(min=0).expand_as(mass)) * (distance >= 0)).sum(2))
    return torch.cat(verticals, dim=1), torch.cat(slashes, dim=1)


def last_attention(x: LayerInputs, last_queries: int, block_size: int) -> Iterator[Tensor]:
    """Yields the attention of the last queries, for the heads of one key/value head at a time, which bounds the memory.

    It is fp32 ``[B, Hq / Hkv, n, P]``, 0 for padded queries. Positions of keys count from the start of each sequence; P is the
    number of keys, rounded up to whole blocks.
    """
    keys = aligned_blocks(x.k, x.kv_start, block_size).flatten(2, 3)
    positions = last_positions(x, min(last_queries, x.num_queries))
    visible = 0 if x.kv_start is not None else max(0, x.num_keys - positions.shape[1])  # leading keys that all queries see
    hidden = torch.arange(visible, keys.shape[2], device=x.q.device) > positions[..., None]  # [B | 1, n, P - visible]
    for group, own_keys in zip(x.q[:, :, -last_queries:].chunk(keys.shape[1], dim=1), keys.unbind(1), strict=True):
        # Scores that are scaled before they are rounded, without a copy of them in fp32.
        logits = torch.baddbmm(group.new_empty(1, 1, 1), group.flatten(1, 2), own_keys.mT, beta=0, alpha=x.scale)
        logits = x.capped(logits).unflatten(1, group.shape[1:3])
        logits[..., visible:].masked_fill_(hidden[:, None], -torch.inf)
        mass = logits.softmax(-1, dtype=torch.float32)
        yield mass if visible else mass.nan_to_num_(0)


def last_positions(x: LayerInputs, n: int) -> Tensor:
    """Returns the positions of the last ``n`` queries in their sequences, negative in padding: int64 ``[B | 1, n]``."""
    positions = torch.arange(x.num_keys - n, x.num_keys, device=x.q.device)[None]
    return positions if x.kv_start is None else positions - x.kv_start[:, None].long()


scorer = VerticalSlash

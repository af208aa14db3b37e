"""Block maps of a few heads, for pictures in the tracker and the report: true map, gate scores, and
the blocks read.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SIDE = 256  # pixels; larger maps are max-pooled to this size


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Returns at most ``limit`` of ``count`` indices, evenly spaced from the first to the last."""
    number = min(count, limit)
    return [round(i * (count - 1) / max(1, number - 1)) for i in range(number)]


@dataclass
class BlockMaps:
    """Block maps of a few query heads in three layers, collected during forward passes.

    ``maps`` are ``{(layer, head): [true map, gate scores, blocks read]}``, fp32 on the CPU; NaN
    where no query of the row sees a key.
    """

    layers: list[int]  # of which three are drawn
    num_heads: int  # heads of the model
    heads: int = 2  # query heads that are stored
    side: int = MAX_SIDE  # larger maps are max-pooled to this size
    maps: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def shows(self, layer: int) -> bool:
        """Returns True if ``layer`` is one of the three."""
        return layer in [self.layers[i] for i in evenly_spaced(len(self.layers), 3)]

    def add(self, layer: int, visible: Tensor, true: Tensor, gate: Tensor, read: Tensor) -> None:
        """Stores the maps of a layer if it is one of the three, those of the first sequence of the
        batch.

        ``visible``, bool ``[B | 1, 1, Tr, Tc]``, are the blocks that a row may read; ``true``,
        ``gate`` and ``read`` ``[B, Hq | Hkv, Tr, Tc]`` the row-normalized block map, the gate
        scores and the block mask.
        """
        if not self.shows(layer):
            return
        shown = _thumbnail(visible[0, 0].float(), self.side) > 0
        for head in evenly_spaced(self.num_heads, self.heads):
            head_maps = [
                each[0, head * each.shape[1] // self.num_heads].float()
                for each in (true, gate, read)
            ]
            self.maps[layer, head] = [
                _thumbnail(each, self.side).masked_fill(~shown, torch.nan).cpu()
                for each in head_maps
            ]


def _thumbnail(blocks: Tensor, limit: int) -> Tensor:
    """Max-pools ``[Tr, Tc]`` to sides of at most ``limit``."""
    size = [min(side, limit) for side in blocks.shape]
    return F.adaptive_max_pool2d(blocks[None], size)[0]

"""Pictures of block maps, to look at while gates train: what attention holds, what the gate says, what is then read."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.models.tap import LayerInputs
from msattn.trainer.seer.blocks import visible_blocks

LARGEST = 256  # blocks a side of a picture; larger maps are max-pooled to it
LOWEST = 1e-4  # smaller shares of a row look alike
DPI = 120
INVISIBLE = "#E3E3E3"


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, from the first to the last."""
    number = min(count, most)
    return [round(i * (count - 1) / max(1, number - 1)) for i in range(number)]


@dataclass
class BlockMaps:
    """The maps of a few heads of a few layers, as each layer passes by.

    Attributes
    ----------
    num_layers, num_heads : of the model; three layers and two query heads of each are kept.
    maps : ``{(layer, head): [true map, gate's scores, blocks read]}``, fp32 on the CPU, sides of at most ``LARGEST``; NaN where
        no query of the row sees a key.
    """

    num_layers: int
    num_heads: int
    maps: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def add(self, x: LayerInputs, block_size: int, true: Tensor, gate: Tensor, read: Tensor) -> None:
        """Keep the maps of a layer if it is to be shown.

        Parameters
        ----------
        true, gate, read : row-normalised block map, gate's scores and block mask, ``[B, Hq | Hkv, Tr, Tc]``; of a batch the
            first is shown.
        """
        if x.layer not in spread(self.num_layers, 3):
            return
        visible = visible_blocks(x.num_queries, x.num_keys, block_size, x.kv_start, x.q.device)
        seen = _thumbnail(visible[0, 0].float()) > 0
        for head in spread(self.num_heads, 2):
            of_head = [each[0, head * each.shape[1] // self.num_heads].float() for each in (true, gate, read)]
            self.maps[x.layer, head] = [_thumbnail(each).masked_fill(~seen, torch.nan).cpu() for each in of_head]

    def save(self, path: Path, titles: tuple[str, str, str]) -> None:
        """Draw a row of pictures for each head into a PNG file; ``titles`` stand above the columns."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 0.7 + 2.2 * len(self.maps)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(self.maps), 3, squeeze=False)
        image = None
        for axes, ((layer, head), maps) in zip(grid, self.maps.items(), strict=True):
            for each, shown in zip(axes, maps, strict=True):
                each.set(facecolor=INVISIBLE, xticks=[], yticks=[])
                image = each.imshow(
                    shown.clamp(min=LOWEST), norm=LogNorm(LOWEST, 1), cmap="viridis", aspect="equal", interpolation="nearest"
                )
            axes[0].set_ylabel(f"layer {layer}, head {head}", fontsize=9)
        for each, title in zip(grid[0], titles, strict=True):
            each.set_title(title, fontsize=9)
        if image is not None:
            figure.colorbar(image, ax=grid, label="share of the row", shrink=0.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)


def _thumbnail(blocks: Tensor) -> Tensor:
    """``[Tr, Tc]`` with sides of at most ``LARGEST``, each pixel the largest value that it stands for."""
    size = [min(side, LARGEST) for side in blocks.shape]
    return F.adaptive_max_pool2d(blocks[None], size)[0]

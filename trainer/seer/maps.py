"""Pictures of block maps for the tracker: true block map, gate scores, and the blocks read."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.models.tap import LayerInputs
from msattn.trainer.seer.blocks import visible_blocks

MAX_SIDE = 256  # pixels; larger maps are max-pooled to this size
SMALLEST_SHARE = 1e-4  # share of a row; smaller shares have the same colour
DPI = 120
INVISIBLE = "#E3E3E3"


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Returns at most ``limit`` of ``count`` indices, evenly spaced from the first to the last."""
    number = min(count, limit)
    return [round(i * (count - 1) / max(1, number - 1)) for i in range(number)]


@dataclass
class BlockMaps:
    """Block maps of two query heads in three layers, collected during forward passes.

    Attributes
    ----------
    num_layers, num_heads : size of the model.
    maps : ``{(layer, head): [true map, gate scores, blocks read]}``, fp32 on the CPU with sides of at most ``MAX_SIDE``; NaN
        where no query of the row sees a key.
    """

    num_layers: int
    num_heads: int
    maps: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def add(self, x: LayerInputs, block_size: int, true: Tensor, gate: Tensor, read: Tensor) -> None:
        """Stores the maps of a layer if it is one of the three.

        Parameters
        ----------
        true, gate, read : row-normalised block map, gate scores and block mask, ``[B, Hq | Hkv, Tr, Tc]``. The first sequence
            of the batch is stored.
        """
        if x.layer not in evenly_spaced(self.num_layers, 3):
            return
        visible = visible_blocks(x.num_queries, x.num_keys, block_size, x.kv_start, x.q.device)
        shown = _thumbnail(visible[0, 0].float()) > 0
        for head in evenly_spaced(self.num_heads, 2):
            head_maps = [each[0, head * each.shape[1] // self.num_heads].float() for each in (true, gate, read)]
            self.maps[x.layer, head] = [_thumbnail(each).masked_fill(~shown, torch.nan).cpu() for each in head_maps]

    def save(self, path: Path, titles: tuple[str, str, str]) -> None:
        """Writes a PNG file with a row of pictures for each head, under the column ``titles``."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 0.7 + 2.2 * len(self.maps)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(self.maps), 3, squeeze=False)
        image = None
        for axes, ((layer, head), maps) in zip(grid, self.maps.items(), strict=True):
            for each, blocks in zip(axes, maps, strict=True):
                each.set(facecolor=INVISIBLE, xticks=[], yticks=[])
                image = each.imshow(
                    blocks.clamp(min=SMALLEST_SHARE),
                    norm=LogNorm(SMALLEST_SHARE, 1),
                    cmap="viridis",
                    aspect="equal",
                    interpolation="nearest",
                )
            axes[0].set_ylabel(f"layer {layer}, head {head}", fontsize=9)
        for each, title in zip(grid[0], titles, strict=True):
            each.set_title(title, fontsize=9)
        if image is not None:
            figure.colorbar(image, ax=grid, label="share of the row", shrink=0.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)


def _thumbnail(blocks: Tensor) -> Tensor:
    """Max-pools ``[Tr, Tc]`` to sides of at most ``MAX_SIDE``."""
    size = [min(side, MAX_SIDE) for side in blocks.shape]
    return F.adaptive_max_pool2d(blocks[None], size)[0]

"""Pictures of block maps for the tracker and the report: true block map, gate scores, and the blocks read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.storage.replace import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Block maps of a few query heads in three layers, collected during forward passes.

    Attributes
    ----------
    layers : the layers to choose three from.
    num_heads : query heads of the model.
    maps : ``{(layer, head): [true map, gate scores, blocks read]}``, fp32 on the CPU with sides of at most ``side``; NaN
        where no query of the row sees a key.
    heads : number of query heads that are stored.
    side : pixels; larger maps are max-pooled to this size.
    """

    layers: list[int]
    num_heads: int
    heads: int = 2
    side: int = MAX_SIDE
    maps: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def shows(self, layer: int) -> bool:
        """Returns True if ``layer`` is one of the three."""
        return layer in [self.layers[i] for i in evenly_spaced(len(self.layers), 3)]

    def add(self, layer: int, visible: Tensor, true: Tensor, gate: Tensor, read: Tensor) -> None:
        """Stores the maps of a layer if it is one of the three.

        Parameters
        ----------
        visible : bool ``[B | 1, 1, Tr, Tc]``, the blocks that a row may read.
        true, gate, read : row-normalised block map, gate scores and block mask, ``[B, Hq | Hkv, Tr, Tc]``. The first sequence
            of the batch is stored.
        """
        if not self.shows(layer):
            return
        shown = _thumbnail(visible[0, 0].float(), self.side) > 0
        for head in evenly_spaced(self.num_heads, self.heads):
            head_maps = [each[0, head * each.shape[1] // self.num_heads].float() for each in (true, gate, read)]
            self.maps[layer, head] = [_thumbnail(each, self.side).masked_fill(~shown, torch.nan).cpu() for each in head_maps]

    def save(self, path: Path, titles: tuple[str, str, str]) -> None:
        """Writes :func:`draw_maps` as a PNG file."""
        figure = draw_maps(self.maps, titles)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:
            figure.savefig(temporary, dpi=DPI, format="png")


def draw_maps(maps: dict[tuple[int, int], list[Tensor]], titles: tuple[str, str, str]) -> "Figure":
    """Returns a figure with a row of pictures for each layer and head, under the column ``titles``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.7 + 2.2 * len(maps)), layout="compressed")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(maps), 3, squeeze=False)
    image = None
    for axes, ((layer, head), pictures) in zip(grid, maps.items(), strict=True):
        for each, blocks in zip(axes, pictures, strict=True):
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
    return figure


def _thumbnail(blocks: Tensor, limit: int) -> Tensor:
    """Max-pools ``[Tr, Tc]`` to sides of at most ``limit``."""
    size = [min(side, limit) for side in blocks.shape]
    return F.adaptive_max_pool2d(blocks[None], size)[0]

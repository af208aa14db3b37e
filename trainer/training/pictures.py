"""Pictures of block maps, for the tracker and the report: true block map, scores, and the blocks
read, side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msattn.trainer.storage.replace import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

SMALLEST_SHARE = 1e-4  # share of a row; all smaller shares have the same color
DPI = 120
INVISIBLE = "#E3E3E3"


def draw_maps(
    maps: "Mapping[tuple[int, int], Sequence[Tensor]]", titles: Sequence[str]
) -> "Figure":
    """Returns a figure with a row of pictures for each layer and head, under the column
    ``titles``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.7 + 2.2 * len(maps)), layout="compressed")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(maps), 3, squeeze=False)
    shown, image = {"norm": LogNorm(SMALLEST_SHARE, 1), "interpolation": "nearest"}, None
    for axes, ((layer, head), pictures) in zip(grid, maps.items(), strict=True):
        for panel, blocks in zip(axes, pictures, strict=True):
            panel.set(facecolor=INVISIBLE, xticks=[], yticks=[])
            square = blocks.shape[1] / blocks.shape[0]  # also of blocks of fewer keys than queries
            image = panel.imshow(
                blocks.clamp(min=SMALLEST_SHARE), cmap="viridis", aspect=square, **shown
            )
        axes[0].set_ylabel(f"layer {layer}, head {head}", fontsize=9)
    for panel, title in zip(grid[0], titles, strict=True):
        panel.set_title(title, fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, label="share of the row", shrink=0.5)
    return figure


def save_maps(
    path: Path, maps: "Mapping[tuple[int, int], Sequence[Tensor]]", titles: Sequence[str]
) -> None:
    """Writes :func:`draw_maps` as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        draw_maps(maps, titles).savefig(temporary, dpi=DPI, format="png")

"""Block scores of the A shape, sink and local window, with a span for each head (as in Fu et al.
2024, MoA).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows, visible_blocks
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.families import num_heads, num_layers
from msattn.trainer.models.layer_attention import LayerInputs, block_map
from msattn.trainer.models.tap import run_tapped
from msattn.trainer.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# part by which scores that do not fall with the distance are made to fall, which lets a threshold
# tell spans apart
SLOPE = 0.5
LEAST = 1e-9  # scores are positive


def _unmeasured() -> NoReturn:
    raise UserError(
        "select.scores=a_shape: needs spans that msattn eval measures on text; sink_local uses "
        "equal spans"
    )


@dataclass(frozen=True, eq=False)
class AShape(UntrainedScorer):
    """Scores the first block, and other blocks by distance, with the mean scores of each head on
    text.

    A threshold per layer then gives each head its own span. The share of each row that the
    calibrated policy always reads lengthens the span with the context, as in MoA's rule
    ``span = alpha + beta * length``. Top-k reads equal spans in all heads.

    Attributes
    ----------
    profile : fp32 ``[layers, Hq, 1 + T]``: score of the first block, then of blocks at distance 0,
        1, ... before the row's last one. It falls with the distance, so that spans are contiguous;
        beyond T it falls as one over the distance.
    """

    method: ClassVar = Method(
        "a_shape", "A shape by head", style={"color": "#C0A000", "marker": "<"}
    )
    profile: Tensor = field(default_factory=_unmeasured)

    def __call__(self, x: LayerInputs) -> Tensor:
        visible = self.visible(x)
        columns = torch.arange(visible.shape[-1], device=x.q.device)
        # [B | 1, Tr, Tc]
        distance = (visible.sum(-1, keepdim=True) - 1 - columns).clamp(min=0)[:, 0]
        sink, near = (
            self.profile[x.layer].to(x.q.device).split([1, self.profile.shape[2] - 1], dim=1)
        )
        longest = near.shape[1]
        beyond = longest / (distance + 1).clamp(min=longest)
        # [B | 1, Hq, Tr, Tc]
        scores = near[:, distance.clamp(max=longest - 1)].transpose(0, 1) * beyond[:, None]
        scores = torch.where(columns == 0, sink[:, :, None], scores) * visible
        return normalize_rows(scores).expand(x.q.shape[0], -1, -1, -1)


def measure_spans(
    teacher: "PreTrainedModel", chunks: Sequence[dict[str, Tensor]], sizes: BlockSizes
) -> AShape:
    """Returns the A shape whose scores are the means of normalized block maps, of largest
    probabilities, by head and distance.

    ``chunks`` are items ``{"input_ids": int64 [N]}``, from training text and never from test text.
    """
    blocks = max(-(-len(chunk["input_ids"]) // sizes.keys) for chunk in chunks)
    sums = torch.zeros(
        num_layers(teacher.config), num_heads(teacher.config), 1 + blocks, device=teacher.device
    )
    counts = torch.zeros_like(sums)

    def dense_attention_with_sums(x: LayerInputs) -> Tensor:
        dense = block_map(x, sizes)
        visible = visible_blocks(x, sizes)[0, 0, 1:]  # the first row says nothing
        row, column = visible.nonzero(as_tuple=True)
        place = torch.where(column == 0, 0, visible.sum(-1)[row] - column)
        seen = normalize_rows(dense.pooled)[0, :, 1:][:, row, column]
        sums[x.layer].index_add_(1, place, seen)
        counts[x.layer].index_add_(1, place, torch.ones_like(seen))
        return dense.out

    with Progress() as progress:
        tracked = progress.track(chunks, description="measuring the spans of heads, chunks")
        run_tapped(teacher, dense_attention_with_sums, tracked)
    return AShape(*sizes, falling(sums / counts.clamp(min=1)))


def falling(means: Tensor) -> Tensor:
    """Returns profiles ``[..., 1 + T]`` whose scores by distance are those of the furthest block
    that scores as much.
    """
    sink, near = means.clamp(min=LEAST).split([1, means.shape[-1] - 1], dim=-1)
    envelope = near.flip(-1).cummax(-1).values.flip(-1)
    return torch.cat(
        [sink, envelope * torch.linspace(1, 1 - SLOPE, near.shape[-1], device=means.device)], dim=-1
    )


scorer = AShape

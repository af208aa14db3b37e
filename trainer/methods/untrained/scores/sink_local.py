"""Block scores of the first and the nearest blocks (the A shape of StreamingLLM, Xiao et al.
2024).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class SinkLocal(UntrainedScorer):
    """Scores the first block highest, then the nearest ones (the A shape of StreamingLLM),
    regardless of content.
    """

    method: ClassVar = Method(
        "sink_local", "sink + local", style={"color": "#E69F00", "marker": "v"}
    )

    def __call__(self, x: LayerInputs) -> Tensor:
        visible = self.visible(x)
        cols = torch.arange(visible.shape[-1], device=x.q.device)
        distance = visible.sum(-1, keepdim=True) - 1 - cols
        scores = visible / (1 + distance.clamp(min=0)).masked_fill(cols == 0, 1)
        return normalize_rows(scores).expand(x.q.shape[0], x.q.shape[1], -1, -1)


scorer = SinkLocal

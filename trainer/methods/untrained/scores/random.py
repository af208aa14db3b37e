"""Random block scores: the floor that other scores should exceed."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs

STYLE = {"color": "#999999", "marker": "x"}


@dataclass(frozen=True)
class Random(UntrainedScorer):
    """Scores blocks by uniform random numbers, determined by seed, layer and shape."""

    method: ClassVar = Method("random", style=STYLE)
    seed: int = 0

    def __call__(self, x: LayerInputs) -> Tensor:
        visible = self.visible(x)
        generator = torch.Generator(x.q.device).manual_seed(self.seed * 1_000_003 + x.layer)
        shape = (x.q.shape[0], x.q.shape[1], *visible.shape[2:])
        return normalize_rows(torch.rand(shape, generator=generator, device=x.q.device) * visible)


scorer = Random

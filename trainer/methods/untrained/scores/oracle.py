"""The true block map as block scores: what gates learn. It needs dense attention."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from msattn.kernels.types import Pool
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import normalize_rows
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs, block_map


@dataclass(frozen=True)
class Oracle(UntrainedScorer):
    """Scores blocks by the true block map of ``gate.target=mass``, or of another ``target``."""

    method: ClassVar = Method(
        "oracle", servable=False, style={"color": "#222222", "marker": "D", "linestyle": "--"}
    )
    target: Pool = "mass"

    def __call__(self, x: LayerInputs) -> Tensor:
        return normalize_rows(block_map(x, self.sizes, self.target).pooled)


scorer = Oracle

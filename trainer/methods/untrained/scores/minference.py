"""Block scores of MInference: the vertical-slash pattern and its always-read blocks (Jiang et al.
2024, arXiv 2407.02490).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.last_queries import pattern_mass
from msattn.trainer.methods.untrained.scores.vertical_slash import VerticalSlash
from msattn.trainer.models.layer_attention import LayerInputs

FIRST_COLUMNS, LAST_DISTANCES = 30, 100


@dataclass(frozen=True)
class MInference(VerticalSlash):
    """Scores blocks like :class:`VerticalSlash`, with blocks on the first 30 columns and last 100
    diagonals ranked first.

    MInference adds these columns and diagonals to the verticals and slashes of every head. Here
    they get the mass of the head's strongest vertical or slash, so that they come first and count
    towards the share that the policy reads.
    """

    method: ClassVar = Method(
        "minference", "MInference", style={"color": "#A0522D", "marker": "p", "linestyle": "--"}
    )

    def __call__(self, x: LayerInputs) -> Tensor:
        vertical, slash = pattern_mass(x, self.last_queries, self.sizes.keys)
        most = vertical.amax(-1, keepdim=True).maximum(slash.amax(-1, keepdim=True))
        vertical[..., :FIRST_COLUMNS] = most
        slash[..., :LAST_DISTANCES] = most
        return self.from_mass(x, vertical, slash)


scorer = MInference

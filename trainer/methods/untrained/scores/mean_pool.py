"""Block scores of mean-pooled queries and keys."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from msattn.kernels.best_blocks import block_softmax
from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.thresholds import Allocation
from msattn.trainer.methods.untrained.base import UntrainedScorer
from msattn.trainer.models.layer_attention import LayerInputs


@dataclass(frozen=True)
class MeanPool(UntrainedScorer):
    """Scores blocks by the softmax over products of mean-pooled queries and keys after RoPE; needs
    no training.
    """

    method: ClassVar = Method(
        "mean_pool", "mean pooling", style={"color": "#56B4E9", "marker": "^"}
    )
    allocation: ClassVar = Allocation(floor=0.5, pooled=True)

    def __call__(self, x: LayerInputs) -> Tensor:
        mean_q = pool_blocks(x.q, ["avg"], block_size=self.sizes.queries, start=self.first_query(x))
        mean_k = pool_blocks(x.k, ["avg"], block_size=self.sizes.keys, start=x.kv_start)
        # one product for all heads of a query group
        mean_q = mean_q.unflatten(1, (x.k.shape[1], -1)).flatten(2, 3)
        logits = (mean_q @ mean_k.transpose(-1, -2)).unflatten(
            2, (-1, mean_q.shape[2] // (x.q.shape[1] // x.k.shape[1]))
        )
        return block_softmax(x.capped(logits.flatten(1, 2) * x.scale), self.visible(x))


scorer = MeanPool

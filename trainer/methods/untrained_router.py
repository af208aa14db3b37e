"""Base of the routers that have no weights, which an evaluation compares with trained ones."""

import copy
from typing import Self

from torch import nn

from msattn.trainer.config.values import require
from msattn.trainer.models.parallel import HeadShard


class UntrainedRouter(nn.Module):
    """A router that is created for a model instead of loaded.

    Parameters
    ----------
    num_buckets : buckets of each key/value head. A query that visits ``p`` of them reads about ``p / num_buckets`` of the keys.
    layers : indices of the model's routed layers.
    kv_heads : key/value heads of the model.

    Raises
    ------
    UserError : ``num_buckets`` is less than 1.
    """

    artifact = None

    def __init__(self, num_buckets: int, layers: list[int], kv_heads: int) -> None:
        super().__init__()
        require(num_buckets >= 1, "num_buckets", num_buckets, "accepted are 1 or more buckets")
        self.num_buckets, self.layers, self.kv_heads = num_buckets, list(layers), kv_heads

    def shard(self, part: HeadShard) -> Self:
        """Returns the router of a part of the heads, for tensor parallelism."""
        own = copy.copy(self)
        own.kv_heads = self.kv_heads // part.ranks
        return own

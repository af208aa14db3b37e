"""Random buckets that are visited at random: the floor that other routers should exceed."""

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.buckets import BucketRouter, hash32
from msattn.trainer.methods.untrained.base import UntrainedRouter
from msattn.trainer.methods.untrained.scores.random import STYLE

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # keyed by bytes per number
MASK = 2**32 - 1


class RandomBuckets(UntrainedRouter, BucketRouter):
    """A key's bucket is a hash of its bits, and so are a query's scores of the buckets.

    Hashes depend on ``seed``, layer and bits alone. Rounding, which differs between batches, gives
    a key another bucket.
    """

    method = Method("random buckets", style=STYLE)

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Returns a random bucket of each key ``k [B, Hkv, N, D]`` after RoPE: int32
        ``[B, Hkv, N]``.
        """
        return (self._hash(layer, k) % self.num_buckets).to(torch.int32)

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns random scores in [0, 1] for queries ``q [B, Hq, 1, D]`` after RoPE: fp32
        ``[B, Hq, C]``.
        """
        of_query = self._hash(layer, q[:, :, -1])[..., None]
        return (
            hash32(of_query ^ hash32(torch.arange(self.num_buckets, device=q.device))).float()
            / MASK
        )

    def _hash(self, layer: int, vectors: Tensor) -> Tensor:
        """Returns hashes of ``vectors [..., D]``: int64 ``[...]``, 0 to ``2 ** 32 - 1``."""
        words = vectors.contiguous().view(WORDS[vectors.element_size()]).long()
        words = (words ^ (words >> 32)) & MASK
        factors = (
            hash32(
                torch.arange(words.shape[-1], device=words.device)
                ^ hash32(hash32(self.seed & MASK) ^ layer)
            )
            >> 1
            | 1
        )
        return hash32((words * factors & MASK).sum(-1) & MASK)


router = RandomBuckets

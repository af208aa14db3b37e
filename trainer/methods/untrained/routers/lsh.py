"""Keys that collide with the query in hash tables: the sampling of MagicPIG (Chen et al. 2024,
arXiv 2410.16179).

MagicPIG weights the sampled keys by the inverse of their sampling probability; here they are read
without weights.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.trainer.config.values import require
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.models.layer_attention import LayerInputs

BITS, TABLES = 8, 150  # K and L: of MagicPIG's, those that collide with the most keys
COLLISIONS = 2  # tables in which a key has the query's code


class CollidingKeys(UntrainedBlocks):
    """Reads the far keys that share the code of the query in at least two tables; a block is one
    key.

    The code of a vector in a table consists of the signs of its products with :data:`BITS` random
    vectors, which all layers and heads share (SimHash, Charikar 2002). Keys are taken after RoPE
    and centered, because attention does not change if their mean is subtracted. A query searches
    one table after another until enough keys have collided twice, at most :data:`TABLES` tables, so
    it may read fewer keys than requested. A query group reads the keys of all its heads, starting
    with those that collided in the earliest tables.
    """

    method = Method("LSH", style={"color": "#56B4E9", "marker": "^"})
    block_size = 1
    vectors: Tensor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        require(self.head_dim >= 1, "head_dim", self.head_dim, "expected the size of a head")
        generator = torch.Generator().manual_seed(self.seed)
        self.register_buffer(
            "vectors", torch.randn(self.head_dim, TABLES * BITS, generator=generator)
        )

    def codes(self, x: Tensor) -> Tensor:
        """Returns the code of each vector ``x [..., D]`` in each table: int16 ``[..., TABLES]``."""
        signs = (x.to(self.vectors.dtype) @ self.vectors > 0).unflatten(-1, (TABLES, BITS))
        return (signs * 2 ** torch.arange(BITS, device=x.device)).sum(-1, dtype=torch.int16)

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns the codes of the centered keys: int16 ``[B, Hkv, M, TABLES]``, from the end of
        the left padding on.
        """
        keys, last = x.k.to(self.vectors.dtype), x.num_keys - 1
        if x.kv_start is not None:
            positions = x.kv_start[:, None] + torch.arange(x.num_keys, device=keys.device)
            beyond = (positions > last)[:, None, :, None]
            keys = keys.gather(
                2, positions.clamp(max=last).long()[:, None, :, None].expand_as(keys)
            )
            mean = keys.masked_fill(beyond, 0).sum(2, keepdim=True) / (~beyond).sum(
                2, keepdim=True
            ).clamp(min=1)
        else:
            mean = keys.mean(2, keepdim=True)
        return self.codes(keys - mean)

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the number of tables from a key's second collision on, 0 if there is none: fp32
        ``[B, Hq, M]``.
        """
        # [B, Hkv, group, 1, TABLES]
        codes = self.codes(q[:, :, -1]).unflatten(1, (self.kv_heads, -1))[..., None, :]
        collisions = torch.zeros_like(
            codes[..., 0] == summaries[:, :, None, :, 0], dtype=torch.int16
        )
        score = torch.zeros_like(collisions)
        for table in range(TABLES):
            collides = codes[..., table] == summaries[:, :, None, :, table]
            collisions += collides
            score.masked_fill_(collides & (collisions == COLLISIONS), TABLES - table)
        return score.float().flatten(1, 2)

    def scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the largest of :meth:`head_scores` in each query group: fp32 ``[B, Hkv, M]``."""
        return (
            self.head_scores(layer, summaries, q_nope, q, positions)
            .unflatten(1, (self.kv_heads, -1))
            .amax(2)
        )

    def best(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the keys with the highest positive ``scores [B, H, M]``: int32 ``[B, H, L]``, -1
        where a row has fewer.
        """
        chosen = super().best(scores, probes)
        return chosen.masked_fill(scores.gather(-1, chosen.clamp(min=0).long()) <= 0, -1)


router = CollidingKeys

"""Base classes of training-free methods: block scores, routers, and routers of blocks."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from msattn.kernels.common.checks import first_query
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import require
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import RowSpan, row_span, visible_blocks
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.key_blocks import BlockRouter
from msattn.trainer.models.families import head_dim, num_kv_heads
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.parallel import ModelShard

BLOCK_SIZE = 16  # keys
CHUNK_BYTES = 2**28  # bytes in memory at once for scores of single queries


@dataclass(frozen=True)
class UntrainedScorer(ABC):
    """Base of training-free block scores; its fields are those of ``select`` with their names.

    Parameters
    ----------
    block_size : number of tokens in a block.
    key_block_size : number of keys in a block, if they are fewer than its queries; None:
        ``block_size``.
    """

    method: ClassVar[Method]
    block_size: int = 64
    key_block_size: int | None = None

    @property
    def sizes(self) -> BlockSizes:
        """The queries and keys of a block."""
        return BlockSizes.configured("select", self.block_size, self.key_block_size)

    @abstractmethod
    def __call__(self, x: LayerInputs) -> Tensor:
        """Returns the block scores of a layer: fp32 ``[B, Hq, Tr, Tc]``.

        Rows sum to 1 over the :meth:`visible` blocks and are 0 elsewhere
        (``msattn.normalize_rows``). ``x`` holds the queries ``x.q [B, Hq, N, D]``, the keys
        ``x.k [B, Hkv, M, D]``, both after RoPE, and the left padding ``x.kv_start [B]``.
        """

    def visible(self, x: LayerInputs) -> Tensor:
        """Returns the causally visible blocks: bool ``[B | 1, 1, Tr, Tc]``."""
        return visible_blocks(x, self.sizes)

    def rows(self, x: LayerInputs) -> RowSpan:
        """Returns the positions of the row blocks."""
        return row_span(x.num_queries, x.num_keys, self.sizes.queries, x.kv_start, x.q.device)

    def first_query(self, x: LayerInputs) -> Tensor | None:
        """Returns the index of the first query of each sequence that is not padding, int64 ``[B]``;
        None: 0.
        """
        return first_query(x.num_queries, x.num_keys, x.kv_start, x.q.device)


def row_chunks(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Splits row blocks ``[B, H, Tr, ...]``, for each of which ``width`` fp32 numbers a head are
    computed, to save memory.
    """
    return rows.split(max(1, CHUNK_BYTES // (4 * rows.shape[0] * rows.shape[1] * width)), dim=2)


class UntrainedRouter(Router):
    """A router that is created for a model instead of loaded.

    A query that visits ``p`` buckets reads about ``p / num_buckets`` of the keys. Raises UserError
    for fewer than one bucket.
    """

    def __init__(
        self,
        num_buckets: int,
        layers: list[int],
        kv_heads: int,
        *,
        head_dim: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(num_buckets >= 1, "num_buckets", num_buckets, "expected 1 or more buckets")
        self.num_buckets, self.layers, self.kv_heads = num_buckets, list(layers), kv_heads
        self.head_dim, self.seed = head_dim, seed

    @classmethod
    def for_model(cls, config: Any, num_buckets: int, layers: list[int], seed: int) -> Self:
        """Creates the router for the model of ``config``; ``seed`` is that of random ones."""
        return cls(num_buckets, layers, num_kv_heads(config), head_dim=head_dim(config), seed=seed)

    def shard(self, part: ModelShard) -> Self:
        """Returns the router of the layers and heads of a rank."""
        own = copy.copy(self)
        own.layers = part.own(self.layers)
        own.kv_heads = self.kv_heads // part.ranks
        return own


class UntrainedBlocks(UntrainedRouter, BlockRouter):
    """A router of blocks of :data:`BLOCK_SIZE` keys; its number of buckets only defines a unit.

    The number of blocks grows with the sequence, so a query with ``p`` probes reads
    ``p / num_buckets`` of the far blocks, at least one. This is about the share of the far keys
    that it reads with other routers.
    """

    block_size = BLOCK_SIZE

    def visited(self, far: Tensor, probes: Tensor) -> Tensor:
        """Returns the number of blocks that are visited with ``probes``, of ``far`` blocks."""
        rounded = (2 * probes * far + self.num_buckets) // (2 * self.num_buckets)
        return rounded.maximum(probes.clamp(max=1)).minimum(far)

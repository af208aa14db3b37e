"""Key stores: the keys and values that attention reads in a layer, in one tensor or in pages.

A store has the methods for prompts, for new tokens, or for both; ``x`` are the inputs of the layer
for the whole pass.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from msattn.kernels.types import SparseAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.methods.buckets import Buckets
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.dispatch import Dispatch
from msattn.trainer.serving.statistics import Statistics


class RoutedQueries(NamedTuple):
    """Single queries that read buckets together."""

    x: LayerInputs  # one query in each row
    buckets: Buckets
    window: int | Tensor  # number of last keys that are always read, of all rows or int32 [B]


class PromptKeys(Protocol):
    """The keys and values of sequences whose tokens are read together."""

    def scored(
        self, x: LayerInputs, selection: Selection, rotation: Rotation | None
    ) -> Iterable[LayerInputs]:
        """Returns the inputs of a selection, with pooled keys for a gate: one for each block
        mask.
        """

    def read_all(self, x: LayerInputs) -> Tensor:
        """Computes dense attention."""

    def read_blocks(
        self, x: LayerInputs, chosen: Sequence[Tensor], sizes: BlockSizes
    ) -> SparseAttention:
        """Computes attention over the blocks that were ``chosen`` for each of :meth:`scored`."""


class TokenKeys(Protocol):
    """The keys and values of sequences with new tokens."""

    def size(self, x: LayerInputs) -> tuple[int, int | None]:
        """Returns the number of sequences, and of keys of the longest one; None where only the
        device knows it.
        """

    def visible(self, x: LayerInputs) -> Tensor | int | None:
        """Returns the number of visible keys; None if they were counted when the pass began."""

    def read_all(self, x: LayerInputs) -> Tensor:
        """Computes dense attention."""


class RoutedKeys(TokenKeys, Protocol):
    """The keys and values of sequences with new tokens, in buckets."""

    def queries(self, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        """Returns the queries that read buckets together."""

    def counts(self, x: LayerInputs, statistics: Statistics) -> Tensor:
        """Returns the counter of the keys that such queries read, int64 ``[B, Hkv]``."""

    def read_buckets(
        self,
        queries: RoutedQueries,
        probes: Tensor,
        *,
        sink: int,
        counts: Tensor | None = None,
        by_head: bool = False,
    ) -> SparseAttention:
        """Computes the attention of one query per row over the first ``sink`` keys, the window and
        the buckets ``probes``.

        Probes are int32 ``[B, Hkv, L]``, ``[B, Hq, L]`` if query heads choose ``by_head``, without
        repeated buckets in a row. The number of keys read is added to ``counts``.
        """

    def joined(self, x: LayerInputs, outs: list[Tensor]) -> Tensor:
        """Returns the attention of the pass from that of each of :meth:`queries`."""

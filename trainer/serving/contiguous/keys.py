"""Attention over keys and values in one tensor for each layer, with or without a cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection, selected_attention
from msattn.trainer.models.layer_attention import (
    LayerInputs,
    decoded_attention,
    dense_attention,
    score_options,
    with_sinks,
)
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.dispatch import Dispatch, whole_window
from msattn.trainer.serving.key_store import RoutedQueries
from msattn.trainer.serving.statistics import Statistics


class TensorKeys:
    """The keys ``x.k`` and values ``x.v`` of a pass; without a cache, those of its tokens."""

    def knows_blocks(self, x: LayerInputs, gate: Gate | None, rotation: Rotation | None) -> bool:
        """Returns True if the keys before RoPE that a gate needs are known."""
        return gate is None or x.num_queries == x.num_keys

    def scored(
        self, x: LayerInputs, selection: Selection, rotation: Rotation | None
    ) -> Iterable[LayerInputs]:
        return (x,)

    def read_blocks(
        self, x: LayerInputs, chosen: Sequence[Tensor], sizes: BlockSizes
    ) -> SparseAttention:
        return selected_attention(x, chosen[0], sizes)

    def read_all(self, x: LayerInputs) -> Tensor:
        if x.num_queries == 1 and x.q.is_cuda and not x.q.requires_grad:
            return decoded_attention(x).out
        return dense_attention(x)

    def size(self, x: LayerInputs) -> tuple[int, int]:
        return len(x.q), x.num_keys

    def visible(self, x: LayerInputs) -> Tensor | int:
        """Returns the number of keys that the queries see in all rows and key/value heads."""
        rows, heads = x.k.shape[:2]
        if x.kv_len is None:
            # number for a row without padding
            last = x.num_queries * (2 * x.num_keys - x.num_queries + 1) // 2
            keys: Tensor | int = rows * last
        else:
            keys = x.kv_len.sum()
        padding = 0 if x.kv_start is None else x.kv_start.sum() * x.num_queries
        return (keys - padding) * heads


NO_CACHE = TensorKeys()


class IndexedBuckets(NamedTuple):
    """The buckets of cached keys: the index of the keys in them, their sizes and summaries."""

    index: BucketIndex
    counts: Tensor  # int32 [B, Hkv, C]
    summaries: Tensor | None  # [B, Hkv, P, S], with free positions

    def sizes(self) -> Tensor:
        return self.counts

    def of_sequence(self, row: int, queries: int) -> "IndexedBuckets":
        """Returns those of one sequence for a batch of its queries; they share the summaries."""
        one = slice(row, row + 1)
        offsets, order, counts = (
            part[one].expand(queries, -1, -1) for part in (*self.index, self.counts)
        )
        summaries = None if self.summaries is None else self.summaries[one]
        return IndexedBuckets(BucketIndex(offsets, order), counts, summaries)


class BucketKeys(TensorKeys, ABC):
    """The keys and values of a pass whose cache has an index of buckets."""

    @property
    @abstractmethod
    def indexed(self) -> int:
        """The number of first keys that are in the bucket index."""

    @property
    @abstractmethod
    def buckets(self) -> IndexedBuckets:
        """The buckets of the indexed keys."""

    @abstractmethod
    def window(self, recent: int) -> int:
        """Returns the length of the dense window: ``recent``, or the number of keys not yet in the
        index if that is larger.
        """

    def queries(self, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        """Returns the queries of all sequences; several new tokens of one sequence become a batch
        of queries over its keys.
        """
        assert dispatch.routed is not None
        buckets, short, recent = self.buckets, None, dispatch.routed.recent
        if x.kv_start is not None:
            short = dispatch.short_sequences(len(x.q), x.num_keys, x.kv_start)
        if x.num_queries == 1:
            window = whole_window(self.window(recent), x.num_keys, short)
            return [RoutedQueries(x, buckets, window)]
        rows = []
        for row in range(len(x.q)):
            batch, kv_len = _as_batch(x, row)
            window = (kv_len - self.indexed).clamp(min=recent)
            window = whole_window(window, kv_len, None if short is None else short[row])
            rows.append(RoutedQueries(batch, buckets.of_sequence(row, x.num_queries), window))
        return rows

    def counts(self, x: LayerInputs, statistics: Statistics) -> Tensor:
        return statistics.key_counts(len(x.k), x.k.shape[1], x.k.device)

    def read_buckets(
        self,
        queries: RoutedQueries,
        probes: Tensor,
        *,
        sink: int,
        counts: Tensor | None = None,
        by_head: bool = False,
    ) -> SparseAttention:
        """Computes attention as :class:`~msattn.trainer.serving.key_store.RoutedKeys` says.

        If query heads choose, the first ones of all groups are decoded together, then the second
        ones, and so on; ``counts`` sums their keys.
        """
        if not by_head:
            return _decode(queries, probes, sink, counts)
        x, parts = queries.x, []
        group = x.q.shape[1] // x.k.shape[1]
        for member in range(group):
            own = slice(member, None, group)
            sinks = None if x.scoring.sinks is None else x.scoring.sinks[own]
            part = replace(x, q=x.q[:, own], scoring=x.scoring._replace(sinks=sinks))
            parts.append(_decode(queries._replace(x=part), probes[:, own], sink, counts))
        return SparseAttention(
            *(torch.stack(each, 2).flatten(1, 2) for each in zip(*parts, strict=True))
        )

    def joined(self, x: LayerInputs, outs: list[Tensor]) -> Tensor:
        if x.num_queries == 1:
            return outs[0]
        return torch.stack([out.squeeze(2).transpose(0, 1) for out in outs])  # [Hq, N, D] each


def _decode(
    queries: RoutedQueries, probes: Tensor, sink: int, counts: Tensor | None
) -> SparseAttention:
    x, buckets = queries.x, queries.buckets
    assert isinstance(buckets, IndexedBuckets)
    state = bucket_decode(
        x.q, x.k, x.v, buckets.index, probes, recent=queries.window, sink=sink, kv_len=x.kv_len,
        distinct=True, counts=counts, **score_options(x),
    )  # fmt: skip
    return with_sinks(x, state)


def _as_batch(x: LayerInputs, row: int) -> tuple[LayerInputs, Tensor]:
    """Returns the N queries of one sequence as a batch over its keys, which are not copied, and
    the numbers of keys that they see.
    """
    queries = x.num_queries
    one = slice(row, row + 1)

    def as_rows(tokens: Tensor) -> Tensor:
        return tokens[row].transpose(0, 1).unsqueeze(2)  # [H, N, D] -> [N, H, 1, D]

    kv_len = torch.arange(
        x.num_keys - queries + 1, x.num_keys + 1, dtype=torch.int32, device=x.q.device
    )
    batch = replace(
        x,
        q=as_rows(x.q),
        k=x.k[one].expand(queries, -1, -1, -1),
        v=x.v[one].expand(queries, -1, -1, -1),
        q_nope=as_rows(x.q_nope),
        k_nope=as_rows(x.k_nope),
        kv_start=None if x.kv_start is None else x.kv_start[one].expand(queries),
        kv_len=kv_len,
    )
    return batch, kv_len

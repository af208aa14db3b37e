"""Layers of a KV cache that keep keys in buckets (SAAP, arXiv 2502.08246, section 5), or in blocks.

The bucket of a key never changes. The bucket index that the kernel reads is rebuilt every
``rebuild_every`` tokens; until then newer keys belong to the dense window, so that no key is lost
and none is counted twice.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS, Buckets, RoutedQueries
from msattn.trainer.methods.key_blocks import block_of_keys
from msattn.trainer.models.layer_attention import LayerInputs, Pooled, score_options, with_sinks
from msattn.trainer.models.rope import Rotation, keys_before_rope
from msattn.trainer.serving.contiguous.buffers import Buffer
from msattn.trainer.serving.contiguous.layers import GrowingLayer
from msattn.trainer.serving.dispatch import Dispatch, whole_window
from msattn.trainer.serving.statistics import Statistics

REBUILD_EVERY = 64
# tokens after which the bucket index is rebuilt, if the dense window is as long
MAX_UNINDEXED = 1024
ASSIGNED_AT_ONCE = 65536  # keys; bounds the memory of keys before RoPE


class BucketLayer(GrowingLayer):
    """Keys, values and buckets of one layer, for inference; the bucket index is rebuilt every
    ``rebuild_every`` tokens.

    ``partition`` gives keys their buckets: a router, or the k-means of a query classifier.
    """

    def __init__(self, partition: Any, rebuild_every: int = REBUILD_EVERY) -> None:
        super().__init__()
        self.partition, self.num_buckets = partition, partition.num_buckets
        self.rebuild_every = rebuild_every
        self.reset()

    def reset(self) -> None:
        super().reset()
        # int32 [B, Hkv, M], the bucket of each key that has one; -1 for padding
        self.bucket_buffer = Buffer()
        self._order = Buffer()
        self._offsets: Tensor | None = None
        self._sizes: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "BucketLayer":
        """Copies everything except the partition, e.g. for a prefix that several conversations
        share.
        """
        memo[id(self.partition)] = self.partition
        twin = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @property
    def indexed(self) -> int:
        """The number of first keys that are in the bucket index."""
        return self._order.length

    @property
    def summaries(self) -> Tensor | None:
        """Summaries of the buckets ``[B, Hkv, P, S]``, with free positions; None if there are
        none.
        """
        return None

    @property
    def buckets(self) -> Buckets:
        """The buckets of the indexed keys."""
        return Buckets(lambda: self.sizes, self.summaries, self.index)

    @property
    def index(self) -> BucketIndex:
        """The bucket index of keys ``[0, indexed)``; its ``order`` has free positions. RuntimeError
        without keys.
        """
        if self._offsets is None:
            self._store_empty_index()
        assert self._offsets is not None
        assert self._order.memory is not None
        return BucketIndex(self._offsets, self._order.memory)

    @property
    def sizes(self) -> Tensor:
        """The number of indexed keys in each bucket, int32 ``[B, Hkv, C]``, kept with the index."""
        if self._sizes is None:
            self._store_empty_index()
        assert self._sizes is not None
        return self._sizes

    def assign(self, x: LayerInputs, rotation: Rotation | None = None) -> None:
        """Assigns buckets; builds the index first, after a prompt, and when ``rebuild_every`` or
        more keys are missing.

        Must be called once after each update. Keys before ``x.kv_start`` (left padding) get bucket
        -1. With the model's ``rotation``, keys of earlier passes are recovered from the cache, so
        they get buckets only when the index needs them; this assumes consecutive positions in a
        sequence. Without it every pass must assign its own keys, otherwise KeysNotKnown is raised.
        """
        start = self.bucket_buffer.length
        num_new = x.k_nope.shape[2]
        num_keys = self.get_seq_length()
        if start + num_new > num_keys:  # keys were assigned to the layer, which crop does not see
            raise RuntimeError(
                f"assign: {start} keys have buckets, {num_new} are new, but layer {x.layer} holds "
                f"{num_keys}"
            )
        due = self._is_due(num_new)
        if rotation is not None and not due:
            return
        for first in range(start, num_keys, ASSIGNED_AT_ONCE):
            end = min(first + ASSIGNED_AT_ONCE, num_keys)
            new = self._buckets(x, rotation, first, end)
            self.bucket_buffer.reserve(num_keys, new)
            self.bucket_buffer.append(new)
        if due:
            self._rebuild_index(x, rotation)

    def _is_due(self, num_new: int) -> bool:
        """Returns True if a pass over ``num_new`` tokens builds the index."""
        return num_new > MAX_ROUTED_TOKENS or self.indexed == 0 or self.rebuild_due(0)

    def _rebuild_index(self, x: LayerInputs, rotation: Rotation | None) -> None:
        """Builds the index of all keys that have buckets."""
        self._store_index(self.bucket_buffer.filled)

    def _buckets(self, x: LayerInputs, rotation: Rotation | None, first: int, end: int) -> Tensor:
        """Returns the buckets of the keys at positions ``first`` to ``end - 1``, -1 for padding."""
        buckets: Tensor = self.partition.assign(
            x.layer, keys_before_rope(x, first, rotation, end), x.k[:, :, first:end]
        )
        if x.kv_start is None:
            return buckets
        positions = torch.arange(first, end, device=buckets.device)
        return buckets.masked_fill(positions < x.kv_start[:, None, None], -1)

    def rebuild_due(self, new_tokens: int) -> bool:
        """Returns True if the index must be rebuilt after ``new_tokens`` more tokens."""
        return self.get_seq_length() + new_tokens - self.indexed >= self.rebuild_every

    def _store_empty_index(self) -> None:
        if self.keys is None:
            raise RuntimeError("index: the layer has no keys")
        self._store_index(self.keys.new_empty(*self.keys.shape[:2], 0, dtype=torch.int32))

    def _store_index(self, buckets: Tensor | None) -> None:
        """Builds the index of ``buckets``, in the memory of the last one if it has room."""
        assert buckets is not None
        offsets, order = build_bucket_index(buckets, self.num_buckets)
        self._order.length = 0
        self._order.append(order)
        self._keep_offsets(offsets)

    def _keep_offsets(self, offsets: Tensor) -> None:
        """Stores the index offsets and bucket sizes, in the same memory as before if their shape is
        unchanged.
        """
        sizes = offsets.diff(dim=-1)
        if self._offsets is None or self._sizes is None or self._offsets.shape != offsets.shape:
            # a tensor of inference mode could not be written outside of it
            with torch.inference_mode(False):
                self._offsets, self._sizes = offsets.clone(), sizes.clone()
        else:
            self._offsets.copy_(offsets)
            self._sizes.copy_(sizes)

    def window(self, recent: int) -> int:
        """Returns the length of the dense window: ``recent``, or the number of keys not yet in the
        index if that is larger.
        """
        return max(recent, self.get_seq_length() - self.indexed)

    def queries(self, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        """Returns the queries of all sequences; several new tokens of one sequence become a batch
        of queries over its keys.
        """
        assert dispatch.routed is not None
        short, recent = None, dispatch.routed.recent
        if x.kv_start is not None:
            short = dispatch.short_sequences(len(x.q), x.num_keys, x.kv_start)
        if x.num_queries == 1:
            window = whole_window(self.window(recent), x.num_keys, short)
            return [RoutedQueries(x, self.buckets, window)]
        rows = []
        for row in range(len(x.q)):
            batch, kv_len = _as_batch(x, row)
            window = (kv_len - self.indexed).clamp(min=recent)
            window = whole_window(window, kv_len, None if short is None else short[row])
            rows.append(RoutedQueries(batch, self._of_sequence(row, x.num_queries), window))
        return rows

    def _of_sequence(self, row: int, queries: int) -> Buckets:
        """Returns the buckets of one sequence for a batch of its queries; they share the
        summaries.
        """
        one = slice(row, row + 1)
        offsets, order, sizes = (
            part[one].expand(queries, -1, -1) for part in (*self.index, self.sizes)
        )
        summaries = None if self.summaries is None else self.summaries[one]
        return Buckets(lambda: sizes, summaries, BucketIndex(offsets, order))

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
        """Computes attention over buckets; see
        :meth:`~msattn.trainer.serving.attend.BucketKeys.read_buckets`.

        If query heads choose, the first ones of all groups are decoded together, then the second
        ones, and so on.
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

    def _set_length(self, length: int) -> None:
        super()._set_length(length)
        self.bucket_buffer.length = min(length, self.bucket_buffer.length)
        if self.indexed > length:
            buckets = self.bucket_buffer.filled
            assert buckets is not None
            self._store_index(buckets[:, :, : self._still_indexed(length)])

    def _still_indexed(self, length: int) -> int:
        """Returns how many of the first ``length`` keys, which are left, stay in the index."""
        return length

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.bucket_buffer.select_rows(indices)
        self._order.select_rows(indices)
        if self._offsets is not None:
            self._keep_offsets(self._offsets.index_select(0, indices.to(self._offsets.device)))

    def addresses(self) -> tuple[int, ...]:
        return (
            *super().addresses(),
            *(x for part in (*self.index, self.sizes) for x in (part.data_ptr(), part.shape[2])),
        )


class BlockLayer(BucketLayer):
    """A :class:`BucketLayer` whose buckets are blocks, with a summary of each block.

    Each time the index is built, the summaries of all its blocks are computed again. Newer keys
    belong to the dense window.
    """

    def reset(self) -> None:
        super().reset()
        self._summaries = Buffer()
        self._prompt_keys = 0  # keys up to the end of the last prompt

    @property
    def summaries(self) -> Tensor | None:
        return self._summaries.memory if self.indexed else None

    def assign(self, x: LayerInputs, rotation: Rotation | None = None) -> None:
        if self.indexed == 0 or x.k_nope.shape[2] > MAX_ROUTED_TOKENS:
            self._prompt_keys = self.get_seq_length()
        super().assign(x, rotation)

    def _buckets(self, x: LayerInputs, rotation: Rotation | None, first: int, end: int) -> Tensor:
        return block_of_keys(first, end, x.kv_start, self.partition.block_size, x.k.device).expand(
            *x.k.shape[:2], -1
        )

    def _rebuild_index(self, x: LayerInputs, rotation: Rotation | None) -> None:
        """Builds index and summaries of all keys."""
        if self.partition.pools:
            keys = self.pool_keys(self.partition.pools, self.partition.block_size, x, rotation)
            x = replace(x, pooled=Pooled(keys, x.num_keys, self._prompt_keys))
        self._summaries.length = 0
        self._summaries.append(self.partition.summarize(x))
        self.num_buckets = self._summaries.capacity
        super()._rebuild_index(x, rotation)

    def _set_length(self, length: int) -> None:
        super()._set_length(length)
        self._prompt_keys = min(length, self._prompt_keys)

    def _still_indexed(self, length: int) -> int:
        """Leaves out the blocks that contain a key at or after position ``length``, since summaries
        cover whole blocks.
        """
        # the block of an earlier key ends before position length
        return max(0, length - self.partition.block_size + 1)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._summaries.select_rows(indices)

    def addresses(self) -> tuple[int, ...]:
        summaries = self.summaries
        return (
            *super().addresses(),
            *(() if summaries is None else (summaries.data_ptr(), summaries.shape[2])),
        )


class ClusterLayer(BlockLayer):
    """A :class:`BlockLayer` whose buckets are clusters of keys, with the mean key of each.

    Clusters are formed from keys after RoPE, which the cache holds. So a key gets its cluster when
    the index is built, with or without a ``rotation``, and stays in it. The mean of a cluster is
    computed once: a new index adds the means of new clusters, and cropping does not change means.
    """

    def assign(self, x: LayerInputs, rotation: Rotation | None = None) -> None:
        """Clusters new keys and builds the index, in the passes in which :meth:`BucketLayer.assign`
        builds it.
        """
        if self._is_due(x.k_nope.shape[2]):
            super().assign(x, rotation)

    def _buckets(self, x: LayerInputs, rotation: Rotation | None, first: int, end: int) -> Tensor:
        start = None if x.kv_start is None else (x.kv_start - first).clamp(0, end - first)
        clusters, means = self.partition.cluster(x.k[:, :, first:end], start)
        clusters = torch.where(clusters < 0, -1, clusters + self._summaries.length)
        self._summaries.append(means)
        return clusters

    def _rebuild_index(self, x: LayerInputs, rotation: Rotation | None) -> None:
        """Builds the index of all keys; their means are known since they were clustered."""
        self.num_buckets = self._summaries.capacity
        self._store_index(self.bucket_buffer.filled)

    def _still_indexed(self, length: int) -> int:
        return length


def rebuild_every(recent: int) -> int:
    """Returns the tokens after which a bucket index is rebuilt; the dense window, ``recent`` or
    more keys, holds their keys until then.
    """
    return max(REBUILD_EVERY, min(recent, MAX_UNINDEXED))


def _decode(
    queries: RoutedQueries, probes: Tensor, sink: int, counts: Tensor | None
) -> SparseAttention:
    x, index = queries.x, queries.buckets.index
    assert index is not None
    state = bucket_decode(
        x.q, x.k, x.v, index, probes, recent=queries.window, sink=sink, kv_len=x.kv_len,
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
        kv_start=None if x.kv_start is None else x.kv_start[one].expand(queries).contiguous(),
        kv_len=kv_len,
    )
    return batch, kv_len

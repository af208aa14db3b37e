"""Layers of a KV cache that keep keys in buckets (SAAP, arXiv 2502.08246, section 5), or in blocks.

The bucket of a key never changes. The bucket index that the kernel reads is rebuilt every
``rebuild_every`` tokens; until then newer keys belong to the dense window, so that no key is lost
and none is counted twice.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import BucketIndex
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.key_blocks import block_of_keys
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import LayerInputs, Pooled
from msattn.trainer.models.rope import Rotation, keys_before_rope
from msattn.trainer.serving.contiguous.buffer import Buffer
from msattn.trainer.serving.contiguous.keys import BucketKeys, IndexedBuckets, TensorKeys
from msattn.trainer.serving.pooled_keys import PooledKeys

REBUILD_EVERY = 64
# tokens after which the bucket index is rebuilt, if the dense window is as long
MAX_UNINDEXED = 1024
ASSIGNED_AT_ONCE = 65536  # keys; bounds the memory of keys before RoPE


class GrowingLayer(TensorKeys, DynamicLayer):
    """Keys and values of one layer, for inference, in buffers with free positions.

    Appending a token writes only that token, whereas DynamicLayer copies the whole cache. The
    buffers hold keys after RoPE, and values, ``[B, Hkv, M, D]``.
    """

    max_cache_len: int | None = None  # tokens that the static layer before it had room for

    def __init__(self) -> None:
        self.key_buffer, self.value_buffer = Buffer(), Buffer()
        # keyed by poolings and block size
        self.pooled: dict[tuple[str | int, ...], PooledKeys] = {}
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        return self.key_buffer.filled

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:  # type: ignore[override]  # the base class has an attribute
        self.key_buffer = Buffer(keys)

    @property
    def values(self) -> Tensor | None:
        return self.value_buffer.filled

    @values.setter
    def values(self, values: Tensor | None) -> None:  # type: ignore[override]
        self.value_buffer = Buffer(values)

    def get_seq_length(self) -> int:
        """Returns the number of cached tokens."""
        return self.key_buffer.length

    def reset(self) -> None:
        """Removes all tokens."""
        self.keys = self.values = None
        self.pooled = {}
        self.is_initialized = False

    def take_over(self, layer: DynamicLayer | StaticLayer) -> None:
        """Takes over another layer's keys and values without copying them, and the capacity of a
        static layer.
        """
        self.max_cache_len = getattr(layer, "max_cache_len", None)
        if not layer.is_initialized:
            return
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        length = int(layer.get_seq_length())
        self.key_buffer = Buffer(layer.keys, length)
        self.value_buffer = Buffer(layer.values, length)

    def pool_keys(
        self, pools: Sequence[str], block_size: int, x: LayerInputs, rotation: Rotation | None
    ) -> Tensor:
        """Returns the pooled keys of all blocks; see :meth:`PooledKeys.update`. Gates with equal
        poolings share them.
        """
        return self._pooled(pools, block_size).update(x, rotation)

    def _pooled(self, pools: Sequence[str], block_size: int) -> PooledKeys:
        kind = (*pools, block_size)
        if kind not in self.pooled:
            self.pooled[kind] = PooledKeys(pools, block_size)
        return self.pooled[kind]

    def knows_blocks(self, x: LayerInputs, gate: Gate | None, rotation: Rotation | None) -> bool:
        if super().knows_blocks(x, gate, rotation) or gate is None:
            return True
        if gate.cfg.rope == "model":  # caches pool keys before RoPE
            return False
        if not x.rotates or (rotation is not None and x.angles.positions is not None):
            return True
        return self._pooled(*_pools(gate)).first(x.kv_start) >= x.num_keys - x.num_queries

    def scored(
        self, x: LayerInputs, selection: Selection, rotation: Rotation | None
    ) -> Iterable[LayerInputs]:
        gate = selection.gate
        if gate is None or gate.cfg.rope == "model":
            return (x,)
        keys = self.pool_keys(*_pools(gate), x, rotation)
        return (replace(x, pooled=Pooled(keys, x.num_keys)),)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; UserError for a positive number, which had
        another meaning once.
        """
        change = int(tokens_to_remove)  # assisted decoding gives a tensor
        if change > 0:
            raise UserError(f"crop({change}): expected a negative number, of tokens to remove")
        self._set_length(max(0, self.get_seq_length() + change))

    def _set_length(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        self.key_buffer.length = self.value_buffer.length = length
        for pooled in self.pooled.values():
            pooled.crop(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces each row b by row ``beam_idx[b]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times."""
        if self.key_buffer.memory is not None:
            self.batch_select_indices(
                torch.arange(len(self.key_buffer.memory)).repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replaces the rows by the rows ``indices``."""
        for state in (self.key_buffer, self.value_buffer, *self.pooled.values()):
            state.select_rows(indices)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[B, Hkv, N, D]`` and returns all of them ``[B, Hkv, M, D]``;
        keys are after RoPE.
        """
        self.reserve(key_states, value_states)
        self.key_buffer.append(key_states)
        self.value_buffer.append(value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Makes room for new tokens ``[B, Hkv, N, D]``, whose keys and values a kernel will
        write.
        """
        for buffer, new in ((self.key_buffer, keys), (self.value_buffer, values)):
            _check_kind(buffer, new)
            buffer.reserve(buffer.length + new.shape[2], new)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def reserve_token(self) -> None:
        """Makes room for one more token, which a kernel will write."""
        for buffer in (self.key_buffer, self.value_buffer):
            assert buffer.memory is not None
            buffer.reserve(buffer.length + 1, buffer.memory)

    def add_tokens(self, number: int = 1) -> None:
        """Counts tokens that a kernel has written."""
        self.key_buffer.length += number
        self.value_buffer.length += number

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses and sizes of the memory that a captured step reads and writes."""
        buffers = (self.key_buffer, self.value_buffer)
        return tuple(
            x
            for each in buffers
            if each.memory is not None
            for x in (each.memory.data_ptr(), each.capacity)
        )


class BucketLayer(BucketKeys, GrowingLayer):
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
        return self._order.length

    @property
    def summaries(self) -> Tensor | None:
        """Summaries of the buckets ``[B, Hkv, P, S]``, with free positions; None if there are
        none.
        """
        return None

    @property
    def buckets(self) -> IndexedBuckets:
        return IndexedBuckets(self.index, self.sizes, self.summaries)

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
        return max(recent, self.get_seq_length() - self.indexed)

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


def _pools(gate: Gate) -> tuple[Sequence[str], int]:
    """Returns the poolings of a gate, and the keys of its blocks."""
    return gate.cfg.cached_pools, gate.cfg.sizes.keys


def _check_kind(buffer: Buffer, new: Tensor) -> None:
    """Raises UserError unless ``new`` can follow what is held; under autocast dtypes may differ."""
    x = buffer.filled
    if x is None or buffer.length == 0:
        return
    if x.device != new.device or (
        x.dtype != new.dtype and not torch.is_autocast_enabled(new.device.type)
    ):
        there, here = f"{x.dtype} on {x.device}", f"{new.dtype} on {new.device}"
        raise UserError(f"past_key_values: it holds {there}; expected {here}, as in this pass")

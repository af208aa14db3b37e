"""A KV cache that keeps keys in buckets, and decoding attention over it (SAAP, arXiv 2502.08246, section 5).

Usage in an attention function for :func:`msattn.trainer.models.tap.tap`, which gets ``x: LayerInputs`` after the cache update::

    layer = x.cache                                   # a BucketLayer, from `install_layers`
    layer.assign(router, x)                           # in every forward pass, for prompts and single tokens
    if x.num_queries == 1:
        visited = route(router, x, probes)            # int32 [B, Hkv, L]
        out = decode_attention(x, visited, window=layer.window(recent), sink=sink).out

The bucket of a key never changes. The bucket index that the kernel reads is rebuilt every ``rebuild_every`` tokens; until then
newer keys belong to the dense window, so that no key is lost and none is counted twice.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import head_dim, num_kv_heads, served_layers
from msattn.trainer.models.rope import Rotation, keys_before_rope
from msattn.trainer.saap.pages import PageRouter, page_of_keys
from msattn.trainer.saap.routing import Router
from msattn.trainer.serving.buffer import Buffer, grown_capacity
from msattn.trainer.serving.pooled_keys import PooledKeys

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs

REBUILD_EVERY = 64
ASSIGNED_AT_ONCE = 65536  # keys; bounds the memory of keys before RoPE
FEW_TOKENS = 32  # new tokens of a pass that each read buckets; more are a prompt


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, for inference, in buffers with free positions.

    Appending a token writes only that token, whereas DynamicLayer copies the whole cache.

    Attributes
    ----------
    key_buffer, value_buffer : Buffer
        Keys after RoPE, and values, ``[B, Hkv, M, D]``.
    pooled : PooledKeys or None
        Pooled keys for gates, after the first call of :meth:`pool_keys`.
    """

    def __init__(self) -> None:
        self.key_buffer, self.value_buffer = Buffer(), Buffer()
        self.pooled: PooledKeys | None = None
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
        self.keys = self.values = self.pooled = None
        self.is_initialized = False

    def take_over(self, layer: DynamicLayer | StaticLayer) -> None:
        """Takes the keys and values of another layer, without copying them."""
        if not layer.is_initialized:
            return
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        length = int(layer.get_seq_length())
        self.key_buffer, self.value_buffer = Buffer(layer.keys, length), Buffer(layer.values, length)

    def pool_keys(self, pools: list[str], block_size: int, x: "LayerInputs", rotation: Rotation | None) -> Tensor:
        """Returns the pooled keys of all blocks; see :meth:`PooledKeys.update`."""
        if self.pooled is None or (self.pooled.pools, self.pooled.block_size) != (list(pools), block_size):
            self.pooled = PooledKeys(pools, block_size)
        return self.pooled.update(x, rotation)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; UserError for a positive number, which had another meaning once."""
        change = int(tokens_to_remove)  # assisted decoding gives a tensor
        if change > 0:
            raise UserError(f"crop({change}): accepted are negative numbers, of the tokens to remove")
        self._set_length(max(0, self.get_seq_length() + change))

    def _set_length(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        self.key_buffer.length = self.value_buffer.length = length
        if self.pooled is not None:
            self.pooled.crop(length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replaces each row b by row ``beam_idx[b]``."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times."""
        if self.key_buffer.memory is not None:
            self._select_rows(torch.arange(len(self.key_buffer.memory)).repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        self.key_buffer.select_rows(rows)
        self.value_buffer.select_rows(rows)
        if self.pooled is not None:
            self.pooled.select_rows(rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[B, Hkv, N, D]`` and returns all of them ``[B, Hkv, M, D]``; keys are after RoPE.

        Raises
        ------
        UserError : those in the cache have another dtype or lie on another device, as in a cache of another model.
        """
        for buffer, new in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            _check_kind(buffer, new)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.key_buffer.append(key_states)
        self.value_buffer.append(value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def reserve_token(self) -> None:
        """Makes room for one more token, which a kernel will write."""
        for buffer in (self.key_buffer, self.value_buffer):
            assert buffer.memory is not None
            buffer.reserve(buffer.length + 1, buffer.memory)

    def add_token(self) -> None:
        """Counts a token that a kernel has written."""
        self.key_buffer.length += 1
        self.value_buffer.length += 1

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses and sizes of the memory that a captured step reads and writes."""
        buffers = (self.key_buffer, self.value_buffer)
        return tuple(x for each in buffers if each.memory is not None for x in (each.memory.data_ptr(), each.capacity))


class BucketLayer(GrowingLayer):
    """Keys, values and buckets of one layer, for inference.

    Parameters
    ----------
    num_buckets : int
        Buckets of each key/value head.
    rebuild_every : int
        Number of tokens after which the bucket index is rebuilt.

    Attributes
    ----------
    bucket_buffer : Buffer
        int32 ``[B, Hkv, M]``, the bucket of each key that has one; -1 for padding.
    indexed : int
        Keys ``[0, indexed)`` are in the bucket index.
    partition : KMeans or None
        The partition that the buckets belong to; None until an attached model has used the layer.
    """

    def __init__(self, num_buckets: int, rebuild_every: int = REBUILD_EVERY) -> None:
        if rebuild_every < 1:
            raise ValueError(f"rebuild_every={rebuild_every}: expected a number of tokens, 1 or more")
        super().__init__()
        self.num_buckets = num_buckets
        self.rebuild_every = rebuild_every
        self.partition: Any = None
        self.reset()

    def reset(self) -> None:
        """Removes all tokens."""
        super().reset()
        self.bucket_buffer = Buffer()
        self._order = Buffer()
        self._offsets: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "BucketLayer":
        """Copies everything but the partition, as for a prefix that several conversations share."""
        memo[id(self.partition)] = self.partition
        twin = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @property
    def indexed(self) -> int:
        return self._order.length

    @property
    def summaries(self) -> Tensor | None:
        """Summaries of the buckets, with free positions; None if there are none."""
        return None

    @property
    def index(self) -> BucketIndex:
        """The bucket index of keys ``[0, indexed)``; its ``order`` has free positions. RuntimeError without keys."""
        if self.keys is None:
            raise RuntimeError("index: the layer has no keys")
        if self._offsets is None:
            self._store_index(self.keys.new_empty(*self.keys.shape[:2], 0, dtype=torch.int32))
        assert self._offsets is not None
        assert self._order.memory is not None
        return BucketIndex(self._offsets, self._order.memory)

    def assign(self, router: Router | PageRouter, x: "LayerInputs", rotation: Rotation | None = None) -> None:
        """Assigns buckets and rebuilds the index after a prompt, and if ``rebuild_every`` keys or more are not in it.

        Must be called once after each update. Keys before ``x.kv_start`` (left padding) get bucket -1. With the model's
        ``rotation``, keys of earlier passes are recovered from the cache, so that they get their buckets only when the index
        needs them; this takes the positions of a sequence to be consecutive. Without it every pass must assign its own keys.

        Raises
        ------
        RuntimeError : ``assign`` was called twice.
        KeysNotKnown : as :func:`msattn.trainer.models.rope.keys_before_rope`.
        """
        start, num_new, num_keys = self.bucket_buffer.length, x.k_nope.shape[2], self.get_seq_length()
        if start + num_new > num_keys:
            raise RuntimeError(f"assign: {start} keys have buckets, {num_new} are new, but layer {x.layer} holds {num_keys}")
        due = num_new > FEW_TOKENS or self.rebuild_due(0)
        if rotation is not None and not due:
            return
        for first in range(start, num_keys, ASSIGNED_AT_ONCE):
            end = min(first + ASSIGNED_AT_ONCE, num_keys)
            new = self._buckets(router, x, rotation, first, end)
            self.bucket_buffer.reserve(num_keys, new)
            self.bucket_buffer.append(new)
        if due:
            self._store_index(self.bucket_buffer.filled)

    def _buckets(self, router: Any, x: "LayerInputs", rotation: Rotation | None, first: int, end: int) -> Tensor:
        """Returns the buckets of the keys at positions ``first`` to ``end - 1``, -1 for padding."""
        buckets: Tensor = router.assign(x.layer, keys_before_rope(x, first, rotation, end), x.k[:, :, first:end])
        if x.kv_start is None:
            return buckets
        positions = torch.arange(first, end, device=buckets.device)
        return buckets.masked_fill(positions < x.kv_start[:, None, None], -1)

    def rebuild_due(self, new_tokens: int) -> bool:
        """Returns whether the index is to be rebuilt after ``new_tokens`` more tokens."""
        return self.get_seq_length() + new_tokens - self.indexed >= self.rebuild_every

    def _store_index(self, buckets: Tensor | None) -> None:
        """Builds the index of ``buckets``, in the memory of the last one if it has room."""
        assert buckets is not None
        offsets, order = build_bucket_index(buckets, self.num_buckets)
        self._order.length = 0
        self._order.append(order)
        if self._offsets is None or self._offsets.shape != offsets.shape:
            with torch.inference_mode(False):
                self._offsets = offsets.clone()  # a tensor of inference mode could not be written outside of it
        else:
            self._offsets.copy_(offsets)

    def window(self, recent: int) -> int:
        """Returns the length of the dense window: ``recent``, or the number of keys that are not indexed yet if larger."""
        return max(recent, self.get_seq_length() - self.indexed)

    def _set_length(self, length: int) -> None:
        super()._set_length(length)
        self.bucket_buffer.length = min(length, self.bucket_buffer.length)
        if self.indexed > length:
            self._store_index(self.bucket_buffer.filled)

    def _select_rows(self, rows: Tensor) -> None:
        super()._select_rows(rows)
        self.bucket_buffer.select_rows(rows)
        self._order.select_rows(rows)
        if self._offsets is not None:
            with torch.inference_mode(False):
                selected = self._offsets.index_select(0, rows.to(self._offsets.device))
            self._offsets = self._offsets.copy_(selected) if selected.shape == self._offsets.shape else selected

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses and sizes of the memory that a captured step reads and writes."""
        return (*super().addresses(), *(x for part in self.index for x in (part.data_ptr(), part.shape[2])))


class PagedLayer(BucketLayer):
    """A :class:`BucketLayer` whose buckets are pages, with a summary of each page.

    The summaries are computed with the index, of the keys that are in it; newer keys belong to the dense window.

    Parameters
    ----------
    router : summarizes the pages.
    rebuild_every : as for :class:`BucketLayer`.

    Attributes
    ----------
    summaries : Tensor or None
        ``[B, Hkv, P, S]``, see :meth:`msattn.trainer.saap.pages.PageRouter.summarize`; None without indexed keys.
    """

    def __init__(self, router: PageRouter, rebuild_every: int = REBUILD_EVERY) -> None:
        self.router = router
        super().__init__(router.num_buckets, rebuild_every)

    def reset(self) -> None:
        """Removes all tokens."""
        super().reset()
        self._summaries = Buffer()
        self._start: Tensor | None = None

    @property
    def summaries(self) -> Tensor | None:
        return self._summaries.memory if self.indexed else None

    def assign(self, router: Router | PageRouter, x: "LayerInputs", rotation: Rotation | None = None) -> None:
        """Assigns pages and rebuilds index and summaries, as :meth:`BucketLayer.assign`."""
        self._start = x.kv_start
        super().assign(router, x, rotation)

    def _buckets(self, router: Any, x: "LayerInputs", rotation: Rotation | None, first: int, end: int) -> Tensor:
        return page_of_keys(first, end, x.kv_start, x.k.device).expand(*x.k.shape[:2], -1)

    def _store_index(self, buckets: Tensor | None) -> None:
        assert buckets is not None
        assert self.keys is not None
        self._summaries.length = 0
        if buckets.shape[2]:
            self._summaries.append(self.router.summarize(self.keys[:, :, : buckets.shape[2]], self._start))
        self.num_buckets = max(1, self._summaries.capacity)
        super()._store_index(buckets)

    def _select_rows(self, rows: Tensor) -> None:
        super()._select_rows(rows)
        self._summaries.select_rows(rows)
        if self._start is not None:
            self._start = self._start[rows.to(self._start.device)]

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses and sizes of the memory that a captured step reads and writes."""
        summaries = self.summaries
        return (*super().addresses(), *(() if summaries is None else (summaries.data_ptr(), summaries.shape[2])))


def install_layers(
    cache: Cache,
    router: Router | PageRouter | None,
    *,
    num_layers: int,
    served: Sequence[int] | None = None,
    dense_layers: tuple[int, ...] = (0,),
    rebuild_every: int = REBUILD_EVERY,
) -> None:
    """Replaces the layers of a cache: routed ones by :class:`BucketLayer`, others by :class:`GrowingLayer`.

    Those of a :class:`~msattn.trainer.saap.pages.PageRouter` are :class:`PagedLayer`. The tokens that it holds are kept. Layers
    in ``dense_layers`` count as not routed. Only the layers ``served`` (None: all) are replaced.

    Raises
    ------
    UserError : the cache does not keep the full context on the model's device, as quantized, offloaded and sliding ones.
    """
    replaced = range(num_layers) if served is None else served
    check_cache(cache, replaced, num_layers)
    routed = set() if router is None else set(router.layers) - set(dense_layers)
    cache.layers += [DynamicLayer() for _ in range(num_layers - len(cache.layers))]
    for number in replaced:
        held: Any = cache.layers[number]
        fresh = _new_layer(router if number in routed else None, rebuild_every)
        if isinstance(held, type(fresh)):
            continue
        fresh.take_over(held)
        cache.layers[number] = fresh


def _new_layer(router: Router | PageRouter | None, rebuild_every: int) -> GrowingLayer:
    if router is None:
        return GrowingLayer()
    if isinstance(router, PageRouter):
        return PagedLayer(router, rebuild_every)
    return BucketLayer(router.num_buckets, rebuild_every)


def check_cache(cache: Any, replaced: Sequence[int], num_layers: int) -> None:
    """Raises UserError for a cache of which :func:`install_layers` cannot take over the layers ``replaced``."""
    if not isinstance(cache, DynamicCache | StaticCache):
        raise UserError(f"past_key_values: {type(cache).__name__} is not supported; accepted are DynamicCache and StaticCache")
    if len(replaced) < num_layers and isinstance(cache, StaticCache):
        raise UserError("past_key_values: accepted is a DynamicCache, because some layers keep the model's own attention")
    held = [cache.layers[number] for number in replaced if number < len(cache.layers)]
    other = sorted({type(layer).__name__ for layer in held if not _is_replaceable(layer)})
    lazy = getattr(cache, "layer_class_to_replicate", None)
    if not cache.layers and lazy is not None and lazy is not DynamicLayer:
        other = [lazy.__name__]
    if other or cache.offloading:
        kind = "an offloaded cache" if cache.offloading else f"{type(cache).__name__} with layers of type {', '.join(other)}"
        raise UserError(f"past_key_values: {kind} cannot be read sparsely; accepted are DynamicCache and StaticCache")


def check_memory(cache: Any, config: Any, batch: int, tokens: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Checks that a cache can grow by ``tokens`` on a GPU.

    Raises
    ------
    UserError : there is not enough free memory; the message says how many bytes are needed.
    """
    layers = served_layers(config)
    length, capacity = cache.get_seq_length(), cache.layers[layers[0]].key_buffer.capacity
    if device.type != "cuda" or length + tokens <= capacity:
        return
    size_of_token = 2 * batch * num_kv_heads(config) * head_dim(config) * dtype.itemsize * len(layers)
    wanted, held = grown_capacity(length + tokens), size_of_token * capacity
    needed = size_of_token * wanted - held + max(held, size_of_token * wanted) // len(layers)  # layers grow in turn
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reusable
    if needed > free:
        raise UserError(
            f"past_key_values: a cache of {wanted:,} positions for {batch} sequences needs {needed:,} bytes more, and {free:,} "
            "bytes are free; shorten the prompt or make the batch smaller"
        )


def _check_kind(held: Buffer, new: Tensor) -> None:
    """Raises UserError unless ``new`` can follow what is held; under autocast dtypes may differ."""
    x = held.filled
    if x is None or held.length == 0:
        return
    if x.device != new.device or (x.dtype != new.dtype and not torch.is_autocast_enabled(new.device.type)):
        there, here = f"{x.dtype} on {x.device}", f"{new.dtype} on {new.device}"
        raise UserError(f"past_key_values: it holds {there}; accepted is {here}, as in this pass")


def _is_replaceable(layer: Any) -> bool:
    """Returns whether a layer of a cache holds all keys, as one with a window does until that is full."""
    whole = type(layer) in (DynamicLayer, StaticLayer) or isinstance(layer, GrowingLayer)
    return whole or (type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window)


def decode_attention(
    x: "LayerInputs", probes: Tensor, *, window: int | Tensor, sink: int, counts: Tensor | None = None
) -> SparseAttention:
    """Computes the attention of one query per row over the dense window and the visited buckets.

    Parameters
    ----------
    x : LayerInputs
        ``x.cache`` is a :class:`BucketLayer`, after its ``assign`` of this pass. With :func:`queries_as_batch`, rows are
        queries of one of its sequences.
    probes : Tensor
        int32 ``[B, Hkv, L]``, from :func:`msattn.trainer.saap.routing.route`.
    window : int or Tensor int32 ``[B]``
        Number of last keys that are always read: :meth:`BucketLayer.window`.
    sink : int
        Number of first keys that are always read.
    counts : Tensor int64 ``[B, Hkv]``, optional
        The number of keys that are read is added to it.

    Returns
    -------
    SparseAttention : ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]``.
    """
    index = BucketIndex(*(part.expand(len(x.q), -1, -1) for part in x.cache.index))
    return bucket_decode(
        x.q, x.k, x.v, index, probes,
        recent=window, sink=sink, scale=x.scale, kv_start=x.kv_start, kv_len=x.kv_len, counts=counts,
    )  # fmt: skip


def decode_query_heads(
    x: "LayerInputs", probes: Tensor, *, window: int | Tensor, sink: int, counts: Tensor | None = None
) -> SparseAttention:
    """Computes :func:`decode_attention` with separate ``probes [B, Hq, L]`` for each query head.

    The first query heads of all groups are decoded together, then the second ones, and so on. ``counts`` adds up their keys.
    """
    group = x.q.shape[1] // x.k.shape[1]
    parts = [
        decode_attention(replace(x, q=x.q[:, member::group]), probes[:, member::group], window=window, sink=sink, counts=counts)
        for member in range(group)
    ]
    return SparseAttention(*(torch.stack(each, 2).flatten(1, 2) for each in zip(*parts, strict=True)))


def queries_as_batch(x: "LayerInputs", row: int) -> "LayerInputs":
    """Returns the N queries of one sequence as a batch over its keys, which are not copied.

    Query i sees the first ``kv_len[i]`` keys.
    """
    queries = x.num_queries
    one = slice(row, row + 1)

    def as_rows(of_tokens: Tensor) -> Tensor:
        return of_tokens[row].transpose(0, 1).unsqueeze(2)  # [H, N, D] -> [N, H, 1, D]

    return replace(
        x,
        q=as_rows(x.q),
        k=x.k[one].expand(queries, -1, -1, -1),
        v=x.v[one].expand(queries, -1, -1, -1),
        q_nope=as_rows(x.q_nope),
        k_nope=as_rows(x.k_nope),
        kv_start=None if x.kv_start is None else x.kv_start[one].expand(queries),
        kv_len=torch.arange(x.num_keys - queries + 1, x.num_keys + 1, dtype=torch.int32, device=x.q.device),
        cache=_OneRow(
            BucketIndex(*(part[one] for part in x.cache.index)), None if x.cache.summaries is None else x.cache.summaries[one]
        ),
    )


class _OneRow(NamedTuple):
    """The index and the summaries of one sequence of a :class:`BucketLayer`."""

    index: BucketIndex
    summaries: Tensor | None

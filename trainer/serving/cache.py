"""A KV cache that keeps keys in buckets, and decoding attention over it (SAAP, arXiv 2502.08246, section 5).

Usage in an attention function for :func:`msattn.trainer.models.tap.tap`, which gets ``x: LayerInputs`` after the cache update::

    layer = x.cache                                   # a BucketLayer, from `install_layers`
    layer.assign(router, x)                           # in every forward pass, for prompts and single tokens
    if x.num_queries == 1:
        visited = route(router, x, probes)            # int32 [B, Hkv, L]
        out = decode_attention(x, visited, recent=recent, sink=sink).out
        count = layer.keys_read(visited, recent=recent, sink=sink, kv_start=x.kv_start)   # [B, Hkv], for statistics

The bucket of a key never changes. The bucket index that the kernel reads is rebuilt every ``rebuild_every`` tokens; until then
newer keys belong to the dense window, so that no key is lost and none is counted twice.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.common.bucket_counts import keys_read
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.models.rope import Rotation, keys_before_rope
from msattn.trainer.saap.routing import Router
from msattn.trainer.serving.pooled_keys import PooledKeys

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs

MIN_FREE = 256  # smallest number of free positions in a grown buffer


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, for inference, as views of buffers with free positions.

    Appending a token writes only that token, whereas DynamicLayer copies the whole cache.

    Attributes
    ----------
    pooled : PooledKeys or None
        Pooled keys for gates, after the first call of :meth:`pool_keys`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.pooled: PooledKeys | None = None

    def reset(self) -> None:
        """Removes all tokens."""
        self.keys = self.values = self.key_buffer = self.value_buffer = self.pooled = None
        self.is_initialized = False

    def take_over(self, layer: DynamicLayer) -> None:
        """Takes the keys and values of another layer, without copying them."""
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.keys, self.values = layer.keys, layer.values

    def pool_keys(self, pools: list[str], block_size: int, x: "LayerInputs", rotation: Rotation | None) -> Tensor:
        """Returns the pooled keys of all blocks; see :meth:`PooledKeys.update`."""
        if self.pooled is None or (self.pooled.pools, self.pooled.block_size) != (list(pools), block_size):
            self.pooled = PooledKeys(pools, block_size)
        return self.pooled.update(x, rotation)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; ``tokens_to_remove`` has the sign convention of the installed transformers."""
        super().crop(tokens_to_remove)
        if self.pooled is not None:
            self.pooled.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replaces each row b by row ``beam_idx[b]``."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times."""
        if self.keys is not None:
            self._select_rows(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = select_rows(self.keys, rows), select_rows(self.values, rows)
        if self.pooled is not None:
            self.pooled.select_rows(rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[B, Hkv, N, D]`` and returns all of them ``[B, Hkv, M, D]``; keys are after RoPE."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.key_buffer = _append(self.keys, self.key_buffer, key_states)
        self.values, self.value_buffer = _append(self.values, self.value_buffer, value_states)
        return self.keys, self.values


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
    buckets : Tensor or None
        int32 ``[B, Hkv, M]``, the bucket of each key; -1 for padding.
    indexed : int
        Keys ``[0, indexed)`` are in the bucket index.
    partition : KMeans or None
        The partition that the buckets belong to; None until an attached model has used the layer.
    """

    def __init__(self, num_buckets: int, rebuild_every: int = 64) -> None:
        super().__init__()
        if rebuild_every < 1:
            raise ValueError(f"rebuild_every={rebuild_every}: expected a number of tokens, 1 or more")
        self.num_buckets = num_buckets
        self.rebuild_every = rebuild_every
        self.partition: Any = None
        self.reset()

    def reset(self) -> None:
        """Removes all tokens."""
        super().reset()
        self.buckets = self.bucket_buffer = None
        self._index: BucketIndex | None = None
        self.indexed = 0

    @property
    def index(self) -> BucketIndex:
        """The bucket index of keys ``[0, indexed)``; RuntimeError before the first call of :meth:`assign`."""
        if self._index is None:
            raise RuntimeError("index: no key has a bucket yet; call assign(router, x) after the cache's update")
        return self._index

    def assign(self, router: Router, x: "LayerInputs", rotation: Rotation | None = None) -> None:
        """Assigns buckets to the keys that have none, and rebuilds the index every ``rebuild_every`` tokens.

        Must be called once after each update. Keys before ``x.kv_start`` (left padding) get bucket -1. Keys of earlier passes
        without buckets, as in a cache that was filled outside an attached model, are recovered with the model's ``rotation``.

        Raises
        ------
        RuntimeError : ``assign`` was called twice.
        KeysNotKnown : as :func:`msattn.trainer.models.rope.keys_before_rope`.
        """
        start = 0 if self.buckets is None else self.buckets.shape[2]
        num_new, num_keys = x.k_nope.shape[2], self.get_seq_length()
        if start + num_new > num_keys:
            raise RuntimeError(f"assign: {start} keys have buckets, {num_new} are new, but layer {x.layer} holds {num_keys}")
        new = router.assign(x.layer, keys_before_rope(x, start, rotation), x.k[:, :, start:])
        if x.kv_start is not None:
            positions = torch.arange(start, num_keys, device=new.device)
            new = new.masked_fill(positions < x.kv_start[:, None, None], -1)
        self.buckets, self.bucket_buffer = _append(self.buckets, self.bucket_buffer, new)
        if self._index is None or num_keys - start > 1 or num_keys - self.indexed >= self.rebuild_every:
            self.rebuild_index()

    def rebuild_index(self) -> None:
        """Rebuilds the bucket index from every key that has a bucket."""
        self.indexed = 0 if self.buckets is None else self.buckets.shape[2]
        self._index = None if self.buckets is None or self.indexed == 0 else build_bucket_index(self.buckets, self.num_buckets)

    def window(self, recent: int) -> int:
        """Returns the length of the dense window: ``recent``, or the number of keys that are not indexed yet if larger."""
        return max(recent, self.get_seq_length() - self.indexed)

    def keys_read(self, probes: Tensor, *, recent: int, sink: int, kv_start: Tensor | None = None) -> Tensor:
        """Returns the number of keys that :func:`decode_attention` reads, int64 ``[B, Hkv]``."""
        assert self.buckets is not None
        window = self.window(recent)
        return keys_read(self.index, self.buckets, probes, indexed=self.indexed, recent=window, sink=sink, kv_start=kv_start)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; ``tokens_to_remove`` has the sign convention of the installed transformers."""
        super().crop(tokens_to_remove)
        num_keys = self.get_seq_length()
        if self.buckets is not None:
            self.buckets = self.buckets[:, :, :num_keys]
        if self.indexed > num_keys:
            self.rebuild_index()

    def _select_rows(self, rows: Tensor) -> None:
        super()._select_rows(rows)
        if self.buckets is not None:
            self.buckets = select_rows(self.buckets, rows)
        if self._index is not None:
            self._index = BucketIndex(*(select_rows(part, rows) for part in self._index))


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the ``rows`` of a batch."""
    return x.index_select(0, rows.to(x.device))


def _append(held: Tensor | None, buffer: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """Appends ``new`` to ``held`` along dimension 2; returns the result, a view of the start of a buffer, and the buffer.

    If ``buffer`` is full, or ``held`` is no longer a view of it (after its rows were selected), ``held`` is copied to a new
    buffer with at least an eighth of free positions.
    """
    begin = 0 if held is None else held.shape[2]
    end = begin + new.shape[2]
    if buffer is None or end > buffer.shape[2] or (held is not None and held.data_ptr() != buffer.data_ptr()):
        buffer = new.new_empty(*new.shape[:2], end + max(MIN_FREE, end // 8), *new.shape[3:])
        if held is not None:
            buffer[:, :, :begin] = held
    buffer[:, :, begin:end] = new
    return buffer[:, :, :end], buffer


def install_layers(
    cache: Cache, router: Router | None, *, num_layers: int, dense_layers: tuple[int, ...] = (0,), rebuild_every: int = 64
) -> None:
    """Replaces the layers of a ``DynamicCache``: routed ones by :class:`BucketLayer`, others by :class:`GrowingLayer`.

    The tokens that it holds are kept. Layers in ``dense_layers`` count as not routed.

    Raises
    ------
    ValueError : the cache has layers that do not keep the full context.
    """
    other = sorted({type(layer).__name__ for layer in cache.layers if not is_replaceable(layer)})
    if other:
        raise ValueError(f"cache has layers of type {', '.join(other)}: expected DynamicLayer, which keeps the full context")
    routed = set() if router is None else set(router.layers) - set(dense_layers)
    for number in range(num_layers):
        held: Any = cache.layers[number] if number < len(cache.layers) else None
        wanted = BucketLayer if number in routed else GrowingLayer
        if isinstance(held, wanted):
            continue
        fresh = BucketLayer(router.num_buckets, rebuild_every) if router is not None and number in routed else GrowingLayer()
        if held is not None and held.get_seq_length():
            fresh.take_over(held)
        cache.layers[number : number + 1] = [fresh]


def is_replaceable(layer: Any) -> bool:
    """Returns whether :func:`install_layers` accepts a cache with this layer."""
    return type(layer) is DynamicLayer or isinstance(layer, GrowingLayer)


def decode_attention(x: "LayerInputs", probes: Tensor, *, recent: int, sink: int) -> SparseAttention:
    """Computes the attention of the newest token over the dense window and the visited buckets.

    Parameters
    ----------
    x : LayerInputs
        One query per sequence. ``x.cache`` is a :class:`BucketLayer`, after its ``assign`` of this pass.
    probes : Tensor
        int32 ``[B, Hkv, L]``, from :func:`msattn.trainer.saap.routing.route`.
    recent, sink : int
        Numbers of last and first keys that are always read.

    Returns
    -------
    SparseAttention : ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]``.
    """
    layer: BucketLayer = x.cache
    return bucket_decode(
        x.q, x.k, x.v, layer.index, probes, recent=layer.window(recent), sink=sink, scale=x.scale, kv_start=x.kv_start
    )

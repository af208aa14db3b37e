"""The KV cache that keeps its keys in buckets, and one decoding step over it (SAAP, arXiv 2502.08246, section 5).

In the attention function that :func:`msattn.trainer.models.tap.tap` calls with ``x: LayerInputs``, the cache being up to date::

    layer = x.cache                                   # a BucketLayer, put there by `install`
    layer.assign(router, x)                           # every forward pass, prompt and single tokens alike
    if x.num_queries == 1:
        visited = route(router, x, probes)            # int32 [B, Hkv, L]
        out = decode(x, visited, recent=recent, sink=sink).out
        count = layer.keys_read(visited, recent=recent, sink=sink, kv_start=x.kv_start)   # [B, Hkv], for statistics

A key's bucket is fixed when the key is made. The lists that the kernel reads are made anew every ``merge_every`` tokens; until
then newer keys belong to the dense window: a key is never lost, and the kernel never counts one twice.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.common.bucket_counts import keys_read
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.saap.routing import Router

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs

ROOM = 256  # smallest number of free positions a grown buffer has


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, for inference: views of buffers with room to grow.

    A token costs its own bytes, not a copy of the cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_room: Tensor | None = None
        self.value_room: Tensor | None = None

    def reset(self) -> None:
        """Forgets everything."""
        self.keys = self.values = self.key_room = self.value_room = None
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends ``[B, Hkv, N, D]`` and returns all keys (after RoPE) and values ``[B, Hkv, M, D]``."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.key_room = _append(self.keys, self.key_room, key_states)
        self.values, self.value_room = _append(self.values, self.value_room, value_states)
        return self.keys, self.values


class BucketLayer(GrowingLayer):
    """One layer's keys, values and buckets, for inference.

    Parameters
    ----------
    num_buckets : int
        Buckets of each key/value head.
    merge_every : int
        Tokens between two makings of the lists.

    Attributes
    ----------
    buckets : Tensor or None
        int32 ``[B, Hkv, M]``, the bucket of each key; -1 for padding.
    indexed : int
        Keys ``[0, indexed)`` are in the lists.
    partition : KMeans or None
        Whose buckets they are, once a model with that partition attached has used the layer.
    """

    def __init__(self, num_buckets: int, merge_every: int = 64) -> None:
        super().__init__()
        if merge_every < 1:
            raise ValueError(f"merge_every={merge_every}: expected a number of tokens, 1 or more")
        self.num_buckets = num_buckets
        self.merge_every = merge_every
        self.partition: Any = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.buckets = self.bucket_room = None
        self.lists: BucketIndex | None = None
        self.indexed = 0

    @property
    def index(self) -> BucketIndex:
        """The lists of keys ``[0, indexed)``."""
        if self.lists is None:
            raise RuntimeError("index: no key has a bucket yet; call assign(router, x) after the cache's update")
        return self.lists

    def assign(self, router: Router, x: "LayerInputs") -> None:
        """Gives the keys of the pass that has just updated this layer their buckets, and renews the lists when it is time.

        Keys before ``x.kv_start`` (left padding) get -1. To be called once after each update.

        Raises
        ------
        RuntimeError : keys were added without a call of ``assign``, or it is called twice.
        """
        start = 0 if self.buckets is None else self.buckets.shape[2]
        num_new, num_keys = x.k_nope.shape[2], self.get_seq_length()
        if start + num_new != num_keys:
            raise RuntimeError(f"assign: {start} keys have buckets, {num_new} are new, but layer {x.layer} holds {num_keys}")
        new = router.assign(x.layer, x.k_nope, x.k[:, :, -num_new:])
        if x.kv_start is not None:
            positions = torch.arange(start, num_keys, device=new.device)
            new = new.masked_fill(positions < x.kv_start[:, None, None], -1)
        self.buckets, self.bucket_room = _append(self.buckets, self.bucket_room, new)
        if self.lists is None or num_new > 1 or num_keys - self.indexed >= self.merge_every:
            self.merge()

    def merge(self) -> None:
        """Puts every key that has a bucket into the lists."""
        self.indexed = 0 if self.buckets is None else self.buckets.shape[2]
        self.lists = None if self.buckets is None or self.indexed == 0 else build_bucket_index(self.buckets, self.num_buckets)

    def window(self, recent: int) -> int:
        """How many of the last keys are read exactly: ``recent``, and at least those that are not in the lists yet."""
        return max(recent, self.get_seq_length() - self.indexed)

    def keys_read(self, probes: Tensor, *, recent: int, sink: int, kv_start: Tensor | None = None) -> Tensor:
        """How many keys :func:`decode` reads, int64 ``[B, Hkv]``."""
        assert self.buckets is not None
        window = self.window(recent)
        return keys_read(self.index, self.buckets, probes, indexed=self.indexed, recent=window, sink=sink, kv_start=kv_start)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens, by the sign convention of the installed transformers."""
        super().crop(tokens_to_remove)
        num_keys = self.get_seq_length()
        if self.buckets is not None:
            self.buckets = self.buckets[:, :, :num_keys]
        if self.indexed > num_keys:
            self.merge()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        super().reorder_cache(beam_idx)
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        super().batch_select_indices(indices)
        self._rows(lambda x: x[indices, ...])

    def _rows(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.buckets is not None:
            self.buckets = select(self.buckets)
        if self.lists is not None:
            self.lists = BucketIndex(*(select(part) for part in self.lists))


def _append(held: Tensor | None, room: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """``held`` and ``new`` one after the other along dimension 2, as a view of a buffer with free positions.

    ``held`` is a view of the start of ``room``, unless it was reordered since: then, or when ``room`` is full, they move to a
    buffer an eighth larger.
    """
    begin = 0 if held is None else held.shape[2]
    end = begin + new.shape[2]
    if room is None or end > room.shape[2] or (held is not None and held.data_ptr() != room.data_ptr()):
        room = new.new_empty(*new.shape[:2], end + max(ROOM, end // 8), *new.shape[3:])
        if held is not None:
            room[:, :, :begin] = held
    room[:, :, begin:end] = new
    return room[:, :, :end], room


def install(
    cache: Cache, router: Router, *, num_layers: int, dense_layers: tuple[int, ...] = (0,), merge_every: int = 64
) -> None:
    """Gives an empty ``DynamicCache`` a :class:`BucketLayer` for each routed layer that is not in ``dense_layers``.

    The others become layers that grow in place as well.

    Raises
    ------
    ValueError : the cache holds tokens already, or layers that keep less than the full context.
    """
    if cache.get_seq_length():
        raise ValueError(
            f"cache holds {cache.get_seq_length()} tokens: expected an empty one, buckets start with the first key"
        )
    other = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if other:
        raise ValueError(f"cache has layers of type {', '.join(other)}: expected DynamicLayer, the full context")
    routed = set(router.layers) - set(dense_layers)
    for layer in range(num_layers):
        fresh = BucketLayer(router.num_buckets, merge_every) if layer in routed else GrowingLayer()
        cache.layers[layer : layer + 1] = [fresh]


def decode(x: "LayerInputs", probes: Tensor, *, recent: int, sink: int) -> SparseAttention:
    """Attention of the newest token over the dense window and the visited buckets.

    Parameters
    ----------
    x : LayerInputs
        One query a sequence; ``x.cache`` is the :class:`BucketLayer` whose ``assign`` has seen this pass.
    probes : Tensor
        int32 ``[B, Hkv, L]``, from :func:`msattn.trainer.saap.routing.route`.
    recent, sink : int
        Last and first keys that are read exactly.

    Returns
    -------
    SparseAttention : ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]``.
    """
    layer: BucketLayer = x.cache
    return bucket_decode(
        x.q, x.k, x.v, layer.index, probes, recent=layer.window(recent), sink=sink, scale=x.scale, kv_start=x.kv_start
    )

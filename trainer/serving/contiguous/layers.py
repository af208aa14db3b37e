"""Layers of a KV cache whose keys and values are in one tensor, and attention over such tensors,
with or without a cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from msattn.kernels.types import SparseAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import (
    LayerInputs,
    Pooled,
    decoded_attention,
    dense_attention,
    selected_attention,
)
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.contiguous.buffers import Buffer, PooledKeys


class TensorKeys:
    """The keys ``x.k`` and values ``x.v`` of a pass; without a cache, those of its tokens.

    It is a key store (:class:`msattn.trainer.serving.attend.KeyStore`).
    """

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
        self.device, self.is_initialized = layer.device, True
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
        """Removes the last ``-tokens_to_remove`` tokens. Raises UserError for a positive number,
        which earlier versions of transformers took as the number of tokens to keep.
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
        self.device, self.is_initialized = keys.device, True

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


class GrowingCache(Protocol):
    """A transformers cache that an attached model has prepared."""

    layers: list[GrowingLayer]

    def get_seq_length(self) -> int: ...


def _pools(gate: Gate) -> tuple[Sequence[str], int]:
    """Returns the poolings of a gate, and the keys of its blocks."""
    return gate.cfg.cached_pools, gate.cfg.sizes.keys


def _check_kind(buffer: Buffer, new: Tensor) -> None:
    """Raises UserError if a buffer holds values of another device or dtype than ``new``; under
    autocast dtypes may differ.
    """
    x = buffer.filled
    if x is None or buffer.length == 0:
        return
    if x.device != new.device or (
        x.dtype != new.dtype and not torch.is_autocast_enabled(new.device.type)
    ):
        there, here = f"{x.dtype} on {x.device}", f"{new.dtype} on {new.device}"
        raise UserError(f"past_key_values: it holds {there}; expected {here}, as in this pass")

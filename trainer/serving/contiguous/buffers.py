"""Tensors that grow along the dimension of tokens, in memory with free positions, and pooled keys,
which gates need to score the blocks of cached keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from msattn.trainer.methods.gate.attn_gate import pool_from
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation

MIN_FREE = 1024  # smallest number of free positions after growing
STEP = 256  # capacities are multiples of it


class Buffer:
    """A tensor ``[B, H, length, ...]`` in memory with free positions, so that appending writes only
    new values.

    The address of ``memory [B, H, capacity, ...]``, None before the first token, changes only in
    :meth:`reserve` and if the number of rows changes.
    """

    def __init__(self, filled: Tensor | None = None, length: int | None = None) -> None:
        self.memory = filled
        self.length = 0 if filled is None else filled.shape[2] if length is None else length

    @property
    def filled(self) -> Tensor | None:
        return None if self.memory is None else self.memory[:, :, : self.length]

    @property
    def capacity(self) -> int:
        return 0 if self.memory is None else self.memory.shape[2]

    def reserve(self, end: int, like: Tensor) -> None:
        """Makes room for ``end`` positions of tensors like ``like [B, H, N, ...]``. Memory without
        room is replaced by larger memory, to which the values are copied.
        """
        old = self.memory if self.length or _is_alike(self.memory, like) else None
        # A tensor of inference mode cannot be written outside of it.
        writable = old is not None and (torch.is_inference_mode_enabled() or not old.is_inference())
        if writable and end <= self.capacity:
            return
        with torch.inference_mode(False):
            self.memory = like.new_empty(*like.shape[:2], grown_capacity(end), *like.shape[3:])
        if old is not None:
            self.memory[:, :, : self.length] = old[:, :, : self.length]

    def append(self, new: Tensor) -> None:
        """Appends ``new [B, H, N, ...]``."""
        end = self.length + new.shape[2]
        self.reserve(end, new)
        assert self.memory is not None
        self.memory[:, :, self.length : end] = new
        self.length = end

    def select_rows(self, rows: Tensor) -> None:
        """Replaces row b by row ``rows[b]``, in place if the number of rows stays."""
        if self.memory is None:
            return
        filled = self.memory[:, :, : self.length]
        with torch.inference_mode(False):
            selected = filled.index_select(0, rows.to(filled.device))
        if len(selected) == len(filled) and (
            torch.is_inference_mode_enabled() or not self.memory.is_inference()
        ):
            filled.copy_(selected)
        else:
            self.memory = selected


def _is_alike(memory: Tensor | None, new: Tensor) -> bool:
    """Returns True if empty memory fits ``new``; memory for another batch or dtype is allocated
    again.
    """
    return memory is not None and (memory.dtype, memory.device, memory[:, :, :0].shape) == (
        new.dtype,
        new.device,
        new[:, :, :0].shape,
    )


def grown_capacity(end: int) -> int:
    """Returns the capacity of memory that is allocated for ``end`` positions: at least an eighth of
    it is free.
    """
    return -(-(end + max(MIN_FREE, end // 8)) // STEP) * STEP


class PooledKeys:
    """Pooled keys of the complete blocks of one layer's cache, before RoPE except for the pooling
    ``rope``.

    Only passes over several tokens update them. Keys that are missing since then (those of the
    unfinished block, of decoded tokens, or of a cache that was filled outside an attached model)
    are recovered by inverting the rotation of cached keys.

    ``blocks`` are fp32 ``[B, Hkv, complete, len(pools) * D]``, or None before the first update.
    """

    def __init__(self, pools: Sequence[str], block_size: int) -> None:
        self.pools, self.block_size = list(pools), block_size
        self.blocks: Tensor | None = None
        self._padding = 0  # most padded positions of a row

    @property
    def complete(self) -> int:
        """Number of blocks that are complete in every row."""
        return 0 if self.blocks is None else self.blocks.shape[2]

    def update(self, x: LayerInputs, rotation: Rotation | None) -> Tensor:
        """Adds the keys up to those of the pass, and returns the pooled keys of all blocks
        ``[B, Hkv, Tc, len(pools) * D]``.
        """
        known, size = self.complete, self.block_size
        starts = None if x.kv_start is None else x.kv_start.long()
        first = self.first(starts)
        parts = [] if self.blocks is None else [self.blocks]
        if first < x.num_keys:  # otherwise another gate with the same poolings has added them
            offset = None if starts is None else starts + known * size - first
            parts.append(
                pool_from(x, self.pools, rotation, block_size=size, first=first, start=offset)
            )
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        self._padding = 0 if starts is None else int(starts.max())
        self.blocks = pooled[:, :, : self._complete_in(x.num_keys)]
        missing = -(-x.num_keys // size) - pooled.shape[2]  # happens for sequences with padding
        return F.pad(pooled, (0, 0, 0, missing)) if missing else pooled

    def first(self, starts: Tensor | None) -> int:
        """Returns the first key that is not in a complete block of every row."""
        return self.complete * self.block_size + (0 if starts is None else int(starts.min()))

    def crop(self, num_keys: int) -> None:
        """Keeps the blocks that are complete among the first ``num_keys`` keys."""
        if self.blocks is not None:
            self.blocks = self.blocks[:, :, : self._complete_in(num_keys)]

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the batch by its ``rows``."""
        if self.blocks is not None:
            self.blocks = self.blocks.index_select(0, rows.to(self.blocks.device))

    def _complete_in(self, num_keys: int) -> int:
        return max(num_keys - self._padding, 0) // self.block_size

"""Tensors that grow along the dimension of tokens, in memory with free positions."""

import torch
from torch import Tensor

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
        """Makes room for ``end`` positions; new memory has the shape of ``like [B, H, N, ...]``
        otherwise.
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

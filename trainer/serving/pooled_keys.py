"""Pooled keys of a cache, which gates need to score the blocks of cached keys."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from msattn.trainer.methods.gate.attn_gate import pool_keys
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation, keys_before_rope


def pool_from(
    x: LayerInputs,
    pools: Sequence[str],
    rotation: Rotation | None,
    *,
    block_size: int,
    first: int = 0,
    start: Tensor | None = None,
) -> Tensor:
    """Returns the pooled keys of the blocks from key ``first`` on, with padding up to ``start``.

    Those of earlier passes are recovered by inverting the rotation of cached keys.
    """
    tail = keys_before_rope(x, first, rotation)
    return pool_keys(pools, tail, x.k[:, :, first:], block_size=block_size, start=start)


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

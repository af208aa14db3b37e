"""Numbers of keys in the buckets of the sequences of a paged cache, kept from one new token to the
next.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from msattn.kernels.paged import paged_bucket_sizes


class BucketSizes:
    """Numbers of keys in the buckets, for up to ``rows`` sequences that get one new token each.

    Engines move sequences to other rows of a pass, and pages to other sequences. So the sizes of a
    row are kept for one pass, and are used again only if its new key follows the slot of its last
    key, which is then the only one that is not counted. Other rows are counted again. No value is
    read back from the device, so a CUDA graph can contain all of this.
    """

    def __init__(
        self,
        layers: Iterable[int],
        rows: int,
        kv_heads: int,
        num_buckets: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.layers, self.page_size = list(layers), page_size
        with torch.inference_mode(False):
            shape = (len(self.layers), rows, kv_heads, num_buckets)
            self._sizes = torch.zeros(shape, dtype=torch.int32, device=device)
            # int64; -1: the row is not kept
            self._last_slots = torch.full((rows,), -1, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the sizes of all rows."""
        return self._sizes.nbytes + self._last_slots.nbytes

    def begin(self, table: Tensor, kv_len: Tensor) -> Tensor:
        """Begins a pass over one new token of each sequence; returns the numbers of keys that are
        counted, int32 ``[B]``.

        Each layer must then :meth:`count` once. ``table [B, pages]`` and ``kv_len [B]`` are those
        of the pass.
        """
        last, before = (self._slots(table, kv_len.long() - back) for back in (1, 2))
        own = self._last_slots[: len(last)]
        kept = (own == before) & (before >= 0)
        self._sizes[:, : len(last)] *= kept[:, None, None]
        self.forget()
        own.copy_(last)
        return torch.where(kept, kv_len - 1, 0).int()

    def forget(self) -> None:
        """Counts every sequence again in the next pass; to be called in each pass that does not
        :meth:`begin`.
        """
        self._last_slots.fill_(-1)

    def count(
        self, layer: int, buckets: Tensor, table: Tensor, kv_len: Tensor, counted_len: Tensor
    ) -> Tensor:
        """Counts a layer's keys after the first ``counted_len``; returns the sizes of the buckets,
        int32 ``[B, Hkv, C]``.
        """
        sizes = self._sizes[self.layers.index(layer), : len(kv_len)]
        return paged_bucket_sizes(
            buckets, table, kv_len, num_buckets=sizes.shape[2], counted=counted_len, sizes=sizes
        )

    def _slots(self, table: Tensor, position: Tensor) -> Tensor:
        """Returns the slots of one position of each sequence, int64 ``[B]``; -1 before the first
        one.
        """
        page = table.gather(1, position.clamp(min=0)[:, None] // self.page_size).squeeze(1).long()
        return (page * self.page_size + position % self.page_size).where(position >= 0, -1)

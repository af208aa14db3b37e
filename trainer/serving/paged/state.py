"""The additional state of a paged cache: buckets of keys, and pooled keys for gates.

It belongs to slots, not to requests. So requests that share a prefix also share its state, and a
preempted request finds it again. Only when a page is copied must its state be copied as well.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.paged.read import read_pages
from msattn.kernels.types import PagedKeys
from msattn.trainer.config import GateConfig
from msattn.trainer.methods.gate.attn_gate import pool_from
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.paged.kept_sizes import BucketSizes
from msattn.trainer.serving.statistics import Statistics


class PromptChunk(NamedTuple):
    """A sequence with several new tokens, the first of which is token ``first`` of the pass."""

    first: int
    queries: int  # new tokens
    keys: int  # including the new tokens
    table: Tensor  # int32 [pages]
    pooled: int  # leading blocks whose pooled keys are known before the pass
    # int64 [n], its whole blocks by their number among those of all pages; none without a gate
    blocks: Tensor
    ends_prompt: bool  # no other chunk of the prompt follows

    @property
    def tokens(self) -> slice:
        """The tokens of the sequence in the pass."""
        return slice(self.first, self.first + self.queries)


class PagedState:
    """State of the slots of one cache, for passes of at most ``requests`` sequences.

    ``caches`` holds keys and values by layer: views ``[P, page_size, Hkv, D]``, each with a
    contiguous last dimension. Those in FP8 have ``scales``, ``k_scale`` and ``v_scale`` of
    :class:`~msattn.kernels.types.PagedKeys`. Keys of ``bucket_layers`` get ``buckets``, int16
    ``[P, page_size, Hkv]``. With a gate of configuration ``gate``, those of ``gated_layers`` that
    are in ``caches`` keep ``pooled`` keys of whole blocks, fp32
    ``[P, blocks, Hkv, len(pools) * D]``; ``is_pooled``, bool ``[P, blocks]``, is True for the
    blocks whose pooled keys are there, in every layer. These are the blocks that end in the page:
    ``page_size / block`` of them, and at most one if a block spans several pages. Its last page
    belongs to no other block, while sequences may share those before it. With ``num_buckets``,
    ``sizes`` counts the keys of each bucket.
    """

    def __init__(
        self,
        caches: Mapping[int, tuple[Tensor, Tensor]],
        *,
        bucket_layers: Iterable[int],
        gate: GateConfig | None,
        gated_layers: Iterable[int],
        requests: int,
        num_buckets: int = 0,
        scales: Mapping[int, dict[str, Any]] | None = None,
    ) -> None:
        self.gate, self.requests = gate, requests
        self.caches = dict(caches)
        self._scales = dict(scales or {})
        keys, _ = next(iter(self.caches.values()))
        pages, self.page_size, self.kv_heads, size = keys.shape
        with torch.inference_mode(False):
            of_slots = {"size": keys.shape[:3], "dtype": torch.int16, "device": keys.device}
            self.buckets = {layer: torch.zeros(**of_slots) for layer in bucket_layers}
            self.sizes: BucketSizes | None = None
            if num_buckets:
                rows = (requests, self.kv_heads, num_buckets, self.page_size)
                self.sizes = BucketSizes(self.buckets, *rows, keys.device)
            self.pooled: dict[int, Tensor] = {}
            if gate is not None:
                blocks = max(1, self.page_size // gate.sizes.keys)
                of_blocks = (pages, blocks, self.kv_heads, len(gate.cached_pools) * size)
                self.pooled = {
                    layer: torch.zeros(of_blocks, device=keys.device)
                    for layer in gated_layers
                    if layer in self.caches
                }
                self.is_pooled = torch.zeros(pages, blocks, dtype=torch.bool, device=keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept beside the caches."""
        kept = [*self.buckets.values(), *self.pooled.values()]
        if self.gate is not None:
            kept.append(self.is_pooled)
        return sum(x.nbytes for x in kept) + (0 if self.sizes is None else self.sizes.nbytes)

    @property
    def block_size(self) -> int:
        """Keys of a block, of a cache with a gate."""
        assert self.gate is not None
        return self.gate.sizes.keys

    def counter(self, statistics: Statistics) -> Tensor:
        """Returns the counter of the keys read, int64 ``[requests, Hkv]``, which passes of every
        size share.
        """
        keys, _ = self.caches[min(self.caches)]
        return statistics.key_counts(self.requests, self.kv_heads, keys.device)

    def release(self) -> None:
        """Releases the cache and all memory."""
        self.caches, self.buckets, self.pooled, self.sizes = {}, {}, {}, None

    def scales(self, layer: int) -> dict[str, Any]:
        """Returns the scales of a layer's keys and values in FP8, by name; none for others."""
        return self._scales.get(layer, {})

    def paged_keys(self, layer: int, table: Tensor, kv_len: Tensor) -> PagedKeys:
        """Returns a layer's keys and values of sequences with these pages and lengths."""
        return PagedKeys(*self.caches[layer], table, kv_len, **self.scales(layer))

    def leading_pooled(self, table: Tensor) -> Tensor:
        """Returns the number of leading blocks of each sequence whose pooled keys are there: int64
        ``[B]``.
        """
        pages = max(1, self.block_size // self.page_size)  # of a block
        return self.is_pooled[table[:, pages - 1 :: pages].long()].flatten(1).cumprod(1).sum(1)

    def mark_pooled(self, blocks: Tensor, *, pooled: bool) -> None:
        """Records whether the pooled keys of ``blocks``, numbered through all pages, are available.

        An assignment by an index would copy the value from the host, which a CUDA graph cannot
        capture.
        """
        self.is_pooled.view(-1).index_fill_(0, blocks, pooled)

    def whole_blocks(self, table: Tensor, keys: int) -> Tensor:
        """Returns the whole blocks of a sequence by their number among those of all pages: int64
        ``[keys // block_size]``.
        """
        blocks = torch.arange(keys // self.block_size, device=table.device)
        last = (blocks + 1) * self.block_size - 1
        return self.blocks_of(table[last // self.page_size].long(), last % self.page_size)

    def blocks_of(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Returns the blocks of slots by their number among those of all pages. If a block spans
        several pages, only its last one gives its number.
        """
        return pages * self.is_pooled.shape[1] + offsets // self.block_size

    def keys(
        self,
        layer: int,
        table: Tensor,
        first: int,
        end: int,
        dtype: torch.dtype,
        *,
        values: bool = False,
    ) -> Tensor:
        """Returns a copy of the keys, or of the ``values``, at positions ``first`` to ``end - 1``
        of a sequence: ``[1, Hkv, n, D]`` in ``dtype``, that of the model.
        """
        scale = self.scales(layer).get("v_scale" if values else "k_scale")
        stored = self.caches[layer][int(values)]
        return read_pages(stored, table, first, end, dtype, stored_scale=scale)[None]

    def pool_keys(self, x: LayerInputs, prompt: PromptChunk, rotation: Rotation | None) -> Tensor:
        """Returns the pooled keys of all blocks of a sequence, and keeps those of whole blocks.

        They are fp32 ``[1, Hkv, Tc, len(pools) * D]``. Keys that are not pooled yet are the keys of
        this pass before RoPE, and cached keys (of the unfinished block and of decoded tokens),
        which are recovered by inverting their rotation. ``x.k`` are the keys of this pass.
        """
        assert self.gate is not None
        size, pooled = self.block_size, self.pooled[x.layer].flatten(0, 1)
        cached, keys = prompt.keys - prompt.queries, x.k
        if prompt.pooled * size < cached:
            older = self.keys(x.layer, prompt.table, prompt.pooled * size, cached, keys.dtype)
            keys = torch.cat([older, keys], dim=2)
        positions = torch.arange(cached, prompt.keys, device=keys.device)[None]
        x = replace(x, k=keys, angles=x.angles._replace(positions=positions))
        new = pool_from(x, self.gate.cached_pools, rotation, block_size=size)
        known, added = prompt.blocks[: prompt.pooled], prompt.blocks[prompt.pooled :]
        pooled[added] = new[0, :, : len(added)].transpose(0, 1)
        return torch.cat([pooled[known].transpose(0, 1)[None], new], dim=2)

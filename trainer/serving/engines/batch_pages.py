"""The pages of transformers' continuous batching: the state of a cache, and its passes.

transformers describes a pass in one of two ways. With a block table every sequence has one new
token, the attention function writes its key, and all lengths stay on the device, as in a CUDA
graph. Otherwise the pass lists the slots to write, and the slots of all keys of all sequences one
after another.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.trainer.serving.paged.passes import PagedPass, PagedPasses, TokenPages
from msattn.trainer.serving.paged.state import PagedState


def is_paged(cache: Any) -> bool:
    """Returns True for the cache of a manager of continuous batching."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    return isinstance(cache, PagedAttentionCache)


class AllocatedState(PagedState):
    """State of transformers' ``PagedAttentionCache``, in which the pages of all layers with the
    same number form a block.
    """

    def __init__(self, cache: Any, **options: Any) -> None:
        (allocator,) = cache.cache_allocators.values()
        self.allocator = allocator
        # between the first slots of two pages, in a layer's view
        self.slots_of_page = allocator.block_physical_stride
        # keys and values of a layer are pages of their own
        self.pages_of_layers = 2 * len(allocator.layer_indices)
        # no sequence owns it; padded tokens write it
        self.free_page = allocator.write_trash_index // self.slots_of_page
        caches = {layer: self._views(layer) for layer in allocator.layer_indices}
        super().__init__(caches, **options)
        self._copy = allocator.copy_blocks
        allocator.copy_blocks = self._copy_blocks

    def release(self) -> None:
        """Releases the cache and all memory."""
        del self.allocator.copy_blocks
        super().release()

    def _views(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.allocator.get_cache_for_block_table(layer)
        return keys[:: self.pages_of_layers], values[:: self.pages_of_layers]

    def _copy_blocks(self, source: list[int], target: list[int], *args: Any, **kwargs: Any) -> None:
        """Copies pages with their state, for transformers: a request that forks gets a copy of its
        last page.
        """
        self._copy(source, target, *args, **kwargs)
        for state in (
            *self.buckets.values(),
            *self.pooled.values(),
            *([self.is_pooled] if self.pooled else []),
        ):
            state[target] = state[source]


def begin_pass(paged: PagedPasses, state: AllocatedState, arguments: dict[str, Any]) -> PagedPass:
    """Begins the pass that transformers describes in the arguments of a decoder."""
    allocator = state.allocator
    kv_len = arguments["cu_seq_lens_k"][allocator.layer_type].diff().int()
    if arguments["block_table"] is not None:
        return paged.begin(_new_tokens(state, arguments["block_table"][allocator.index], kv_len))
    read, write = (arguments[name][allocator.index] for name in ("read_index", "write_index"))
    longest = arguments["max_length_k"][allocator.layer_type]
    slots = write if len(read) == 0 else read
    table, cu_queries = _table(state, kv_len, longest, slots), arguments["cu_seq_lens_q"]
    pages, offsets = write // state.slots_of_page, write % state.slots_of_page
    return paged.begin_tables(
        state, pages, offsets, table, cu_queries, kv_len, answered=arguments["logits_indices"]
    )


def _new_tokens(state: AllocatedState, block_table: Tensor, kv_len: Tensor) -> PagedPass:
    """Returns a pass over one token of each sequence; sequences without a key are padding."""
    longest = None if kv_len.is_cuda else int(kv_len.max())
    width = block_table.shape[1] if longest is None else -(-longest // state.page_size)
    table = block_table[:, :width].clamp(min=0) // state.pages_of_layers
    position = (kv_len.long() - 1).clamp(min=0)
    pages = table.gather(1, position[:, None] // state.page_size).squeeze(1).long()
    pages = pages.where(kv_len > 0, state.free_page)
    rows = TokenPages(state, slice(None), table, kv_len, longest)
    return PagedPass(state, pages, position % state.page_size, rows, [])


def _table(state: AllocatedState, kv_len: Tensor, longest: int, slots: Tensor) -> Tensor:
    """Returns the pages of each sequence, int32 ``[B, pages]``, from the ``slots`` of all of their
    keys.
    """
    size, ends = state.page_size, kv_len.long().cumsum(0)
    logical = size * torch.arange(-(-longest // size), device=slots.device)
    first_slots = (ends - kv_len)[:, None] + logical
    return (slots[first_slots.clamp(max=len(slots) - 1)] // state.slots_of_page).int()

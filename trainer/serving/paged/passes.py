"""A forward pass over the pages of many sequences: their pages and lengths, and the slots of new
keys.

transformers describes a pass in one of two ways. With a block table every sequence has one new
token, the attention function writes its key, and all lengths stay on the device, as in a CUDA
graph. Otherwise the pass lists the slots to write, and the slots of all keys of all sequences one
after another.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from msattn.kernels.paged import paged_bucket_sizes
from msattn.trainer.serving.paged.state import AllocatedState, PagedState, PromptChunk

Rows = Tensor | slice


@dataclass
class Sequences:
    """Sequences of a pass that one operation serves."""

    tokens: Rows  # their new tokens in the pass
    table: Tensor  # int32 [B, pages]
    kv_len: Tensor  # int32 [B]
    longest: int | None  # number of keys; None where it is only on the device
    # number of last keys that each sequence reads; the first routed layer computes it for all
    window: int | Tensor | None = None
    # int32 [B], number of keys that the cached bucket sizes count; None: sizes are not cached
    counted_len: Tensor | None = None


class PagedBuckets(NamedTuple):
    """The buckets of a layer's keys in the pages of sequences with one new token."""

    state: PagedState
    layer: int
    rows: Sequences
    num_buckets: int
    summaries: None = None

    def sizes(self) -> Tensor:
        """Returns the numbers of keys in the buckets, int32 ``[B, Hkv, C]``."""
        rows, kept = self.rows, self.state.sizes
        where = (self.state.buckets[self.layer], rows.table, rows.kv_len)
        if kept is None or rows.counted_len is None:
            return paged_bucket_sizes(*where, num_buckets=self.num_buckets)
        return kept.count(self.layer, *where, rows.counted_len)


@dataclass
class Prompts:
    """Sequences with several new tokens that one operation serves: all dense ones, or sparse ones
    of similar sizes.

    The block masks of sparse ones are padded to the largest and joined. With similar sizes the
    joint mask takes less than 4 times the memory of the separate ones, apart from the rest of a
    page.
    """

    tokens: Rows  # their new tokens in the pass; a slice if they are adjacent
    table: Tensor  # int32 [B, pages]
    kv_len: Tensor  # int32 [B]
    items: list[PromptChunk]  # one for each sequence
    cu_queries: Tensor  # int32 [B + 1]
    sparse: bool  # True if they read the blocks of a selection


@dataclass
class PagedPass:
    """A forward pass over a paged cache."""

    state: PagedState
    pages: Tensor  # int64 [T], where the key of each token goes, with the offsets
    offsets: Tensor
    decoded: Sequences | None  # sequences with one new token; one with drafts is several of them
    prompts: list[Prompts]  # the others, in groups

    @classmethod
    def from_arguments(
        cls,
        state: AllocatedState,
        arguments: dict[str, Any],
        is_sparse: Callable[[PromptChunk], bool],
    ) -> "PagedPass":
        """Returns the pass that transformers describes in the arguments of a decoder."""
        allocator = state.allocator
        kv_len = arguments["cu_seq_lens_k"][allocator.layer_type].diff().int()
        if arguments["block_table"] is not None:
            return cls._from_block_table(state, arguments["block_table"][allocator.index], kv_len)
        read, write = (arguments[name][allocator.index] for name in ("read_index", "write_index"))
        longest = arguments["max_length_k"][allocator.layer_type]
        slots = write if len(read) == 0 else read
        table, cu_queries = _table(state, kv_len, longest, slots), arguments["cu_seq_lens_q"]
        pages, offsets = write // state.slots_of_page, write % state.slots_of_page
        return cls.from_tables(
            state, pages, offsets, table, cu_queries, kv_len, is_sparse, arguments["logits_indices"]
        )

    @classmethod
    def from_tables(
        cls,
        state: PagedState,
        pages: Tensor,
        offsets: Tensor,
        table: Tensor,
        cu_queries: Tensor,
        kv_len: Tensor,
        is_sparse: Callable[[PromptChunk], bool],
        answered: Tensor | None = None,
        continued: Tensor | None = None,
    ) -> "PagedPass":
        """Returns a pass over any number of tokens of each sequence, whose pages are in
        ``table [B, pages]``.

        ``cu_queries [B + 1]`` are the first tokens of the sequences, ``kv_len [B]`` their numbers
        of keys, ``answered`` the tokens after which new ones follow; without it, every chunk counts
        as the last one of its prompt. In sequences that are ``continued``, bool ``[B]``, each of
        several tokens is read as a new one, which sees those before it: drafts.
        """
        known = state.leading_pooled(table) if state.pooled else torch.zeros_like(kv_len)
        ends = (
            torch.ones_like(kv_len)
            if answered is None
            else torch.isin(cu_queries[1:] - 1, answered)
        )
        queries = cu_queries.diff()
        new = queries == 1 if continued is None else (queries == 1) | continued
        numbers = torch.stack(
            [each.long() for each in (cu_queries[:-1], queries, kv_len, known, ends, new)]
        ).T
        prompts, decoded = [], list[tuple[int, int, int]]()
        # waits for the device
        for row, (first, number, keys, pooled, last, is_new) in enumerate(numbers.tolist()):
            if is_new:
                before = keys - number + 1
                decoded += [(row, first + each, before + each) for each in range(number)]
            elif number:  # others are padding
                prompts.append((row, _prompt(state, table[row], first, number, keys, pooled, last)))
        return cls(
            state,
            pages,
            offsets,
            _decoded(decoded, table),
            _groups(prompts, kv_len, is_sparse),
        )

    @classmethod
    def _from_block_table(
        cls, state: AllocatedState, block_table: Tensor, kv_len: Tensor
    ) -> "PagedPass":
        """Returns a pass over one token of each sequence; sequences without a key are padding."""
        longest = None if kv_len.is_cuda else int(kv_len.max())
        width = block_table.shape[1] if longest is None else -(-longest // state.page_size)
        table = block_table[:, :width].clamp(min=0) // state.pages_of_layers
        position = (kv_len.long() - 1).clamp(min=0)
        pages = table.gather(1, position[:, None] // state.page_size).squeeze(1).long()
        pages = pages.where(kv_len > 0, state.free_page)
        decoded = Sequences(slice(None), table, kv_len, longest)
        return cls(state, pages, position % state.page_size, decoded, [])


def _table(state: AllocatedState, kv_len: Tensor, longest: int, slots: Tensor) -> Tensor:
    """Returns the pages of each sequence, int32 ``[B, pages]``, from the ``slots`` of all of their
    keys.
    """
    size, ends = state.page_size, kv_len.long().cumsum(0)
    logical = size * torch.arange(-(-longest // size), device=slots.device)
    first_slots = (ends - kv_len)[:, None] + logical
    return (slots[first_slots.clamp(max=len(slots) - 1)] // state.slots_of_page).int()


def _prompt(
    state: PagedState, table: Tensor, first: int, queries: int, keys: int, pooled: int, last: int
) -> PromptChunk:
    """Returns a sequence with several new tokens; of its cached keys only whole blocks may be
    pooled.
    """
    pages = table[: -(-keys // state.page_size)]
    if state.gate is None:
        return PromptChunk(first, queries, keys, pages, 0, pages[:0], bool(last))
    pooled = min(pooled, (keys - queries) // state.block_size)
    return PromptChunk(
        first, queries, keys, pages, pooled, state.whole_blocks(pages, keys), bool(last)
    )


def _groups(
    prompts: list[tuple[int, PromptChunk]], kv_len: Tensor, is_sparse: Callable[[PromptChunk], bool]
) -> list[Prompts]:
    """Returns the dense prompts in one group, and the sparse ones grouped by the binary digits of
    their numbers of queries and keys.
    """
    groups = defaultdict[tuple[int, int] | None, list[tuple[int, PromptChunk]]](list)
    for number, item in prompts:
        groups[
            (item.queries.bit_length(), item.keys.bit_length()) if is_sparse(item) else None
        ].append((number, item))
    return [_group(members, kv_len, sparse=size is not None) for size, members in groups.items()]


def _group(members: list[tuple[int, PromptChunk]], kv_len: Tensor, *, sparse: bool) -> Prompts:
    numbers, items = [number for number, _ in members], [item for _, item in members]
    counts = torch.tensor([0, *(item.queries for item in items)])
    cu_queries = counts.cumsum(0, dtype=torch.int32).to(kv_len.device)
    table = pad_sequence([item.table for item in items], batch_first=True)
    return Prompts(_tokens(items, kv_len.device), table, kv_len[numbers], items, cu_queries, sparse)


def _tokens(items: list[PromptChunk], device: torch.device) -> Rows:
    first, end = items[0].first, items[-1].tokens.stop
    if sum(item.queries for item in items) == end - first:
        return slice(first, end)
    return torch.cat([torch.arange(item.first, item.tokens.stop) for item in items]).to(device)


def _decoded(rows: list[tuple[int, int, int]], table: Tensor) -> Sequences | None:
    """Returns the new tokens, by row, token and number of keys, as sequences with one each; None if
    there are none.
    """
    if not rows:
        return None
    numbers, tokens, keys = map(list, zip(*rows, strict=True))
    kv_len = torch.tensor(keys, dtype=torch.int32, device=table.device)
    return Sequences(torch.tensor(tokens, device=table.device), table[numbers], kv_len, max(keys))

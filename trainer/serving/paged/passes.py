"""A forward pass over the pages of many sequences: their pages and lengths, the slots of new keys,
and attention over groups of sequences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from msattn.kernels.common.block_checks import mask_layout
from msattn.kernels.paged import (
    paged_block_sparse_attention,
    paged_bucket_decode,
    paged_bucket_sizes,
    paged_flash_decode,
)
from msattn.kernels.paged.write import write_pages
from msattn.kernels.types import PagedKeys, SparseAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import SIZES, LayerInputs, Pooled
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.dispatch import Decision, Dispatch, whole_window
from msattn.trainer.serving.key_store import RoutedQueries
from msattn.trainer.serving.paged.state import PagedState, PromptChunk
from msattn.trainer.serving.statistics import Statistics

Rows = Tensor | slice
Decide = Callable[[PromptChunk], Decision[Selection]]


@dataclass
class Sequences:
    """Sequences of a pass with one new token each, as a key store of every layer."""

    state: PagedState
    tokens: Rows  # their new tokens in the pass
    table: Tensor  # int32 [B, pages]
    kv_len: Tensor  # int32 [B]
    longest: int | None  # number of keys; None where it is only on the device
    # number of last keys that each sequence reads; the first routed layer computes it for all
    window: int | Tensor | None = None
    # int32 [B], number of keys that the cached bucket sizes count; None: sizes are not cached
    counted_len: Tensor | None = None

    def size(self, x: LayerInputs) -> tuple[int, int | None]:
        return len(self.kv_len), self.longest

    def visible(self, x: LayerInputs) -> None:
        return None

    def read_all(self, x: LayerInputs) -> Tensor:
        q = _tokens(x.q, self.tokens).unsqueeze(2)
        return paged_flash_decode(q, self._cache(x), **_scoring(x)).out.squeeze(2)

    def queries(self, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        """Returns the queries of all sequences as one batch.

        A CUDA graph cannot branch on a length, so a sequence that is too short for buckets gets a
        window of all keys.
        """
        assert dispatch.routed is not None
        q, q_nope = (_tokens(each, self.tokens).unsqueeze(2) for each in (x.q, x.q_nope))
        if self.window is None:
            short = dispatch.short_sequences(len(self.kv_len), self.kv_len)
            self.window = whole_window(dispatch.routed.recent, self.kv_len, short)
        buckets = PagedBuckets(self, x.layer, dispatch.routed.router.num_buckets)
        batch = replace(x, q=q, q_nope=q_nope, kv_len=self.kv_len)
        return [RoutedQueries(batch, buckets, self.window)]

    def counts(self, x: LayerInputs, statistics: Statistics) -> Tensor:
        """Returns the part of :meth:`PagedState.counter` for these sequences."""
        return self.state.counter(statistics)[: len(self.kv_len)]

    def read_buckets(
        self,
        queries: RoutedQueries,
        probes: Tensor,
        *,
        sink: int,
        counts: Tensor | None = None,
        by_head: bool = False,
    ) -> SparseAttention:
        assert not by_head
        x, buckets = queries.x, self.state.buckets[queries.x.layer]
        return paged_bucket_decode(
            x.q, self._cache(x), buckets, probes, recent=queries.window, sink=sink, counts=counts,
            **_scoring(x),
        )  # fmt: skip

    def joined(self, x: LayerInputs, outs: list[Tensor]) -> Tensor:
        return outs[0].squeeze(2)

    def _cache(self, x: LayerInputs) -> PagedKeys:
        return PagedKeys(*self.state.caches[x.layer], self.table, self.kv_len)


class PagedBuckets(NamedTuple):
    """The buckets of a layer's keys in the pages of sequences."""

    rows: Sequences
    layer: int
    num_buckets: int
    summaries: None = None

    def sizes(self) -> Tensor:
        """Returns the numbers of keys in the buckets, int32 ``[B, Hkv, C]``."""
        rows, state = self.rows, self.rows.state
        where = (state.buckets[self.layer], rows.table, rows.kv_len)
        if state.sizes is None or rows.counted_len is None:
            return paged_bucket_sizes(*where, num_buckets=self.num_buckets)
        return state.sizes.count(self.layer, *where, rows.counted_len)


@dataclass
class Prompts:
    """Sequences with several new tokens that one operation serves, as a key store of every layer:
    all dense ones, or sparse ones of similar sizes.

    The block masks of sparse ones are padded to the largest and joined. With similar sizes the
    joint mask takes less than 4 times the memory of the separate ones, apart from the rest of a
    page.
    """

    state: PagedState
    tokens: Rows  # their new tokens in the pass; a slice if they are adjacent
    table: Tensor  # int32 [B, pages]
    kv_len: Tensor  # int32 [B]
    items: list[PromptChunk]  # one for each sequence
    decisions: list[Decision[Selection]]  # likewise
    cu_queries: Tensor  # int32 [B + 1]

    @property
    def sparse(self) -> bool:
        """True if they read the blocks of a selection."""
        return self.decisions[0].attention is not None

    def scored(
        self, x: LayerInputs, selection: Selection, rotation: Rotation | None
    ) -> Iterator[LayerInputs]:
        """Yields the inputs of each sequence: its new queries, and the keys that the selection
        needs.
        """
        for item in self.items:
            new = {
                name: getattr(x, name)[:, :, item.tokens]
                for name in ("q", "k", "v", "q_nope", "k_nope")
            }
            angles = x.angles.part(tokens=item.tokens)
            sequence = replace(x, **new, angles=angles, ends_prompt=item.ends_prompt)
            if selection.gate is not None:
                pooled = Pooled(self.state.pool_keys(sequence, item, rotation), item.keys)
                sequence = replace(sequence, pooled=pooled)
            if item.queries != item.keys and selection.needs_keys(sequence):
                k, v = self.state.keys(x.layer, item.table, 0, item.keys)
                sequence = replace(sequence, k=k, v=v)
            yield sequence

    def read_all(self, x: LayerInputs) -> Tensor:
        return self._read(x, None, SIZES).out

    def read_blocks(
        self, x: LayerInputs, chosen: Sequence[Tensor], sizes: BlockSizes
    ) -> SparseAttention:
        keys = self.table.shape[1] * self.state.page_size
        _, columns = mask_layout(chosen[0], keys, sizes.keys)
        return self._read(x, _joined(chosen, -(-self._most // sizes.queries), columns), sizes)

    @property
    def _most(self) -> int:
        return max(item.queries for item in self.items)

    def _read(self, x: LayerInputs, mask: Tensor | None, sizes: BlockSizes) -> SparseAttention:
        cache = PagedKeys(*self.state.caches[x.layer], self.table, self.kv_len)
        return paged_block_sparse_attention(
            _tokens(x.q, self.tokens), cache, self.cu_queries, mask, max_queries=self._most,
            **sizes.arguments, **_scoring(x),
        )  # fmt: skip


@dataclass
class PagedPass:
    """A forward pass over a paged cache."""

    state: PagedState
    pages: Tensor  # int64 [T], where the key of each token goes, with the offsets
    offsets: Tensor
    decoded: Sequences | None  # sequences with one new token; one with drafts is several of them
    prompts: list[Prompts]  # the others, in groups

    @property
    def groups(self) -> list[Sequences | Prompts]:
        """The sequences, in groups that one operation serves."""
        return [*([] if self.decoded is None else [self.decoded]), *self.prompts]

    def write(self, x: LayerInputs, buckets: Tensor | None) -> None:
        """Writes the new keys and values of a layer, and the buckets ``[Hkv, T]`` of the keys."""
        write_pages(
            x.k[0],
            x.v[0],
            *self.state.caches[x.layer],
            self.pages,
            self.offsets,
            buckets,
            None if buckets is None else self.state.buckets[x.layer],
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
        decide: Decide,
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
            _decoded(state, decoded, table),
            _groups(state, prompts, kv_len, decide),
        )


def _scoring(x: LayerInputs) -> dict[str, Any]:
    return {"scale": x.scale, "softcap": x.scoring.softcap}


def _tokens(x: Tensor, tokens: Rows) -> Tensor:
    """Returns the ``tokens`` of ``x [1, H, T, D]``: ``[n, H, D]``."""
    return x[0].transpose(0, 1)[tokens]


def _joined(masks: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """Returns the masks of several sequences, or their bits, as one ``[B, H, rows, columns]``."""
    joined = masks[0].new_zeros(len(masks), masks[0].shape[1], rows, columns)
    for own, mask in zip(joined, masks, strict=True):
        own[:, : mask.shape[2], : mask.shape[3]] = mask[0]
    return joined


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
    state: PagedState, prompts: list[tuple[int, PromptChunk]], kv_len: Tensor, decide: Decide
) -> list[Prompts]:
    """Returns the dense prompts in one group, and the sparse ones grouped by the binary digits of
    their numbers of queries and keys.
    """
    groups = defaultdict[
        tuple[int, int] | None, list[tuple[int, PromptChunk, Decision[Selection]]]
    ](list)
    for number, item in prompts:
        decision, size = decide(item), (item.queries.bit_length(), item.keys.bit_length())
        groups[None if decision.attention is None else size].append((number, item, decision))
    return [_group(state, members, kv_len) for members in groups.values()]


def _group(
    state: PagedState, members: list[tuple[int, PromptChunk, Decision[Selection]]], kv_len: Tensor
) -> Prompts:
    numbers, items, decisions = map(list, zip(*members, strict=True))
    counts = torch.tensor([0, *(item.queries for item in items)])
    cu_queries = counts.cumsum(0, dtype=torch.int32).to(kv_len.device)
    table = pad_sequence([item.table for item in items], batch_first=True)
    tokens = _rows(items, kv_len.device)
    return Prompts(state, tokens, table, kv_len[numbers], items, decisions, cu_queries)


def _rows(items: list[PromptChunk], device: torch.device) -> Rows:
    first, end = items[0].first, items[-1].tokens.stop
    if sum(item.queries for item in items) == end - first:
        return slice(first, end)
    return torch.cat([torch.arange(item.first, item.tokens.stop) for item in items]).to(device)


def _decoded(
    state: PagedState, rows: list[tuple[int, int, int]], table: Tensor
) -> Sequences | None:
    """Returns the new tokens, by row, token and number of keys, as sequences with one each; None if
    there are none.
    """
    if not rows:
        return None
    numbers, tokens, keys = map(list, zip(*rows, strict=True))
    kv_len = torch.tensor(keys, dtype=torch.int32, device=table.device)
    where = torch.tensor(tokens, device=table.device)
    return Sequences(state, where, table[numbers], kv_len, max(keys))

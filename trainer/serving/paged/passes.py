"""A forward pass over the pages of many sequences: their pages and lengths, the slots of new keys,
attention over groups of sequences, and what begins and ends a pass.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from msattn.trainer.methods.buckets import Buckets, RoutedQueries
from msattn.trainer.methods.budgets import KeyShare
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import served_layers
from msattn.trainer.models.layer_attention import SIZES, LayerInputs, Pooled
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.dispatch import Decision, Dispatch, whole_window
from msattn.trainer.serving.paged.state import PagedState, PromptChunk
from msattn.trainer.serving.statistics import Statistics

Rows = Tensor | slice


@dataclass
class TokenPages:
    """Pages of the sequences of a pass with one new token each, as a key store of every layer."""

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
        return  # they were counted when the pass began

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
        buckets = Buckets(partial(self._bucket_sizes, x.layer, dispatch.routed.router.num_buckets))
        batch = replace(x, q=q, q_nope=q_nope, kv_len=self.kv_len)
        return [RoutedQueries(batch, buckets, self.window)]

    def _bucket_sizes(self, layer: int, num_buckets: int) -> Tensor:
        """Returns the numbers of keys in the buckets, int32 ``[B, Hkv, C]``."""
        state, where = self.state, (self.state.buckets[layer], self.table, self.kv_len)
        if state.sizes is None or self.counted_len is None:
            return paged_bucket_sizes(*where, num_buckets=num_buckets)
        return state.sizes.count(layer, *where, self.counted_len)

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
        return self.state.paged_keys(x.layer, self.table, self.kv_len)


@dataclass
class PromptPages:
    """Pages of sequences with several new tokens that one operation serves, as a key store of every
    layer: all dense ones, or sparse ones of similar sizes.

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
                of_cache = x.layer, item.table, 0, item.keys, x.k.dtype
                sequence = replace(sequence, k=self.state.keys(*of_cache))
                if selection.gate is None:  # gates' scores need no values
                    sequence = replace(sequence, v=self.state.keys(*of_cache, values=True))
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
        cache = self.state.paged_keys(x.layer, self.table, self.kv_len)
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
    decoded: TokenPages | None  # sequences with one new token; one with drafts is several of them
    prompts: list[PromptPages]  # the others, in groups

    @property
    def groups(self) -> list[TokenPages | PromptPages]:
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
            **self.state.scales(x.layer),
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


def _group(
    state: PagedState, members: list[tuple[int, PromptChunk, Decision[Selection]]], kv_len: Tensor
) -> PromptPages:
    numbers, items, decisions = map(list, zip(*members, strict=True))
    counts = torch.tensor([0, *(item.queries for item in items)])
    cu_queries = counts.cumsum(0, dtype=torch.int32).to(kv_len.device)
    table = pad_sequence([item.table for item in items], batch_first=True)
    tokens = _rows([(item.first, item.tokens.stop) for item in items], kv_len.device)
    return PromptPages(state, tokens, table, kv_len[numbers], items, decisions, cu_queries)


def _rows(spans: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """Returns the tokens of increasing spans, as a slice if they are adjacent: its views copy
    nothing.
    """
    first, end = spans[0][0], spans[-1][1]
    if sum(stop - start for start, stop in spans) == end - first:
        return slice(first, end)
    return torch.cat([torch.arange(*span) for span in spans]).to(device)


def _decoded(
    state: PagedState, rows: list[tuple[int, int, int]], table: Tensor
) -> TokenPages | None:
    """Returns the new tokens, by row, token and number of keys, as sequences with one each; None if
    there are none.
    """
    if not rows:
        return None
    numbers, tokens, keys = map(list, zip(*rows, strict=True))
    kv_len = torch.tensor(keys, dtype=torch.int32, device=table.device)
    where = _rows([(token, token + 1) for token in tokens], table.device)
    return TokenPages(state, where, table[numbers], kv_len, max(keys))


class PagedPasses:
    """Passes over paged caches: sequences with several new tokens read the blocks of the selection,
    those with one new token the dense window and buckets.
    """

    def __init__(
        self, dispatch: Dispatch, statistics: Statistics, rotation: Rotation | None
    ) -> None:
        self.dispatch, self.statistics, self.rotation = dispatch, statistics, rotation

    @property
    def chunks(self) -> tuple[int, int]:
        """Granularity of chunks: the number of tokens of which each but the last has a multiple,
        and the number of a prompt's last tokens that stay together.
        """
        if (selection := self.dispatch.selection) is None:
            return 1, 2
        return selection.sizes.queries, max(selection.sizes.queries, selection.always.dense_queries)

    def begin_tables(
        self,
        state: PagedState,
        pages: Tensor,
        offsets: Tensor,
        table: Tensor,
        cu_queries: Tensor,
        kv_len: Tensor,
        *,
        answered: Tensor | None = None,
        drafts: int = 0,
        unfinished: Collection[tuple[int, int]] = (),
    ) -> PagedPass:
        """Returns a pass over any number of tokens of each sequence, whose pages are in
        ``table [B, pages]``.

        ``pages`` and ``offsets`` are the fields of :class:`PagedPass`. ``cu_queries [B + 1]`` are
        the first tokens of the sequences, ``kv_len [B]`` their numbers of keys, ``answered`` the
        tokens after which new ones follow; without it, every chunk counts as the last one of its
        prompt. Chunks with the numbers of queries and keys of an ``unfinished`` one never do. Of a
        sequence with cached keys, up to ``1 + drafts`` tokens are read as new ones, each of which
        sees those before it.
        """
        known = state.leading_pooled(table) if state.pooled else torch.zeros_like(kv_len)
        ends = (
            torch.ones_like(kv_len)
            if answered is None
            else torch.isin(cu_queries[1:] - 1, answered)
        )
        numbers = torch.stack(
            [each.long() for each in (cu_queries[:-1], cu_queries.diff(), kv_len, known, ends)]
        ).T
        prompts, decoded = [], list[tuple[int, int, int]]()
        # waits for the device
        for row, (first, number, keys, pooled, last) in enumerate(numbers.tolist()):
            if number == 1 or (number <= 1 + drafts and 0 < number < keys):
                before = keys - number + 1
                decoded += [(row, first + each, before + each) for each in range(number)]
            elif number:  # others are padding
                last = last and (number, keys) not in unfinished
                prompts.append((row, _prompt(state, table[row], first, number, keys, pooled, last)))
        rows, groups = _decoded(state, decoded, table), self._groups(state, prompts, kv_len)
        return self.begin(PagedPass(state, pages, offsets, rows, groups))

    def begin_new_tokens(
        self,
        state: PagedState,
        pages: Tensor,
        offsets: Tensor,
        table: Tensor,
        kv_len: Tensor,
        longest: int,
        tokens: int = 1,
    ) -> PagedPass:
        """Returns a pass over one new token of each sequence, or over so many ``tokens``, each of
        which sees those before it: drafts. It never synchronizes with the device, as in a CUDA
        graph.

        The arguments are the fields of :class:`PagedPass` and :class:`TokenPages`. A sequence
        without keys is padding, and its page belongs to no sequence. ``longest`` may be an upper
        bound; in a graph it bounds all passes.
        """
        if tokens > 1:
            later = torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device=kv_len.device)
            kv_len = (kv_len[:, None] - later).clamp(min=0).flatten()
            table = table.repeat_interleave(tokens, 0)
        rows = TokenPages(state, slice(None), table, kv_len, longest)
        return self.begin(PagedPass(state, pages, offsets, rows, []))

    def create_counters(self, state: PagedState) -> None:
        """Creates the counters of a state. Must be called before a CUDA graph is captured, which
        keeps their addresses.
        """
        if state.buckets:
            none = torch.zeros_like(state.counter(self.statistics).sum())
            self.statistics.add_visible(none, all_read=True)

    def begin(self, current: PagedPass) -> PagedPass:
        """Begins a pass and returns it: the blocks that it writes are no longer known, and the keys
        that it sees are counted.
        """
        if current.state.pooled:  # not before the pass has computed them
            state = current.state
            state.mark_pooled(state.blocks_of(current.pages, current.offsets), pooled=False)
        rows, sizes, dense = current.decoded, current.state.sizes, False
        if self.dispatch.routed is not None and rows is not None:
            keys = rows.kv_len.sum() * (len(current.state.buckets) * current.state.kv_heads)
            dense = (
                rows.longest is not None
                and self.dispatch.tokens_until_routed(rows.longest, len(rows.kv_len)) > 0
            )
            self.statistics.add_visible(keys, all_read=dense)
        if sizes is not None and rows is not None and not dense:
            rows.counted_len = sizes.begin(rows.table, rows.kv_len)
        elif sizes is not None:
            sizes.forget()
        return current

    def end(self, current: PagedPass) -> None:
        """Ends a pass: the pooled keys of sparse prompts are known, in every layer."""
        state = current.state
        if not state.pooled:
            return
        for item in (
            item for prompts in current.prompts if prompts.sparse for item in prompts.items
        ):
            state.mark_pooled(item.blocks[item.pooled :], pooled=True)

    def _groups(
        self, state: PagedState, prompts: list[tuple[int, PromptChunk]], kv_len: Tensor
    ) -> list[PromptPages]:
        """Returns the dense prompts in one group, and the sparse ones grouped by the binary digits
        of their numbers of queries and keys.
        """
        groups = defaultdict[
            tuple[int, int] | None, list[tuple[int, PromptChunk, Decision[Selection]]]
        ](list)
        for number, item in prompts:
            decision = self._decided(state, item)
            size = item.queries.bit_length(), item.keys.bit_length()
            groups[None if decision.attention is None else size].append((number, item, decision))
        return [_group(state, members, kv_len) for members in groups.values()]

    def _decided(self, state: PagedState, item: PromptChunk) -> Decision[Selection]:
        """Decides for a sequence with several new tokens; keys that are not pooled yet are new or
        can be recovered.
        """
        recovered = self.dispatch.gate is None or self.rotation is not None
        known = recovered or item.pooled * state.block_size == item.keys - item.queries
        return self.dispatch.decide_prompt(
            item.queries, item.keys, known=known, ends=item.ends_prompt
        )

    def state_options(self, config: Any, requests: int, drafts: int = 0) -> dict[str, Any]:
        """Returns the arguments of a :class:`PagedState` that say what it keeps, for a model with
        this configuration.

        With ``drafts`` after the new token of each request, bucket sizes are not kept from one pass
        to the next: a rejected draft leaves its bucket.
        """
        routed, gate, num_buckets = self.dispatch.routed, self.dispatch.gate, 0
        if routed is not None and isinstance(routed.budget, KeyShare) and not drafts:
            num_buckets = routed.router.num_buckets
        of_layers = {
            "bucket_layers": self.dispatch.routed_layers,
            "gated_layers": served_layers(config),
        }
        return {
            **of_layers,
            "gate": None if gate is None else gate.cfg,
            "requests": requests * (1 + drafts),
            "num_buckets": num_buckets,
        }

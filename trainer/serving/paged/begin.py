"""Passes over paged caches begin and end here: what they write, decide for all layers, and leave
known.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.methods.budgets import KeyShare
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import served_layers
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.dispatch import Decision, Dispatch
from msattn.trainer.serving.paged.passes import PagedPass, Sequences
from msattn.trainer.serving.paged.state import PagedState, PromptChunk
from msattn.trainer.serving.statistics import Statistics


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
        """The tokens of which chunks of prompts hold a multiple, and how many last ones of a prompt
        stay together.
        """
        if (selection := self.dispatch.selection) is None:
            return 1, 2
        return selection.sizes.queries, max(selection.sizes.queries, selection.always.dense_queries)

    def begin_tables(
        self,
        state: PagedState,
        *tables: Tensor,
        answered: Tensor | None = None,
        continued: Tensor | None = None,
    ) -> PagedPass:
        """Returns a pass; the arguments are those of :meth:`PagedPass.from_tables`."""
        decide = partial(self._decided, state)
        return self.begin(
            PagedPass.from_tables(
                state, *tables, decide=decide, answered=answered, continued=continued
            )
        )

    def begin_new_tokens(
        self,
        state: PagedState,
        pages: Tensor,
        offsets: Tensor,
        table: Tensor,
        kv_len: Tensor,
        longest: int,
    ) -> PagedPass:
        """Returns a pass over one token of each sequence, which never synchronizes with the device,
        as in a CUDA graph.

        The arguments are the fields of :class:`PagedPass` and :class:`Sequences`. A sequence
        without keys is padding, and its page belongs to no sequence. ``longest`` may be an upper
        bound; in a graph it bounds all passes.
        """
        rows = Sequences(state, slice(None), table, kv_len, longest)
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
            blocks = current.pages * state.is_pooled.shape[1] + current.offsets // state.block_size
            state.mark_pooled(blocks, pooled=False)
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

"""Attention of an attached model over a paged cache: blocks of a selection for prompts, buckets for
new tokens, or dense.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import transformers
from torch import Tensor

from msattn.kernels.common.block_checks import mask_layout
from msattn.kernels.paged import (
    paged_block_sparse_attention,
    paged_bucket_decode,
    paged_flash_decode,
)
from msattn.kernels.paged.write import write_pages
from msattn.kernels.types import PagedKeys
from msattn.trainer.errors import UserError
from msattn.trainer.methods.budgets import KeyShare
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import served_layers
from msattn.trainer.models.layer_attention import SIZES, LayerInputs, Pooled
from msattn.trainer.models.rope import Rotation
from msattn.trainer.models.tap import PAGES
from msattn.trainer.serving.dispatch import Decision, Dispatch
from msattn.trainer.serving.paged.passes import (
    PagedBuckets,
    PagedPass,
    PromptChunk,
    Prompts,
    Rows,
    Sequences,
)
from msattn.trainer.serving.paged.state import AllocatedState, PagedState
from msattn.trainer.serving.routed import whole_window
from msattn.trainer.serving.statistics import Statistics

TRANSFORMERS_NEEDED = (5, 23)  # earlier versions page their cache in another way
# default share of the free memory: buckets and pooled keys need room next to the cache
CACHE_SHARE_OF_MEMORY = 0.8


def check_version(caller: str) -> None:
    """Raises UserError, which names the ``caller``, if transformers is too old."""
    installed, needed = transformers.__version__, ".".join(map(str, TRANSFORMERS_NEEDED))
    if tuple(map(int, installed.split(".")[:2])) < TRANSFORMERS_NEEDED:
        raise UserError(
            f"{caller}: needs transformers {needed} or newer, {installed} is installed; pip "
            f"install -U 'transformers>={needed}'"
        )


class PagedAttention:
    """Attention of every layer in passes over paged caches.

    Sequences with several new tokens read the blocks of the selection; sequences with one new token
    read the dense window and buckets. A CUDA graph cannot branch on a length, so a sequence that is
    too short for buckets gets a window of all keys.
    """

    def __init__(
        self, dispatch: Dispatch, statistics: Statistics, rotation: Rotation | None
    ) -> None:
        self.dispatch, self.statistics, self.rotation = dispatch, statistics, rotation
        self._managers: WeakSet[Any] = WeakSet()
        self._states: WeakKeyDictionary[Any, AllocatedState] = WeakKeyDictionary()
        self._lock = RLock()  # managers are created, and have their passes, in several threads

    @property
    def chunks(self) -> tuple[int, int]:
        """The tokens of which chunks of prompts hold a multiple, and how many last ones of a prompt
        stay together.
        """
        if (selection := self.dispatch.selection) is None:
            return 1, 2
        return selection.sizes.queries, max(selection.sizes.queries, selection.always.dense_queries)

    @property
    def managers(self) -> list[Any]:
        """The managers of continuous batching whose passes this attention serves."""
        with self._lock:
            return list(self._managers)

    def serve(self, manager: Any) -> None:
        """Serves the passes of a manager from now on."""
        with self._lock:
            self._managers.add(manager)

    def begin(self, config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a decoder with their pass; UserError for a manager of another
        attention.
        """
        state = self._state(arguments["cache"], config)
        current = self._start(
            PagedPass.from_arguments(state, arguments, partial(self._is_sparse, state))
        )
        # transformers makes no mask where it gets one.
        mask = torch.empty(1, 1, 0, 0)
        return {**arguments, PAGES: partial(self.attend, current), "attention_mask": mask}

    def begin_tables(
        self, state: PagedState, *tables: Tensor, continued: Tensor | None = None
    ) -> PagedPass:
        """Returns a pass; the arguments are those of :meth:`PagedPass.from_tables`."""
        is_sparse = partial(self._is_sparse, state)
        return self._start(
            PagedPass.from_tables(state, *tables, is_sparse=is_sparse, continued=continued)
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
        return self._start(
            PagedPass(state, pages, offsets, Sequences(slice(None), table, kv_len, longest), [])
        )

    def create_counters(self, state: PagedState) -> None:
        """Creates the counters of a state. Must be called before a CUDA graph is captured, which
        keeps their addresses.
        """
        if state.buckets:
            self.statistics.add_visible(torch.zeros_like(self._counter(state).sum()), all_read=True)

    def _start(self, current: PagedPass) -> PagedPass:
        """Returns a pass; invalidates the known blocks that the pass writes, and counts the keys
        that it sees.
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

    def release(self) -> None:
        """Releases the state of all caches."""
        with self._lock:
            for state in self._states.values():
                state.release()
            self._states.clear()

    def attend(self, current: PagedPass, x: LayerInputs) -> Tensor:
        """Returns the attention of a layer for all tokens of a pass, ``[1, Hq, T, D]``; the values
        of padding have no meaning.

        Keys and values of ``x`` are those of its tokens, ``[1, Hkv, T, D]``.
        """
        self._write(x, current)

        def attend(rows: Sequences | Prompts) -> Tensor:
            return (
                self._decoded(x, current, rows)
                if isinstance(rows, Sequences)
                else self._prompts(x, current, rows)
            )

        served = [*([] if current.decoded is None else [current.decoded]), *current.prompts]
        only = served[0].tokens if len(served) == 1 else None
        # all tokens of the pass
        if isinstance(only, slice) and only.indices(x.q.shape[2]) == (0, x.q.shape[2], 1):
            out = attend(served[0])
        else:
            out = torch.zeros_like(x.q[0].transpose(0, 1))
            for rows in served:
                out[rows.tokens] = attend(rows)
        # the pooled keys of sparse prompts are known, in every layer
        if x.layer == current.state.last_pooled:
            for item in (
                item for prompts in current.prompts if prompts.sparse for item in prompts.items
            ):
                current.state.mark_pooled(item.blocks[item.pooled :], pooled=True)
        return out.transpose(0, 1)[None]

    def _write(self, x: LayerInputs, current: PagedPass) -> None:
        """Writes the new keys and values, and the buckets of the keys."""
        ids, buckets = None, None
        if self.dispatch.routed is not None and x.layer in current.state.buckets:
            router: Any = self.dispatch.routed.router
            ids, buckets = router.assign(x.layer, x.k_nope, x.k)[0], current.state.buckets[x.layer]
        write_pages(
            x.k[0],
            x.v[0],
            *current.state.caches[x.layer],
            current.pages,
            current.offsets,
            ids,
            buckets,
        )

    def _decoded(self, x: LayerInputs, current: PagedPass, rows: Sequences) -> Tensor:
        """Returns the attention of the new tokens of sequences with one, ``[B, Hq, D]``."""
        q = _tokens(x.q, rows.tokens).unsqueeze(2)
        cache = PagedKeys(*current.state.caches[x.layer], rows.table, rows.kv_len)
        scores: dict[str, Any] = {"scale": x.scale, "softcap": x.scoring.softcap}
        routed, dense_reason = self.dispatch.decide_tokens(x.layer, rows.longest, len(rows.kv_len))
        if routed is None:
            if dense_reason is not None:
                self.statistics.count(dense_reason)
            return paged_flash_decode(q, cache, **scores).out.squeeze(2)
        q_nope = _tokens(x.q_nope, rows.tokens).unsqueeze(2)
        counts = self._counter(current.state)[: len(q)]
        if rows.window is None:
            short = self.dispatch.short_sequences(len(rows.kv_len), rows.kv_len)
            rows.window = whole_window(routed.recent, rows.kv_len, short)
        queries = replace(x, q=q, q_nope=q_nope, kv_len=rows.kv_len)
        router = routed.router
        buckets = PagedBuckets(current.state, x.layer, rows, router.num_buckets)
        probes = router.visit(queries, routed.budget, buckets)
        return paged_bucket_decode(
            q, cache, current.state.buckets[x.layer], probes, recent=rows.window,
            sink=routed.sink, counts=counts, **scores,
        ).out.squeeze(2)  # fmt: skip

    def _prompts(self, x: LayerInputs, current: PagedPass, prompts: Prompts) -> Tensor:
        """Returns the attention of all tokens of sequences with several, ``[T, Hq, D]``."""
        sizes, mask = SIZES, None
        most = max(item.queries for item in prompts.items)
        if prompts.sparse:
            selection = self.dispatch.selection
            assert selection is not None
            sizes, chosen = selection.sizes, []
            for item in prompts.items:
                sequence = self._sequence(x, current, item)
                chosen.append(selection.blocks(sequence))
                self.statistics.add_selected(x.layer, chosen[-1], selection.candidates(sequence))
            keys = prompts.table.shape[1] * current.state.page_size
            _, columns = mask_layout(chosen[0], keys, sizes.keys)
            mask = _joined(chosen, -(-most // sizes.queries), columns)
        else:
            for item in prompts.items:
                self.statistics.add_dense(x.layer, self._decided(current.state, item).dense_reason)
        cache = PagedKeys(*current.state.caches[x.layer], prompts.table, prompts.kv_len)
        return paged_block_sparse_attention(
            _tokens(x.q, prompts.tokens), cache, prompts.cu_queries, mask, max_queries=most,
            **sizes.arguments,
            scale=x.scale, softcap=x.scoring.softcap,
        ).out  # fmt: skip

    def _decided(self, state: PagedState, item: PromptChunk) -> Decision[Selection]:
        """Decides for a sequence with several new tokens; keys that are not pooled yet are new or
        can be recovered.
        """
        recovered = self.dispatch.gate is None or self.rotation is not None
        known = recovered or item.pooled * state.block_size == item.keys - item.queries
        return self.dispatch.decide_prompt(
            item.queries, item.keys, known=known, ends=item.ends_prompt
        )

    def _is_sparse(self, state: PagedState, item: PromptChunk) -> bool:
        return self._decided(state, item).attention is not None

    def _sequence(self, x: LayerInputs, current: PagedPass, item: PromptChunk) -> LayerInputs:
        """Returns the inputs of one sequence: its new queries, and the keys that the selection
        needs.
        """
        new = {
            name: getattr(x, name)[:, :, item.tokens]
            for name in ("q", "k", "v", "q_nope", "k_nope")
        }
        angles = x.angles.part(tokens=item.tokens)
        sequence = replace(x, **new, angles=angles, ends_prompt=item.ends_prompt)
        if self.dispatch.gate is not None:
            pooled = Pooled(current.state.pool_keys(sequence, item, self.rotation), item.keys)
            sequence = replace(sequence, pooled=pooled)
        assert self.dispatch.selection is not None
        if item.queries == item.keys or not self.dispatch.selection.needs_keys(sequence):
            return sequence
        k, v = current.state.keys(x.layer, item.table, 0, item.keys)
        return replace(sequence, k=k, v=v)

    def _state(self, cache: Any, config: Any) -> AllocatedState:
        with self._lock:
            if cache not in self._states:
                owners = [
                    each
                    for each in self._managers
                    if getattr(each.batch_processor, "cache", None) is cache
                ]
                if not owners:
                    raise UserError(
                        "generate_batch: this manager was created outside the attached context; "
                        "create it inside"
                    )
                requests = owners[0].continuous_batching_config.max_requests_per_batch
                self._states[cache] = AllocatedState(cache, **self.state_options(config, requests))
                self.create_counters(self._states[cache])
            return self._states[cache]

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

    def _counter(self, state: PagedState) -> Tensor:
        """Returns the counter of the keys read, int64 ``[requests, Hkv]``, which passes of every
        size share.
        """
        keys, _ = state.caches[min(state.caches)]
        return self.statistics.key_counts(state.requests, state.kv_heads, keys.device)


def _tokens(x: Tensor, tokens: Rows) -> Tensor:
    """Returns the ``tokens`` of ``x [1, H, T, D]``: ``[n, H, D]``."""
    return x[0].transpose(0, 1)[tokens]


def _joined(masks: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """Returns the masks of several sequences, or their bits, as one ``[B, H, rows, columns]``."""
    joined = masks[0].new_zeros(len(masks), masks[0].shape[1], rows, columns)
    for own, mask in zip(joined, masks, strict=True):
        own[:, : mask.shape[2], : mask.shape[3]] = mask[0]
    return joined

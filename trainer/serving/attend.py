"""Sparse attention of an attached model, with statistics of what it reads: one control flow over
key stores, which are the layers of a contiguous cache or groups of sequences of a paged one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from msattn.kernels.types import SparseAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import BucketRouter, RoutedQueries
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import check_transformers
from msattn.trainer.models.layer_attention import (
    LayerInputs,
    attention_recall,
    block_map,
    decoded_attention,
)
from msattn.trainer.models.replacement import NotCopied
from msattn.trainer.models.rope import KeysNotKnown, Rotation
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer
from msattn.trainer.serving.contiguous.layers import NO_CACHE, GrowingCache, GrowingLayer
from msattn.trainer.serving.dispatch import (
    BY_CHOICE,
    FALLBACK,
    Decision,
    Dispatch,
    Routing,
    whole_window,
)
from msattn.trainer.serving.paged.passes import PagedPass, PagedPasses, PromptPages, TokenPages
from msattn.trainer.serving.statistics import SparseStats, Statistics

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

# default share of the free memory: buckets and pooled keys need room next to the cache
CACHE_SHARE_OF_MEMORY = 0.8
PAGE_SIZE = 256
COUNTED = (FALLBACK, BY_CHOICE, "graph_steps", "eager_steps")


class KeyStore(Protocol):
    """Keys and values of a layer that attention can read, of all sequences of a pass or of a group.

    Prompts need :class:`PromptKeys`, new tokens :class:`TokenKeys`, and :class:`BucketKeys` to read
    buckets. ``TensorKeys`` (a pass without a cache) and ``GrowingLayer`` (a layer of a contiguous
    cache) implement the first two, ``BucketLayer`` all three; over pages, ``PromptPages`` implement
    the first, ``TokenPages`` the others. ``x`` are the inputs of the layer in the pass.
    """

    def read_all(self, x: LayerInputs) -> Tensor:
        """Computes dense attention."""


class PromptKeys(KeyStore, Protocol):
    """A key store of sequences whose new tokens are read together."""

    def scored(
        self, x: LayerInputs, selection: Selection, rotation: Rotation | None
    ) -> Iterable[LayerInputs]:
        """Returns the inputs of a selection, with pooled keys for a gate: one for each block
        mask.
        """

    def read_blocks(
        self, x: LayerInputs, chosen: Sequence[Tensor], sizes: BlockSizes
    ) -> SparseAttention:
        """Computes attention over the blocks that were ``chosen`` for each of :meth:`scored`."""


class TokenKeys(KeyStore, Protocol):
    """A key store of sequences whose new tokens are read one by one."""

    def size(self, x: LayerInputs) -> tuple[int, int | None]:
        """Returns the number of sequences, and of keys of the longest one; None where only the
        device knows it.
        """

    def visible(self, x: LayerInputs) -> Tensor | int | None:
        """Returns the number of keys that the queries see in all rows and key/value heads; None if
        they were counted when the pass began.
        """


class BucketKeys(TokenKeys, Protocol):
    """A key store whose keys have buckets."""

    def queries(self, x: LayerInputs, dispatch: Dispatch) -> list[RoutedQueries]:
        """Returns the new tokens as batches of single queries."""

    def counts(self, x: LayerInputs, statistics: Statistics) -> Tensor:
        """Returns the counter of the keys that queries read, int64 ``[B, Hkv]``."""

    def read_buckets(
        self,
        queries: RoutedQueries,
        probes: Tensor,
        *,
        sink: int,
        counts: Tensor | None = None,
        by_head: bool = False,
    ) -> SparseAttention:
        """Computes the attention of one query per row over the first ``sink`` keys, the window and
        the buckets ``probes``.

        Probes are int32 ``[B, Hkv, L]``, ``[B, Hq, L]`` if query heads choose ``by_head``, without
        repeated buckets in a row. The number of keys read is added to ``counts``.
        """

    def joined(self, x: LayerInputs, outs: list[Tensor]) -> Tensor:
        """Returns the attention of the pass from that of each of :meth:`queries`."""


class Sparse(NotCopied):
    """Sparse attention of an attached model, with statistics; created by
    :func:`msattn.trainer.serving.attach.attach`.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        statistics: Statistics,
        *,
        rotation: Rotation | None,
        kv_heads: int,
        measure_recall: bool,
    ) -> None:
        self.dispatch, self.statistics = dispatch, statistics
        self.rotation, self.measure_recall = rotation, measure_recall
        self.kv_heads = kv_heads  # heads of this rank
        self.paged = PagedPasses(dispatch, statistics, rotation)

    def stats(self) -> SparseStats:
        """Returns statistics since the context began, as means over layers and passes; None where
        there was no such pass.

        Returns
        -------
        SparseStats
            A dict that prints in one line.
            ``sparsity``: share of the causally visible blocks that passes over several tokens did
            not read (a block at zoom z counts as 1 / z of a block), 0 in a dense pass; None without
            a selection.
            ``sparsity_by_layer``: the same for each layer number. Layers differ if one threshold
            serves all layers.
            ``selectivity``: share of the visible keys that single tokens read in the routed layers
            (all except ``dense_layers``), dense passes included. None without a router.
            ``prefill_recall``, ``decode_recall``: share of the attention mass that sparse passes
            read (with ``measure_recall``).
            ``recall``: the mean of both, or the one that was measured.
            ``dense_fallbacks``: passes of single layers that were dense because sparse attention
            does not support them.
            ``dense_by_choice``: passes of single layers that were dense because this is faster at
            their length, or because of the selection's ``dense_queries``.
            ``graph_steps``, ``eager_steps``: on a GPU, passes over one token of each sequence that
            replayed a CUDA graph, or that launched kernels one by one.
            ``selection_s``, ``attention_s``: total seconds of selection and of attention (with
            ``measure_time``).
        """
        prefill = self.statistics.mean("prefill_recall")
        decoding = self.statistics.mean("decode_recall")
        measured = [value for value in (prefill, decoding) if value is not None]
        (mean, by_layer), counts = self.statistics.sparsity(), self.statistics.counts
        return SparseStats(
            sparsity=mean,
            sparsity_by_layer=by_layer,
            selectivity=self.statistics.share_of_keys(),
            recall=sum(measured) / len(measured) if measured else None,
            prefill_recall=prefill,
            decode_recall=decoding,
            **{name: counts[name] for name in COUNTED},
            selection_s=self.statistics.seconds("selection"),
            attention_s=self.statistics.seconds("attention"),
        )

    @staticmethod
    def batching_config(**options: Any) -> "ContinuousBatchingConfig":
        """Returns the configuration of transformers' continuous batching that suits an attached
        model.

        It sets pages of 256 tokens, and CUDA graphs for new tokens on a GPU.
        ``model.generate_batch`` uses it by default. A request may have as many pages as its length
        needs, at most as many as the model's positions fill.

        Parameters
        ----------
        **options : values of transformers' ``ContinuousBatchingConfig`` that replace these.

        Raises
        ------
        UserError : transformers is older than 5.23.
        """
        check_transformers("generate_batch")
        from transformers import ContinuousBatchingConfig

        own: dict[str, Any] = {"page_size": PAGE_SIZE, "auto_switch_to_flash": False}
        if torch.cuda.is_available():
            own |= {"max_memory_percent": CACHE_SHARE_OF_MEMORY, "use_cuda_graph": (False, True)}
        return ContinuousBatchingConfig(**{**own, **options})

    def attend(self, x: LayerInputs) -> Tensor:
        """Returns the attention of one layer, ``[B, Hq, N, D]``: sparse if an artifact supports
        this pass, else dense.
        """
        if torch.is_autocast_enabled(x.q.device.type):
            names = "q", "k", "q_nope", "k_nope"  # RoPE and norms return fp32 under autocast
            x = replace(x, **{name: getattr(x, name).to(x.v.dtype) for name in names})
            with torch.autocast(x.q.device.type, enabled=False):
                return self.attend(x)
        keys = x.cache if isinstance(x.cache, GrowingLayer) else NO_CACHE
        if keys is NO_CACHE and (x.cache is not None or x.num_keys > x.num_queries):
            raise UserError(
                "past_key_values: its layers are not those of the attached model; call the model, "
                "not its layers or its forward method"
            )
        dense = self.dispatch.tokens_until_routed(x.num_keys, len(x.q)) > 0
        # Also of prompts: the keys get their buckets now, while those before RoPE are at hand.
        routed = None if dense and self.rotation is not None else self._with_buckets(x)
        if self.dispatch.is_prompt(x.num_queries, x.num_keys):
            known = keys.knows_blocks(x, self.dispatch.gate, self.rotation)
            decision = self.dispatch.decide_prompt(x.num_queries, x.num_keys, known=known)
            return self._prompt(x, keys, [decision])
        if any(each.requires_grad for each in (x.q, x.k, x.v)):
            routed = None  # attention over buckets has no gradient
        return self._new_tokens(x, keys, routed)

    def attend_step(self, x: LayerInputs, window: Tensor, *, dense: bool) -> Tensor:
        """Returns the attention of one layer in a decoding step, ``[B, Hq, 1, D]``, and reads no
        value back.
        """
        routed = None if dense else self.dispatch.decide_tokens(x.layer, None, len(x.q)).attention
        if routed is None:
            return decoded_attention(x).out
        keys, short = x.cache, None
        assert isinstance(keys, BucketLayer)
        assert x.kv_len is not None
        if x.kv_start is not None:
            short = self.dispatch.short_sequences(len(x.q), x.kv_len, x.kv_start)
        queries = RoutedQueries(x, keys.buckets, whole_window(window, x.kv_len, short))
        return self._read_buckets(keys, queries, routed)[1].out

    def attend_pages(self, current: PagedPass, x: LayerInputs) -> Tensor:
        """Returns the attention of a layer for all tokens of a pass over pages, ``[1, Hq, T, D]``;
        the values of padding have no meaning.

        Keys and values of ``x`` are those of its tokens, ``[1, Hkv, T, D]``.
        """
        self._write(current, x)

        def attend(rows: TokenPages | PromptPages) -> Tensor:
            if isinstance(rows, TokenPages):
                return self._new_tokens(x, rows, rows)
            return self._prompt(x, rows, rows.decisions)

        only = current.groups[0].tokens if len(current.groups) == 1 else None
        # all tokens of the pass
        if isinstance(only, slice) and only.indices(x.q.shape[2]) == (0, x.q.shape[2], 1):
            out = attend(current.groups[0])
        else:
            out = torch.zeros_like(x.q[0].transpose(0, 1))
            for rows in current.groups:
                out[rows.tokens] = attend(rows)
        return out.transpose(0, 1)[None]

    def _write(self, current: PagedPass, x: LayerInputs) -> None:
        """Writes the new keys and values, and the buckets of the keys."""
        buckets = None
        if self.dispatch.routed is not None and x.layer in current.state.buckets:
            router = self.dispatch.routed.router
            assert isinstance(router, BucketRouter)
            buckets = router.assign(x.layer, x.k_nope, x.k)[0]
        current.write(x, buckets)

    def _with_buckets(self, x: LayerInputs) -> BucketLayer | None:
        """Returns the cache of a routed layer, in which keys have buckets; None if there is no such
        cache.
        """
        if x.layer not in self.dispatch.routed_layers or not isinstance(x.cache, BucketLayer):
            return None
        with self.statistics.timed("selection"):
            try:
                x.cache.assign(x, self.rotation)
            except KeysNotKnown:
                return None
        return x.cache

    def _prompt(
        self, x: LayerInputs, keys: PromptKeys, decisions: Sequence[Decision[Selection]]
    ) -> Tensor:
        """Returns the attention of tokens that are read together: ``decisions`` are those of the
        sequences, all sparse or all dense.
        """
        selection, chosen = decisions[0].attention, []
        if selection is None:
            for decision in decisions:
                self.statistics.add_dense(x.layer, decision.dense_reason)
            with self.statistics.timed("attention"):
                return keys.read_all(x)
        with torch.no_grad(), self.statistics.timed("selection"):
            for scored in keys.scored(x, selection, self.rotation):
                chosen.append(selection.blocks(scored))
                self.statistics.add_selected(x.layer, chosen[-1], selection.candidates(scored))
        with self.statistics.timed("attention"):
            out, lse = keys.read_blocks(x, chosen, selection.sizes)
        if self.measure_recall:
            dense = block_map(x, selection.sizes)
            self.statistics.add("prefill_recall", attention_recall(lse, dense.lse))
        return out

    def _new_tokens(self, x: LayerInputs, keys: TokenKeys, in_buckets: BucketKeys | None) -> Tensor:
        """Returns the attention of tokens that are read one by one; ``in_buckets`` are the same
        keys, None if they have no buckets.
        """
        batch, num_keys = keys.size(x)
        known = in_buckets is not None
        routed, dense_reason = self.dispatch.decide_tokens(x.layer, num_keys, batch, known=known)
        if routed is not None and in_buckets is not None:
            queries = in_buckets.queries(x, self.dispatch)
            return in_buckets.joined(
                x, [self._routed(in_buckets, each, routed) for each in queries]
            )
        if dense_reason is not None:
            self.statistics.count(dense_reason)
            if (visible := keys.visible(x)) is not None:
                self.statistics.add_visible(visible, all_read=True)
        with self.statistics.timed("attention"):
            return keys.read_all(x)

    def _routed(self, keys: BucketKeys, queries: RoutedQueries, routed: Routing) -> Tensor:
        visited, state = self._read_buckets(keys, queries, routed)
        if (visible := keys.visible(queries.x)) is not None:
            self.statistics.add_visible(visible)
        if self.measure_recall:
            none = visited[:, : queries.x.k.shape[1], :0]
            every_key = queries._replace(window=queries.x.num_keys)
            dense = keys.read_buckets(every_key, none, sink=0)
            self.statistics.add("decode_recall", attention_recall(state.lse, dense.lse))
        return state.out

    def _read_buckets(
        self, keys: BucketKeys, queries: RoutedQueries, routed: Routing
    ) -> tuple[Tensor, SparseAttention]:
        """Returns the visited buckets and the attention of single queries; the kernel counts the
        keys that it reads.
        """
        x, by_head = queries.x, routed.independent
        with self.statistics.timed("selection"):
            visited = routed.router.visit(
                x, routed.budget, queries.buckets, window=queries.window, by_head=by_head
            )
        counts = keys.counts(x, self.statistics)
        with self.statistics.timed("attention"):
            state = keys.read_buckets(
                queries, visited, sink=routed.sink, counts=counts, by_head=by_head
            )
        return visited, state

    def bucket_layers(self, cache: GrowingCache) -> list[BucketLayer]:
        """Returns the routed layers of a cache."""
        layers = [cache.layers[number] for number in sorted(self.dispatch.routed_layers)]
        return cast(list[BucketLayer], layers)

    def window(self, cache: GrowingCache, num_keys: int) -> int:
        """Returns the length of the dense window of a step over ``num_keys``, which includes all
        keys without an index.
        """
        indexed = min((layer.indexed for layer in self.bucket_layers(cache)), default=num_keys)
        return max(
            0 if self.dispatch.routed is None else self.dispatch.routed.recent, num_keys - indexed
        )

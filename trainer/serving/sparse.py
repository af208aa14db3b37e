"""Sparse attention of an attached model, with statistics of what it reads."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msattn.trainer.methods.selection import Selection, selected_attention
from msattn.trainer.models.layer_attention import (
    LayerInputs,
    Pooled,
    attention_recall,
    block_map,
    decoded_attention,
    dense_attention,
)
from msattn.trainer.models.replacement import NotCopied
from msattn.trainer.models.rope import KeysNotKnown, Rotation
from msattn.trainer.serving.contiguous.layers import BucketLayer, GrowingLayer
from msattn.trainer.serving.dispatch import BY_CHOICE, FALLBACK, Dispatch
from msattn.trainer.serving.paged.attention import (
    CACHE_SHARE_OF_MEMORY,
    PagedAttention,
    check_version,
)
from msattn.trainer.serving.routed import visible_keys
from msattn.trainer.serving.statistics import SparseStats, Statistics

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

PAGE_SIZE = 256
COUNTED = (FALLBACK, BY_CHOICE, "graph_steps", "eager_steps")


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
        self.paged = PagedAttention(dispatch, statistics, rotation)

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
        check_version("generate_batch")
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
        dense = self.dispatch.tokens_until_routed(x.num_keys, len(x.q)) > 0
        # Also of prompts: the keys get their buckets now, while those before RoPE are at hand.
        layer = None if dense and self.rotation is not None else self._bucket_layer(x)
        if self.dispatch.is_prompt(x.num_queries, x.num_keys):
            return self._prompt(x)
        # attention over buckets has no gradient
        known = layer is not None and not x.q.requires_grad
        routed, dense_reason = self.dispatch.decide_tokens(
            x.layer, x.num_keys, len(x.q), known=known
        )
        if routed is not None and layer is not None:
            return routed.attend(x, layer, self._short_sequences(x, x.num_keys))
        if dense_reason is not None:
            self.statistics.count(dense_reason)
            self.statistics.add_visible(visible_keys(x), all_read=True)
        return self._dense_attention(x)

    def _short_sequences(self, x: LayerInputs, keys: int | Tensor | None) -> Tensor | None:
        return (
            None
            if x.kv_start is None or keys is None
            else self.dispatch.short_sequences(len(x.q), keys, x.kv_start)
        )

    def _dense_attention(self, x: LayerInputs) -> Tensor:
        with self.statistics.timed("attention"):
            if x.num_queries == 1 and x.q.is_cuda and not x.q.requires_grad:
                return decoded_attention(x).out
            return dense_attention(x)

    def _prompt(self, x: LayerInputs) -> Tensor:
        """Returns the attention of tokens that are read together."""
        selection, dense_reason = self.dispatch.decide_prompt(x.num_queries, x.num_keys)
        if selection is not None:
            if (prompt := self._with_pooled_keys(x)) is not None:
                return self._selected_attention(prompt, selection)
            _, dense_reason = self.dispatch.decide_prompt(x.num_queries, x.num_keys, known=False)
        self.statistics.add_dense(x.layer, dense_reason)
        return self._dense_attention(x)

    def _selected_attention(self, x: LayerInputs, selection: Selection) -> Tensor:
        with torch.no_grad(), self.statistics.timed("selection"):
            chosen = selection.blocks(x)
            self.statistics.add_selected(x.layer, chosen, selection.candidates(x))
        with self.statistics.timed("attention"):
            out, lse = selected_attention(x, chosen, selection.sizes)
        if self.measure_recall:
            dense = block_map(x, selection.sizes)
            self.statistics.add("prefill_recall", attention_recall(lse, dense.lse))
        return out

    def _bucket_layer(self, x: LayerInputs) -> BucketLayer | None:
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

    def _with_pooled_keys(self, x: LayerInputs) -> LayerInputs | None:
        """Returns ``x`` with the pooled keys that the cache keeps for a gate; None if the gate
        needs unknown keys.
        """
        whole_prompt, gate = x.num_queries == x.num_keys, self.dispatch.gate
        if gate is None:
            return x
        # caches pool keys before RoPE
        if not isinstance(x.cache, GrowingLayer) or gate.cfg.rope == "model":
            return x if whole_prompt else None
        try:
            with torch.no_grad(), self.statistics.timed("selection"):
                pooled = x.cache.pool_keys(
                    gate.cfg.cached_pools, gate.cfg.sizes.keys, x, self.rotation
                )
        except KeysNotKnown:
            return None
        return replace(x, pooled=Pooled(pooled, x.num_keys))

    def bucket_layers(self, cache: Any) -> list[BucketLayer]:
        """Returns the routed layers of a cache."""
        return [cache.layers[number] for number in sorted(self.dispatch.routed_layers)]

    def window(self, cache: Any, num_keys: int) -> int:
        """Returns the length of the dense window of a step over ``num_keys``, which includes all
        keys without an index.
        """
        indexed = min((layer.indexed for layer in self.bucket_layers(cache)), default=num_keys)
        return max(
            0 if self.dispatch.routed is None else self.dispatch.routed.recent, num_keys - indexed
        )

    def attend_step(self, x: LayerInputs, window: Tensor, *, dense: bool) -> Tensor:
        """Returns the attention of one layer in a decoding step, ``[B, Hq, 1, D]``, and reads no
        value back.
        """
        routed = None if dense else self.dispatch.decide_tokens(x.layer, None, len(x.q)).attention
        if routed is None:
            return decoded_attention(x).out
        assert isinstance(x.cache, BucketLayer)
        return routed.attend_step(x, x.cache, window, self._short_sequences(x, x.kv_len))

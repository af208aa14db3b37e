"""Dispatch of an attached model's attention to sparse or dense kernels, and statistics of what it reads.

A pass over several tokens, of a prompt or after cached ones, reads the blocks of a selection (SeerAttention). A pass over one
new token, or over a few as in the verification of a draft, reads the dense window and the buckets of a router (SAAP) for each.
"""

import sys
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from msattn.trainer.errors import UserError
from msattn.trainer.methods.blocks import sparsity
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection, selected_attention
from msattn.trainer.models.families import check_length, num_layers, served_layers
from msattn.trainer.models.layer_attention import attention_recall, block_map, decoded_attention
from msattn.trainer.models.rope import KeysNotKnown, Rotation
from msattn.trainer.models.tap import PAGES, LayerInputs, NotCopied, dense_attention, is_tapped
from msattn.trainer.serving.cache.install import check_memory, install_layers
from msattn.trainer.serving.cache.layers import FEW_TOKENS, BucketLayer, GrowingLayer
from msattn.trainer.serving.cache.passes import PagedPass
from msattn.trainer.serving.engines.generate_batch import batching_config
from msattn.trainer.serving.inputs import check_held, check_inputs
from msattn.trainer.serving.paged import PagedAttention, is_paged
from msattn.trainer.serving.routed import RoutedDecoding, visible_keys
from msattn.trainer.serving.statistics import SparseStats, Statistics

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig


class Sparse(NotCopied):
    """Sparse attention of an attached model, with statistics; created by :func:`msattn.trainer.serving.attach.attach`."""

    def __init__(
        self,
        selection: Selection | None,
        routed: RoutedDecoding | None,
        statistics: Statistics,
        *,
        dense_below: int,
        rotation: Rotation | None,
        kv_heads: int,
        measure_recall: bool,
    ) -> None:
        self.selection, self.routed, self.statistics = selection, routed, statistics
        self.dense_below, self.rotation, self.measure_recall = dense_below, rotation, measure_recall
        self.kv_heads = kv_heads  # of this rank
        self.gate = None if selection is None else selection.gate
        self.routed_layers: frozenset[int] = frozenset() if routed is None else routed.layers
        self.paged = PagedAttention(selection, routed, statistics, dense_below=dense_below, rotation=rotation)
        self.attached = True
        self._prepared: WeakSet[Any] = WeakSet()  # caches

    def stats(self) -> SparseStats:
        """Returns statistics since the context began, as means over layers and passes; None where there was no such pass.

        Returns
        -------
        SparseStats
            A dict that prints in one line.
            ``sparsity``: share of the causally visible blocks that passes over several tokens did not read (a block at zoom z
            counts as 1 / z of a block), 0 in a dense pass; None without a selection.
            ``selectivity``: keys that single tokens read in the routed layers, which are those without ``dense_layers``, over
            the keys that are visible there; dense passes included. None without a router.
            ``prefill_recall``, ``decode_recall``: share of the attention mass in what sparse passes read (with
            ``measure_recall``).
            ``recall``: their mean, or the one that was measured.
            ``dense_fallbacks``: layer passes that were dense because sparse attention does not support them.
            ``dense_by_choice``: layer passes that were dense because that is faster at their length, or because of
            ``dense_queries`` of the selection.
            ``graph_steps``, ``eager_steps``: on a GPU, passes over one token of each sequence that replayed a CUDA graph, and
            that launched kernels one by one.
            ``selection_s``, ``attention_s``: total seconds of selecting what to read, and of attention (with
            ``measure_time``).
        """
        prefill, decoding = self.statistics.mean("prefill_recall"), self.statistics.mean("decode_recall")
        measured = [value for value in (prefill, decoding) if value is not None]
        return SparseStats(
            sparsity=self.statistics.mean("sparsity"),
            selectivity=self.statistics.share_of_keys(),
            recall=sum(measured) / len(measured) if measured else None,
            prefill_recall=prefill,
            decode_recall=decoding,
            dense_fallbacks=self.statistics.number("dense_fallbacks"),
            dense_by_choice=self.statistics.number("dense_by_choice"),
            graph_steps=self.statistics.number("graph_steps"),
            eager_steps=self.statistics.number("eager_steps"),
            selection_s=self.statistics.seconds("selection"),
            attention_s=self.statistics.seconds("attention"),
        )

    def batching_config(self, **options: Any) -> "ContinuousBatchingConfig":
        """Returns the configuration of transformers' continuous batching that suits an attached model.

        Pages of 256 tokens, and CUDA graphs for new tokens on a GPU. ``model.generate_batch`` takes it by default. How many
        pages a request may have is set by its length, or else by the positions of the model.

        Parameters
        ----------
        **options : values of transformers' ``ContinuousBatchingConfig`` that replace these.

        Raises
        ------
        UserError : transformers is older than 5.23.
        """
        return batching_config(**options)

    def dispatch(self, x: LayerInputs) -> Tensor:
        """Returns the attention of one layer, ``[B, Hq, N, D]``: sparse if an artifact supports this pass, else dense."""
        if torch.is_autocast_enabled(x.q.device.type):
            x = replace(x, q=x.q.to(x.v.dtype), k=x.k.to(x.v.dtype))  # RoPE returns fp32 under autocast
            with torch.autocast(x.q.device.type, enabled=False):
                return self.dispatch(x)
        if isinstance(x.cache, PagedPass):
            return self.paged.attend(x)
        pays = x.num_keys >= self.routed_from(len(x.q))
        layer = self._bucket_layer(x) if pays or self.rotation is None else None
        out = None
        if x.num_queries < x.num_keys and x.num_queries <= (1 if self.routed is None else FEW_TOKENS):
            if self.routed is not None and x.layer in self.routed_layers:
                out = self._routed_attention(x, layer, self.routed) if pays else self._count_dense_tokens(x, "dense_by_choice")
        elif self.selection is not None:
            out = self._selected_attention(x, self.selection)
        return self._dense_attention(x) if out is None else out

    def _dense_attention(self, x: LayerInputs) -> Tensor:
        with self.statistics.timed("attention"):
            if x.num_queries == 1 and x.q.is_cuda and not x.q.requires_grad:
                return decoded_attention(x).out
            return dense_attention(x)

    def _routed_attention(self, x: LayerInputs, layer: BucketLayer | None, routed: RoutedDecoding) -> Tensor | None:
        """Returns the attention of a few new tokens over buckets; None, and counts it, if their cache has none."""
        if layer is None or x.q.requires_grad:  # attention over buckets has no gradient
            return self._count_dense_tokens(x, "dense_fallbacks")
        return routed.attend(x, layer)

    def _count_dense_tokens(self, x: LayerInputs, reason: str) -> None:
        """Counts new tokens of a routed layer that dense attention serves."""
        self.statistics.count(reason)
        self.statistics.add_visible(visible_keys(x), all_read=True)

    def _selected_attention(self, x: LayerInputs, selection: Selection) -> Tensor | None:
        """Returns the attention of a prompt over selected blocks; None, and counts it, if dense attention serves it."""
        is_short = x.num_keys < self.dense_below or x.num_queries <= selection.always.dense_queries
        prompt = None if is_short else self._with_pooled_keys(x)
        if prompt is None:
            self.statistics.count("dense_by_choice" if is_short else "dense_fallbacks")
            self.statistics.add("sparsity", 0.0)
            return None
        with torch.no_grad(), self.statistics.timed("selection"):
            chosen = selection.blocks(prompt)
            self.statistics.add("sparsity", sparsity(chosen, selection.candidates(prompt)))
        with self.statistics.timed("attention"):
            out, lse = selected_attention(prompt, chosen, selection.block_size)
        if self.measure_recall:
            dense = block_map(x, selection.block_size)
            self.statistics.add("prefill_recall", attention_recall(lse, dense.lse))
        return out

    def _bucket_layer(self, x: LayerInputs) -> BucketLayer | None:
        """Returns the cache of a routed layer, in which keys have buckets; None if there is no such cache."""
        if self.routed is None or x.layer not in self.routed_layers or not isinstance(x.cache, BucketLayer):
            return None
        with self.statistics.timed("selection"):
            try:
                x.cache.assign(self.routed.router, x, self.rotation)
            except KeysNotKnown:
                return None
        return x.cache

    def _with_pooled_keys(self, x: LayerInputs) -> LayerInputs | None:
        """Returns ``x`` with the pooled keys that a gate needs after cached tokens; None if they are not known."""
        whole_prompt = x.num_queries == x.num_keys
        if self.gate is None or (whole_prompt and not isinstance(x.cache, GrowingLayer)):
            return x
        if not isinstance(x.cache, GrowingLayer):
            return None
        try:
            with torch.no_grad(), self.statistics.timed("selection"):
                pooled = x.cache.pool_keys(self.gate.cfg.k_pool, self.gate.cfg.block_size, x, self.rotation)
        except KeysNotKnown:
            return None
        return x if whole_prompt else replace(x, pooled_keys=pooled)

    def takes_steps(self, cache: Any) -> bool:
        """Returns whether the next token of ``cache`` may be a step, which reads lengths from the device."""
        return not self.measure_recall and self.statistics.timer is None and cache.get_seq_length() > 0

    def routed_from(self, batch: int) -> int:
        """Returns the number of keys from which steps read buckets."""
        return self.routed.routed_from(batch) if self.routed is not None and self.routed_layers else sys.maxsize

    def bucket_layers(self, cache: Any) -> list[BucketLayer]:
        """Returns the routed layers of a cache."""
        return [cache.layers[number] for number in sorted(self.routed_layers)]

    def window(self, cache: Any, num_keys: int) -> int:
        """Returns the length of the dense window of a step over ``num_keys``: it holds all keys that are not indexed."""
        indexed = min((layer.indexed for layer in self.bucket_layers(cache)), default=num_keys)
        return max(0 if self.routed is None else self.routed.recent, num_keys - indexed)

    def modules(self) -> list[torch.nn.Module]:
        """Returns the modules whose weights a step reads besides the model's."""
        router = None if self.routed is None else self.routed.router
        return [router] if isinstance(router, torch.nn.Module) else []

    def attend_step(self, x: LayerInputs, window: Tensor, *, routed: bool) -> Tensor:
        """Returns the attention of one layer in a decoding step, ``[B, Hq, 1, D]``, and reads no value back."""
        if routed and self.routed is not None and x.layer in self.routed_layers:
            return self.routed.attend_step(x, window)
        return decoded_attention(x).out

    def add_visible(self, keys: int, *, routed: bool) -> None:
        """Counts the keys of one layer that a step sees, in all rows and key/value heads."""
        if self.routed_layers:
            self.statistics.add_visible(keys * len(self.routed_layers), all_read=not routed)

    def count_step(self, *, routed: bool, graph: bool) -> None:
        """Counts a step."""
        self.statistics.count("graph_steps" if graph else "eager_steps")
        if self.routed_layers and not routed:
            self.statistics.count("dense_by_choice", len(self.routed_layers))

    def prepare_cache(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the decoder, which installs its layers in the cache."""
        if args:
            names = list(signature(type(module).forward).parameters)[1:]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        config: Any = module.config
        self._check_outputs(config, kwargs)
        if is_paged(kwargs):
            return args, self.paged.begin(config, kwargs)
        kwargs.pop(PAGES, None)
        cache, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
        if cache is None:
            check_inputs(module, kwargs)
        else:
            self._prepare(cache, module, kwargs)
        return args, {**kwargs, "past_key_values": cache}

    def _prepare(self, cache: Any, module: Any, kwargs: dict[str, Any]) -> None:
        """Installs the decoder's layers in a cache that is new to it, and checks the pass over it."""
        config, is_new = module.config, not isinstance(cache, Cache) or cache not in self._prepared
        static = is_new and getattr(cache, "is_compileable", False)
        if is_new:
            layers, served = num_layers(config), served_layers(config)
            dense = tuple(set(range(layers)) - self.routed_layers)
            router, every = (None, 1) if self.routed is None else (self.routed.router, self.routed.rebuild_every)
            install_layers(cache, router, num_layers=layers, served=served, dense_layers=dense, rebuild_every=every)
        cached = cache.get_seq_length()
        tokens = check_inputs(module, kwargs, cached=cached, static=static)
        if tokens is None:  # the model has a message of its own
            return
        check_held(cache, config, len(tokens), self.kv_heads, every_layer=is_new)
        if is_new:
            self._check_partition(cache)
            self._prepared.add(cache)
        self._check_prompt(config, cached, tokens.shape[1])
        check_memory(cache, config, *tokens.shape[:2], dtype=module.dtype, device=tokens.device)

    def _check_prompt(self, config: Any, cached: int, tokens: int) -> None:
        """Raises UserError for a prompt that exceeds the model's positions; decoded tokens and drafts may."""
        if tokens > (FEW_TOKENS if cached else 1):
            check_length(
                config, cached + tokens, f"prompt of {tokens} tokens" + (f" after {cached} cached ones" if cached else "")
            )

    def _check_outputs(self, config: Any, kwargs: dict[str, Any]) -> None:
        """Raises UserError where the model would silently run without this attention, or without attention weights."""
        if not is_tapped(config):
            raise UserError(
                f"model: set_attn_implementation({config._attn_implementation!r}) turns sparse attention off; call it outside "
                "the attached context"
            )
        if kwargs.get("output_attentions") or config.output_attentions:
            raise UserError("output_attentions=True: sparse attention has no attention weights to return")

    def guard_backward(self, module: Any, args: tuple, output: Any) -> None:
        """Forward hook of the decoder: activation checkpointing must not run the forward pass again without this attention."""
        hidden: Tensor = output[0]
        if hidden.requires_grad and any(
            layer.training and getattr(layer, "gradient_checkpointing", False) for layer in module.layers
        ):
            hidden.register_hook(self._check_attached)

    def _check_attached(self, gradient: Tensor) -> None:
        if not self.attached:
            raise UserError(
                "backward: with activation checkpointing it runs the forward pass again, so call it inside the attached context"
            )

    def _check_partition(self, cache: Any) -> None:
        """Raises UserError if the buckets of ``cache`` belong to another partition; records the partition in new layers."""
        if self.routed is None:
            return
        router = self.routed.router
        partition: Any = getattr(router, "partition", router)  # a QModel has a KMeans, a KMeans routes itself
        for layer in cache.layers:
            if not isinstance(layer, BucketLayer):
                continue
            if layer.partition is None:
                layer.partition = partition
            elif not _same_partition(layer.partition, partition):
                raise UserError(
                    "past_key_values: its buckets were made with another k-means or router than the one attached now"
                )


def _same_partition(a: Any, b: Any) -> bool:
    """Returns whether two partitions assign each key to the same bucket, and summarize buckets alike."""
    if isinstance(a, KMeans) and isinstance(b, KMeans):
        return a is b or (a.rope == b.rope and torch.equal(a.centroids, b.centroids))
    if isinstance(a, DecodeGate) and isinstance(b, DecodeGate):  # summaries are made with their weights
        return a is b or (a.cfg == b.cfg and all(map(torch.equal, a.state_dict().values(), b.state_dict().values())))
    return a is b

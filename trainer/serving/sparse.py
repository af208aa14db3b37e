"""Dispatch of an attached model's attention to sparse or dense kernels, and statistics of what it reads.

A pass over several tokens, of a prompt or after cached ones, reads the blocks of a selection (SeerAttention). A pass over one
new token reads the dense window and the buckets of a router (SAAP).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import num_layers
from msattn.trainer.models.recall import attention_recall
from msattn.trainer.models.rope import KeysNotKnown, Rotation
from msattn.trainer.models.tap import IMPLEMENTATION, LayerInputs, NotCopied, dense_attention
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.saap.routing import Router, route
from msattn.trainer.seer.select import GateScores, Selection, selected_attention, sparsity
from msattn.trainer.serving.cache import BucketLayer, GrowingLayer, decode_attention, install_layers, is_replaceable
from msattn.trainer.serving.statistics import Statistics


class Sparse(NotCopied):
    """Sparse attention of an attached model, with statistics; created by :func:`msattn.trainer.attach.attach`."""

    def __init__(
        self,
        selection: Selection | None,
        router: Router | None,
        *,
        probes: int,
        recent: int,
        sink: int,
        dense_layers: tuple[int, ...],
        dense_below: int,
        rotation: Rotation | None,
        measure_recall: bool,
        timer: PhaseTimer | None,
    ) -> None:
        self.selection, self.router, self.dense_below, self.timer = selection, router, dense_below, timer
        self.rotation = rotation
        self.gate = selection.scorer.gate if selection is not None and isinstance(selection.scorer, GateScores) else None
        self.probes, self.recent, self.sink, self.measure_recall = probes, recent, sink, measure_recall
        self.routed = frozenset() if router is None else frozenset(router.layers) - frozenset(dense_layers)
        self.attached = True
        self._read = Statistics()

    def stats(self) -> dict[str, Any]:
        """Returns statistics since the context began, as means over layers and passes; None where there was no such pass.

        Returns
        -------
        dict
            ``sparsity``: share of the causally visible blocks that passes over several tokens did not read (a block at zoom z
            counts as 1 / z of a block), 0 in a dense pass; None without a selection.
            ``selectivity``: share of the keys that single tokens read in the routed layers, which are those without
            ``dense_layers``, 1 in a dense pass; None without a router.
            ``prefill_recall``, ``decode_recall``: share of the attention mass in what sparse passes read (with
            ``measure_recall``).
            ``recall``: their mean, or the one that was measured.
            ``dense_fallbacks``: layer passes that were dense because sparse attention does not support them.
            ``dense_by_choice``: layer passes that were dense because the prompt was shorter than ``select.dense_below``.
            ``selection_s``, ``attention_s``: total seconds of selecting what to read, and of attention (with
            ``measure_time``).
        """
        prefill, decoding = self._read.mean("prefill_recall"), self._read.mean("decode_recall")
        measured = [value for value in (prefill, decoding) if value is not None]
        return {
            "sparsity": self._read.mean("sparsity"),
            "selectivity": self._read.mean("selectivity"),
            "recall": sum(measured) / len(measured) if measured else None,
            "prefill_recall": prefill,
            "decode_recall": decoding,
            "dense_fallbacks": self._read.count("dense_fallbacks"),
            "dense_by_choice": self._read.count("dense_by_choice"),
            "selection_s": self.timer and self.timer.seconds("selection"),
            "attention_s": self.timer and self.timer.seconds("attention"),
        }

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext() if self.timer is None else self.timer.measure(phase)

    def dispatch(self, x: LayerInputs) -> Tensor:
        """Returns the attention of one layer, ``[B, Hq, N, D]``: sparse if an artifact supports this pass, else dense."""
        if torch.is_autocast_enabled(x.q.device.type):
            x = replace(x, q=x.q.to(x.v.dtype), k=x.k.to(x.v.dtype))  # RoPE returns fp32 under autocast
            with torch.autocast(x.q.device.type, enabled=False):
                return self.dispatch(x)
        layer = self._bucket_layer(x)
        if x.num_queries == 1 and x.num_keys > 1:
            if layer is not None:
                return self._sparse_decode(x, layer)
            if x.layer in self.routed:
                self._read.add("dense_fallbacks")
                self._read.add("selectivity", 1.0)
        elif self.selection is not None:
            prompt = self._with_pooled_keys(x) if x.num_keys >= self.dense_below else None
            if prompt is not None:
                return self._sparse_prefill(prompt, self.selection)
            self._read.add("dense_by_choice" if x.num_keys < self.dense_below else "dense_fallbacks")
            self._read.add("sparsity", 0.0)
        with self._timed("attention"):
            if x.num_queries == 1 and x.q.is_cuda and not x.q.requires_grad:
                return flash_decode(x.q, x.k, x.v, scale=x.scale, kv_start=x.kv_start).out
            return dense_attention(x)

    def _bucket_layer(self, x: LayerInputs) -> BucketLayer | None:
        """Returns the cache of a routed layer, in which every key has a bucket; None if there is no such cache."""
        if self.router is None or x.layer not in self.routed or not isinstance(x.cache, BucketLayer):
            return None
        with self._timed("selection"):
            try:
                x.cache.assign(self.router, x, self.rotation)
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
            with torch.no_grad(), self._timed("selection"):
                pooled = x.cache.pool_keys(self.gate.cfg.k_pool, self.gate.cfg.block_size, x, self.rotation)
        except KeysNotKnown:
            return None
        return x if whole_prompt else replace(x, pooled_keys=pooled)

    def _sparse_prefill(self, x: LayerInputs, selection: Selection) -> Tensor:
        size = selection.block_size
        with torch.no_grad(), self._timed("selection"):
            chosen = selection.blocks(x)
            self._read.add("sparsity", sparsity(chosen, selection.candidates(x)))
        with self._timed("attention"):
            out, lse = selected_attention(x, chosen, size)
        if self.measure_recall:
            dense = maxpool_attention(x.q, x.k, x.v, block_size=size, scale=x.scale, kv_start=x.kv_start)
            self._read.add("prefill_recall", attention_recall(lse, dense.lse))
        return out

    def _sparse_decode(self, x: LayerInputs, layer: BucketLayer) -> Tensor:
        assert self.router is not None
        with self._timed("selection"):
            visited = route(self.router, x, self.probes)
        with self._timed("attention"):
            out, lse = decode_attention(x, visited, recent=self.recent, sink=self.sink)
        num_read = layer.keys_read(visited, recent=self.recent, sink=self.sink, kv_start=x.kv_start)
        padded = 0 if x.kv_start is None else x.kv_start[:, None]
        self._read.add("selectivity", num_read / (x.num_keys - padded))
        if self.measure_recall:
            dense = bucket_decode(
                x.q, x.k, x.v, layer.index, visited, recent=x.num_keys, sink=0, scale=x.scale, kv_start=x.kv_start
            )
            self._read.add("decode_recall", attention_recall(lse, dense.lse))
        return out

    def prepare_cache(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the decoder, which installs its layers in the cache."""
        from transformers import DynamicCache

        args, kwargs = (), {**dict(zip(signature(module.forward).parameters, args, strict=False)), **kwargs}
        config: Any = module.config
        self._check_outputs(config, kwargs)
        if self.router is None and self.gate is None:
            return args, kwargs
        cache, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
        if isinstance(cache, DynamicCache) and (self.router is not None or all(map(is_replaceable, cache.layers))):
            dense = tuple(set(range(num_layers(config))) - self.routed)
            install_layers(cache, self.router, num_layers=num_layers(config), dense_layers=dense)
            self._check_partition(cache)
        return args, {**kwargs, "past_key_values": cache}

    def _check_outputs(self, config: Any, kwargs: dict[str, Any]) -> None:
        """Raises UserError where the model would silently run without this attention, or without attention weights."""
        if config._attn_implementation != IMPLEMENTATION:
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
        partition: Any = getattr(self.router, "partition", self.router)  # a QModel has a KMeans, a KMeans routes itself
        for layer in cache.layers:
            if not isinstance(layer, BucketLayer):
                continue
            if layer.partition is None:
                layer.partition = partition
            elif layer.partition is not partition and not torch.equal(layer.partition.centroids, partition.centroids):
                raise UserError("past_key_values: its buckets were made with another k-means than the one attached now")

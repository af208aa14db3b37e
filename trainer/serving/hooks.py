"""Hooks of an attached model's decoder, which prepare the cache of a pass and check the pass's
inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS
from msattn.trainer.models.families import check_length, served_layers
from msattn.trainer.models.replacement import NotCopied, replaced
from msattn.trainer.models.tap import PAGES, is_tapped
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer, rebuild_every
from msattn.trainer.serving.contiguous.install import install_layers
from msattn.trainer.serving.engines.batch_pages import is_paged
from msattn.trainer.serving.input_checks import check_held, check_inputs, check_memory


@contextmanager
def hooked(decoder: nn.Module, sparse: Sparse) -> Iterator[None]:
    """Registers the hooks of a decoder inside the context."""
    hooks = DecoderHooks(sparse, decoder.config)
    handles = [
        decoder.register_forward_pre_hook(hooks.prepare_cache, with_kwargs=True),
        decoder.register_forward_hook(hooks.guard_backward),
    ]
    try:
        yield
    finally:
        hooks.attached = False
        for handle in handles:
            handle.remove()


@contextmanager
def padding_before_text(model: Any) -> Iterator[None]:
    """Lets ``generate`` infer a mask only from pad tokens around the text of a row, inside the
    context.

    If there is no mask, transformers masks every pad token of a prompt, even pad tokens that are
    text because an assistant generated them. Right padding, which is refused, occurs only in a
    batch of several rows.
    """
    original: Any = getattr(model, "_prepare_attention_mask_for_generation", None)
    if original is None:
        yield
        return

    def infer(*args: Any, **kwargs: Any) -> Tensor:
        mask = original(*args, **kwargs)
        begun, ended = mask.cumsum(-1) > 0, mask.flip(-1).cumsum(-1).flip(-1) == 0
        return (begun & ~ended if len(mask) > 1 else begun).long()

    # for a PEFT model, the model inside
    with replaced(original.__self__, infer, name=original.__name__):
        yield


class DecoderHooks(NotCopied):
    """The hooks of one decoder with sparse attention."""

    def __init__(self, sparse: Sparse, config: Any) -> None:
        self.sparse, self.attached = sparse, True
        self.served = served_layers(config)
        # transformers 5.17 leaves out those that read keys of others
        self.num_layers = len(DynamicCache(config=config).layers)
        self._prepared: WeakSet[Any] = WeakSet()  # caches

    def prepare_cache(
        self, module: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the decoder that installs its layers in the cache."""
        if args:
            names = list(signature(type(module).forward).parameters)[1:]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        config: Any = module.config
        self._check_outputs(config, kwargs)
        if (pages := kwargs.get("cache")) is not None and is_paged(pages):
            return args, kwargs  # generate_batch has its own hooks
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
        """Installs the decoder's layers in a cache that is new to it, and checks the pass over
        it.
        """
        is_new = not isinstance(cache, Cache) or cache not in self._prepared
        static = is_new and getattr(cache, "is_compileable", False)
        if is_new:
            self._install(cache, module.config)
        tokens = check_inputs(module, kwargs, cached=cache.get_seq_length(), static=static)
        if tokens is None:  # the model has a message of its own
            return
        shape = self.num_layers, self.served, len(tokens), self.sparse.kv_heads
        check_held(cache, module.config, *shape, every_layer=is_new)
        if is_new:
            self._check_partition(cache)
            self._prepared.add(cache)
        self._check_room(cache, module, tokens)

    def _install(self, cache: Any, config: Any) -> None:
        """Installs the decoder's layers in a cache."""
        # made without the model's configuration
        if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
            cache.layers += DynamicCache(config=config).layers[len(cache.layers) :]
        options: dict[str, Any] = {"num_layers": self.num_layers, "served": self.served}
        routed = self.sparse.dispatch.routed
        if routed is None:
            install_layers(cache, None, **options)
        else:
            options |= {"routed": routed.layers, "rebuild_every": rebuild_every(routed.recent)}
            install_layers(cache, routed.router, **options)

    def _check_room(self, cache: Any, module: Any, tokens: Tensor) -> None:
        """Raises UserError for more ``tokens`` than fit the model's positions or the memory."""
        config, cached, new = module.config, cache.get_seq_length(), tokens.shape[1]
        # decoded tokens and drafts may exceed the positions
        if new > (MAX_ROUTED_TOKENS if cached else 1):
            what = f"prompt of {new} tokens" + (f" after {cached} cached ones" if cached else "")
            check_length(config, cached + new, what)
        check_memory(
            cache, config, self.served, *tokens.shape[:2], dtype=module.dtype, device=tokens.device
        )

    def _check_outputs(self, config: Any, kwargs: dict[str, Any]) -> None:
        """Raises UserError if the model would silently run without this attention, or without
        attention weights.
        """
        if not is_tapped(config):
            raise UserError(
                f"model: set_attn_implementation({config._attn_implementation!r}) turns sparse "
                "attention off; call it outside the attached context"
            )
        if kwargs.get("output_attentions") or config.output_attentions:
            raise UserError(
                "output_attentions=True: sparse attention has no attention weights to return"
            )

    def guard_backward(self, module: Any, args: tuple, output: Any) -> None:
        """Forward hook of the decoder that keeps activation checkpointing from running it again
        without this attention.
        """
        if not output[0].requires_grad:
            return
        if any(
            layer.training and getattr(layer, "gradient_checkpointing", False)
            for layer in module.layers
        ):
            output[0].register_hook(self._check_attached)

    def _check_attached(self, gradient: Tensor) -> None:
        if not self.attached:
            raise UserError(
                "backward: with activation checkpointing it runs the forward pass again, so call "
                "it inside the attached context"
            )

    def _check_partition(self, cache: Any) -> None:
        """Raises UserError if the buckets of ``cache`` belong to another partition."""
        if self.sparse.dispatch.routed is None:
            return
        assigner = self.sparse.dispatch.routed.router.assigner
        if not all(
            layer.partition.assigns_like(assigner)
            for layer in cache.layers
            if isinstance(layer, BucketLayer)
        ):
            raise UserError(
                "past_key_values: its buckets were made with another k-means or router than the "
                "one attached now"
            )

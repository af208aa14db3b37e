"""Hooks of an attached model's decoder, which check the inputs of a pass, before it changes the
cache, and prepare its cache.

Types and shapes are always checked. Ids are read from the device once for a prompt, but not for
single tokens after it, because these would have to wait for the GPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS
from msattn.trainer.models.families import attention_layers, check_length, head_dim, served_layers
from msattn.trainer.models.replacement import NotCopied, replaced
from msattn.trainer.models.tap import CACHE, PAGES, is_tapped
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer, rebuild_every
from msattn.trainer.serving.contiguous.install import (
    CacheShape,
    check_held,
    check_memory,
    install_layers,
)
from msattn.trainer.serving.engines.batch_pages import is_paged
from msattn.trainer.serving.engines.generate_batch import Managers

INTEGERS = (torch.int64, torch.int32)


@contextmanager
def hooked(decoder: nn.Module, sparse: Sparse, managers: Managers | None) -> Iterator[None]:
    """Registers the hooks of a decoder inside the context; ``managers`` describe the passes over
    their caches.
    """
    hooks = DecoderHooks(sparse, managers, decoder.config)
    handles = [
        decoder.register_forward_pre_hook(hooks.begin_pass, with_kwargs=True),
        decoder.register_forward_hook(hooks.end_pass, with_kwargs=True),
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

    def __init__(self, sparse: Sparse, managers: Managers | None, config: Any) -> None:
        self.sparse, self.managers, self.attached = sparse, managers, True
        self.shape = CacheShape(
            # transformers 5.17 leaves out those that read keys of others
            num_layers=len(DynamicCache(config=config).layers),
            served=served_layers(config),
            kv_heads=sparse.kv_heads,
            head_dim=head_dim(config),
        )
        self._prepared: WeakSet[Any] = WeakSet()  # caches

    def begin_pass(
        self, module: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the decoder that installs its layers in the cache, or describes a
        pass over the cache of a manager.
        """
        if args:
            names = list(signature(type(module).forward).parameters)[1:]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        config: Any = module.config
        self._check_outputs(config, kwargs)
        pages = kwargs.get("cache")
        if pages is not None and self.managers is not None and is_paged(pages):
            return args, self.managers.begin_pass(config, kwargs)
        kwargs.pop(PAGES, None)
        # a decoder of transformers 5.24 would rename it after these hooks
        kwargs.setdefault(CACHE, kwargs.pop("past_key_values", None))
        cache, use_cache = kwargs[CACHE], kwargs.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
        if cache is None:
            check_inputs(module, kwargs)
        else:
            self._prepare(cache, module, kwargs)
        return args, {**kwargs, CACHE: cache}

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
        check_held(cache, self.shape, len(tokens), every_layer=is_new)
        if is_new:
            self._check_partition(cache)
            self._prepared.add(cache)
        self._check_room(cache, module, tokens)

    def _install(self, cache: Any, config: Any) -> None:
        """Installs the decoder's layers in a cache."""
        # made without the model's configuration
        if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
            cache.layers += DynamicCache(config=config).layers[len(cache.layers) :]
        options: dict[str, Any] = {
            "num_layers": self.shape.num_layers,
            "served": self.shape.served,
        }
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
        check_memory(cache, self.shape, *tokens.shape[:2], dtype=module.dtype, device=tokens.device)

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

    def end_pass(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder that ends a pass over pages, and keeps activation
        checkpointing from running one again without this attention.
        """
        if (attend := kwargs.get(PAGES)) is not None:
            (current,) = attend.args
            self.sparse.paged.end(current)
        if output[0].requires_grad and any(
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


def check_inputs(
    decoder: Any, inputs: Mapping[str, Any], *, cached: int = 0, static: bool = False
) -> Tensor | None:
    """Returns the ids ``[B, N]`` or embeddings ``[B, N, hidden]`` of a pass; None if the model
    raises its own message.

    ``inputs`` are the arguments of a pass after ``cached`` tokens, which their ``attention_mask``
    also covers. For a ``static`` cache of the caller, ``generate`` converts the mask to
    ``kv_start`` before the pass. Models with images do so for each type of layer before they run
    their language model. Raises UserError for a wrong type or shape, no tokens, or an unknown id.
    """
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if (ids is None) == (embeddings is None):
        return None
    tokens = (
        _checked_embeddings(decoder, embeddings)
        if ids is None
        else _checked_ids(decoder, ids, cached)
    )
    batch, length = tokens.shape[:2]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    converts = static or (
        isinstance(mask, Mapping) and any(layer.kept for layer in attention_layers(decoder.config))
    )
    if mask is not None and not (converts and _is_converted(mask, batch)):
        fits = _is_ordinary(mask) and mask.shape == (batch, cached + length)
        _require(
            fits,
            "attention_mask",
            mask,
            f"a 2D mask [{batch}, {cached + length}], cached tokens included",
        )
    if positions is not None:
        positions = _text_positions(positions, length)
        fits = (
            _is_ordinary(positions)
            and positions.shape in ((batch, length), (1, length))
            and positions.dtype in INTEGERS
        )
        _require(fits, "position_ids", positions, f"integers [{batch}, {length}]")
    return tokens


def _text_positions(positions: Any, length: int) -> Any:
    """Returns text positions; models with images give positions for time, height and width.

    Raises UserError if these differ for a token of a prompt, as in images, because cached keys do
    not store them.
    """
    # the first ones are those of text
    if not (_is_ordinary(positions) and positions.ndim == 3 and len(positions) == 4):
        return positions
    if length > 1 and (positions[1:] != positions[1]).any():
        raise UserError(
            "position_ids: images, whose tokens have positions in height and width, are not "
            "supported"
        )
    return positions[0]


def _checked_ids(decoder: Any, ids: Any, cached: int) -> Tensor:
    """Returns the ids of a pass after checking them."""
    fits = _is_ordinary(ids) and ids.ndim == 2 and ids.numel() > 0 and ids.dtype in INTEGERS
    _require(
        fits,
        "input_ids",
        ids,
        "int64 [batch, tokens], one token or more"
        + (f" after {cached} cached ones" if cached else ""),
    )
    decodes = cached > 0 and ids.shape[1] == 1
    captures = ids.is_cuda and torch.cuda.is_current_stream_capturing()
    if ids.device.type == "cpu" or not (decodes or captures):
        lowest, highest = torch.stack(ids.aminmax()).tolist()  # one synchronization with the device
        size = decoder.config.vocab_size
        if lowest < 0 or highest >= size:
            raise UserError(
                f"input_ids: {lowest if lowest < 0 else highest} is no token; expected 0 to "
                f"{size - 1}"
            )
    return ids


def _checked_embeddings(decoder: Any, embeddings: Any) -> Tensor:
    """Returns the embeddings of a pass after checking them; autocast converts other dtypes."""
    width, dtype = decoder.config.hidden_size, decoder.dtype
    fits = (
        _is_ordinary(embeddings)
        and embeddings.ndim == 3
        and embeddings.numel() > 0
        and embeddings.shape[2] == width
    )
    converts = (
        fits
        and embeddings.is_floating_point()
        and torch.is_autocast_enabled(embeddings.device.type)
    )
    fits = fits and (embeddings.dtype == dtype or converts)
    _require(
        fits,
        "inputs_embeds",
        embeddings,
        f"{_name(dtype)} [batch, tokens, {width}], one token or more",
    )
    return embeddings


def _is_converted(mask: Any, batch: int) -> bool:
    """Returns True for the ``kv_start`` of a batch, or for one mask per layer type, including full
    attention.
    """
    if isinstance(mask, Mapping):
        return "full_attention" in mask and _is_converted(mask["full_attention"], batch)
    return mask is None or (
        _is_ordinary(mask) and mask.dtype == torch.int32 and mask.shape == (batch,)
    )


def _is_ordinary(x: Any) -> bool:
    """Returns True for an ordinary tensor: not sparse, nested, quantized or on the meta device."""
    return (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta)
    )


def _require(condition: bool, name: str, value: Any, accepted: str) -> None:
    if not condition:
        raise UserError(f"{name} of {_described(value)}: expected {accepted}")


def _described(value: Any) -> str:
    """Returns dtype and shape of an ordinary tensor, and the type of another value."""
    if not isinstance(value, Tensor):
        return f"type {type(value).__name__}"
    kind = (
        ""
        if _is_ordinary(value)
        else "nested "
        if value.is_nested
        else f"{_name(value.layout)} {value.device.type} "
    )
    return f"{kind}{_name(value.dtype)}" + ("" if value.is_nested else f" {list(value.shape)}")


def _name(attribute: Any) -> str:
    return str(attribute).removeprefix("torch.")

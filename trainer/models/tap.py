"""Interception of the attention of each layer of a running decoder.

Inside ``tap(model, attend)`` every attention layer passes its :class:`LayerInputs` to ``attend``
and uses the returned output. It uses transformers' extension points: an attention function and a
mask function registered under one name, and module hooks for tensors that these do not receive
(queries and keys before RoPE, cos and sin, the cache). Layers that are not served
(:func:`msattn.trainer.models.families.served_layers`) keep the model's attention function, mask and
cache. Leaving the context removes all hooks and restores the configuration.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from msattn.kernels.unrotate import unrotate
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import (
    FULL,
    Family,
    attention_layers,
    decoder,
    family_of,
    layer_kinds,
    max_length,
)
from msattn.trainer.models.layer_attention import (
    Angles,
    LayerInputs,
    Scoring,
    causal_attention,
    dense_attention,
)
from msattn.trainer.models.replacement import NotCopied, replaced

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig, PreTrainedModel

IMPLEMENTATION = "msattn_tap"
# A second name of the same implementation, as transformers decides by the name:
# - Managers of continuous batching accept only names that contain "flash", so the first manager
#   sets this one. Before that it would cost time: transformers then passes 2D masks to generate,
#   also without padding, and reads them at each token.
# - Models whose last layers read the keys of others (Gemma 4) have it from the start: with other
#   names they cut queries and 4D masks.
BATCHED_IMPLEMENTATION = "msattn_flash_tap"
TAP = "msattn_tap"  # keyword that hands an attention function its layer's tap
# keyword of a decoder whose cache is paged, with the attention of the pass
PAGES = "msattn_pages"
DENSE_IMPLEMENTATION = "msattn_dense"
# keyword of the cache in models and their modules, and its name in their outputs: transformers 5.24
# has renamed it
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
_entering = threading.Lock()  # if two threads attach one model, the second is refused


class _Kept(NamedTuple):
    """The layers of a tapped model that are not served, and their attention implementation.

    Full-attention layers among them use the mask of served layers and run :func:`causal_attention`.
    """

    layers: frozenset[int]
    full: frozenset[int]
    implementation: str


_kept: dict[int, _Kept] = {}  # keyed by the id of the configuration


Attend = Callable[[LayerInputs], Tensor]
"""Maps a layer's inputs to its attention output ``[B, Hq, N, D]``."""

Forward = Callable[["LayerTap"], Callable[..., Any] | None]
"""Returns the forward pass of a tapped module, which computes the inputs of its attention itself;
None: the module keeps its own.
"""


class _Pass(threading.local):
    """Tensors of the forward pass that the current thread runs: several threads may run one
    model.
    """

    q_nope: Tensor | None = None
    k_nope: Tensor | None = None
    kwargs: Mapping[str, Any] | None = None  # of the module; None where no tensors are kept

    def clear(self) -> None:
        self.q_nope = self.k_nope = self.kwargs = None


class LayerTap(NotCopied):
    """Hooks of one attention module, which keep q and k before RoPE until the attention function
    runs.

    They do so for the module's own forward pass, which gets the keywords of :meth:`keep`. Another
    ``forward`` pass of the module computes these tensors itself.
    """

    def __init__(
        self, module: Any, attend: Attend, family: Family, *, rotates: bool, forward: Forward
    ) -> None:
        self.module, self.attend, self.family, self.rotates = module, attend, family, rotates
        self.current = _Pass()
        self._context = ExitStack()
        if (own := forward(self)) is None:
            hook = module.register_forward_pre_hook(self._enter, with_kwargs=True)
            self._context.callback(hook.remove)
        else:
            self._context.enter_context(replaced(module, own))
        if rotates and not family.changed_after_rope:
            queries, keys = family.modules_before_rope(module)
            for hook in (
                queries.register_forward_hook(self._keep_q),
                keys.register_forward_hook(self._keep_k),
            ):
                self._context.callback(hook.remove)

    @torch.compiler.disable
    def _enter(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        return args, self.keep(kwargs)

    def keep(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keeps tensors of the module's own pass from now on; returns its keyword arguments."""
        self.current.kwargs = kwargs
        # transformers forwards unknown keywords to the attention function
        return {**kwargs, TAP: self}

    @torch.compiler.disable
    def _keep_q(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self.current.kwargs is not None:
            self.current.q_nope = output

    @torch.compiler.disable
    def _keep_k(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self.current.kwargs is not None:
            self.current.k_nope = output

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_start: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        layer: int = self.module.layer_idx
        given, cache = self.current.kwargs, None
        assert given is not None
        attend: Attend = given.get(PAGES) or self.attend
        # not get(): under another name, attention would miss the cache and be dense without a word
        if attend is self.attend and given[CACHE] is not None:
            cache = given[CACHE].layers[layer]
        if getattr(cache, "is_compileable", False):  # its keys would include free positions
            raise UserError(
                "past_key_values: a static cache cannot be read here; expected a growing one "
                "(DynamicCache)"
            )
        q_nope, k_nope, cos, sin = self._before_rope(q, k, given["position_embeddings"])
        angles = Angles(cos, sin, given.get("position_ids"))
        inputs = LayerInputs(layer, q, k, v, q_nope, k_nope, angles, scoring, kv_start, cache)
        self.current.clear()  # so that a layer's tensors are freed after its attention
        return attend(inputs)

    def _before_rope(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries and keys of the current tokens before RoPE, cos and sin."""
        current = self.current
        new = k[:, :, k.shape[2] - q.shape[2] :]
        if not self.rotates:
            angles = q.new_empty(1, q.shape[2], 0)
            return q, new, angles, angles
        cos, sin = self.family.cos_sin(position_embeddings)
        if self.family.changed_after_rope:
            return unrotate(q.detach(), cos, sin), unrotate(new.detach(), cos, sin), cos, sin
        assert current.q_nope is not None
        assert current.k_nope is not None
        return (
            *self.family.heads_before_rope(self.module, (current.q_nope, current.k_nope), q),
            cos,
            sin,
        )

    def remove(self) -> None:
        self.current.clear()
        self._context.close()


def is_tapped(config: "PreTrainedConfig") -> bool:
    """Returns True if the decoder with this configuration is tapped."""
    return config._attn_implementation in (IMPLEMENTATION, BATCHED_IMPLEMENTATION)


def _tapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    msattn_tap: LayerTap | None = None,
    **others: Any,  # transformers passes further arguments to every attention function
) -> tuple[Tensor, Tensor | None]:
    """Computes attention for transformers; ``attention_mask`` is what :func:`_mask_of_layers`
    returned.
    """
    if msattn_tap is None:
        return _own_attention(module)(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    if PAGES in others:
        attention_mask = None  # it only kept transformers from building one
    if attention_mask is not None and attention_mask.ndim != 1:
        raise UserError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: expected a 2D mask [batch, "
            f"tokens]"
        )
    scoring = Scoring(scaling, others.get("softcap"), others.get("s_aux"))
    out = msattn_tap(query, key, value, attention_mask, scoring)
    return out.transpose(1, 2), None


def _own_attention(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the attention function that a layer of a tapped model had before; UserError for a
    layer of another model.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kept = _kept[id(module.config)]
    if module.layer_idx not in kept.layers:
        raise UserError(
            "model: it shares its configuration with an attached model; give it its own copy"
        )
    if module.layer_idx in kept.full:
        return _dense_attention
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(kept.implementation, eager)


def _mask_of_layers(
    *,
    config: "PreTrainedConfig",
    mask_function: Callable,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **arguments: Any,  # transformers passes further arguments to every mask function
) -> Any:
    """Returns the mask of served layers, ``kv_start`` or None, or of layers with a window; a mask
    function for transformers.

    transformers allows a mask to be skipped unless something is combined with it: packed sequences,
    or images whose tokens attend to each other. A window as long as the model's positions hides
    nothing.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    whole = (
        family_of(config).one_window and local_size is not None and local_size >= max_length(config)
    )
    if local_size is None or whole:
        if mask_function is not causal_mask_function and not (whole and allow_is_causal_skip):
            raise UserError(
                "attention_mask: packed sequences, and images whose tokens see each other, are not "
                "supported; expected one left-padded sequence per row, without token_type_ids"
            )
        return _mask_to_kv_start(**arguments)
    before = _kept[id(config)].implementation
    # as transformers does for implementations that need no mask
    if before not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    of_window: dict[str, Any] = {
        "local_size": local_size,
        "allow_is_causal_skip": allow_is_causal_skip,
    }
    return ALL_MASK_ATTENTION_FUNCTIONS[before](
        config=config, mask_function=mask_function, **of_window, **arguments
    )


def _mask_to_kv_start(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None,
    q_offset: int | Tensor | None = None,
    kv_offset: int = 0,
    **unused: object,
) -> Tensor | None:
    """Converts a 2D padding mask to ``kv_start``, or None without padding."""
    if kv_offset != 0:
        raise UserError(
            "past_key_values: expected a cache that keeps the full context, not a sliding one"
        )
    # generate converts the mask before it calls the model
    if attention_mask is None or attention_mask.ndim == 1:
        return attention_mask
    # a static cache returns its capacity
    num_keys = kv_length if q_offset is None else int(q_offset) + q_length
    if attention_mask.ndim != 2 or attention_mask.shape[1] != num_keys:
        shape = tuple(attention_mask.shape)
        raise UserError(
            f"attention_mask of shape {shape}: expected [batch, {num_keys}], cached tokens included"
        )
    return padding_start(attention_mask)


def padding_start(attention_mask: Tensor) -> Tensor | None:
    """Returns ``kv_start`` (int32 [B]) of a padding mask ``[B, M]``, as :func:`left_padding`; None
    without padding.
    """
    padding = left_padding(attention_mask)
    return (
        torch.tensor(padding, dtype=torch.int32, device=attention_mask.device)
        if any(padding)
        else None
    )


def left_padding(attention_mask: Tensor) -> list[int]:
    """Returns the number of padded positions before each row of a mask ``[B, M]`` that is non-zero
    at tokens.
    """
    tokens = attention_mask.bool()
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    kv_start = tokens.shape[1] - tokens.sum(dim=1)
    is_left_padded = (tokens == (positions >= kv_start[:, None])).all()
    # one synchronization with the device
    *padding, accepted = torch.cat([kv_start, is_left_padded[None]]).tolist()
    if min(padding) == tokens.shape[1]:
        raise UserError("attention_mask: no row has a token; expected at least one")
    if not accepted:
        raise UserError(
            "attention_mask: expected left padding only (tokenizer.padding_side='left'), without "
            "holes"
        )
    return padding


def register_implementation(
    name: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> None:
    """Registers an attention implementation of transformers, with the function of its masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


@cache
def _register() -> None:
    for name in (IMPLEMENTATION, BATCHED_IMPLEMENTATION):
        register_implementation(name, _tapped_attention, _mask_of_layers)


@contextmanager
def tap(
    model: "PreTrainedModel", attend: Attend, forward: Forward = lambda tap: None
) -> Iterator[None]:
    """Replaces the attention of every served layer of ``model`` (also of a PEFT model) by
    ``attend`` inside the context; with ``forward``, also the passes of its attention modules.

    Supports ``generate`` with a growing cache, left padding, gradients, and passes of several
    threads at the same time. A layer's tensors are released after its attention.

    Raises UserError if the model is already tapped, or is copied or pickled inside the context, and
    in a forward pass for right padding, a 4D mask, packed sequences or a static cache.
    """
    _register()
    base = decoder(model)
    config, taps = base.config, list[LayerTap]()
    try:
        with _entering:
            before = config._attn_implementation
            if is_tapped(config):
                raise UserError(
                    "model: it is already attached; leave that context (or call disable) first"
                )
            layers = attention_layers(config)
            for layer in layers:
                if layer.kept is None:
                    module, family = base.layers[layer.layer].self_attn, family_of(config)
                    of_layer = {"rotates": layer.rotates, "forward": forward}
                    taps.append(LayerTap(module, attend, family, **of_layer))
            # SDPA would not cap
            capped = before == "sdpa" and getattr(config, "attn_logit_softcapping", None)
            kept = frozenset(layer.layer for layer in layers if layer.kept)
            full = frozenset(i for i, kind in enumerate(layer_kinds(config)) if kind == FULL) & kept
            _kept[id(config)] = _Kept(kept, full, "eager" if capped else before)
            config._attn_implementation = BATCHED_IMPLEMENTATION if full else IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = before
            del _kept[id(config)]
    finally:
        for item in taps:
            item.remove()


def use_dense_attention(model: "PreTrainedModel") -> None:
    """Sets the attention of ``model`` to :func:`causal_attention` without padding, for training
    with or without compilation.

    Under ``torch.compile`` transformers' "sdpa" materializes the causal mask, which excludes the
    fast SDPA backends. Models with layers that are not served, or that SDPA cannot compute, keep
    their own attention.
    """
    from transformers import AttentionInterface

    if not family_of(model.config).plain_scores or any(
        layer.kept for layer in attention_layers(model.config)
    ):
        return
    AttentionInterface.register(DENSE_IMPLEMENTATION, _dense_attention)
    model.set_attn_implementation(DENSE_IMPLEMENTATION)


def _dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **unused: object,  # transformers passes further arguments to every attention function
) -> tuple[Tensor, None]:
    """Computes dense attention for transformers; ``attention_mask`` is ``kv_start``.

    It casts its inputs, because under autocast queries and keys are fp32 after RoPE.
    """
    out = causal_attention(
        query.to(value.dtype), key.to(value.dtype), value, scale=scaling, kv_start=attention_mask
    )
    return out.transpose(1, 2).contiguous(), None


def run_backbone(
    model: "PreTrainedModel", input_ids: Tensor, cache: "Cache | None" = None, **inputs: Any
) -> Tensor:
    """Returns the last hidden states ``[B, N, hidden]``, without the language model head.

    Keys and values go to the ``cache``; without it, they are not kept. Further ``inputs`` of the
    model's forward pass, such as ``attention_mask``, may be given. Gradients are recorded.
    """
    own = {CACHE: cache, "use_cache": cache is not None}
    return decoder(model)(input_ids=input_ids, **own, **inputs).last_hidden_state


@torch.no_grad()
def run_tapped(
    model: "PreTrainedModel", attend: Attend, chunks: Iterable[Mapping[str, Tensor]]
) -> None:
    """Runs the decoder with ``attend`` over each of ``chunks``, items ``{"input_ids": int64 [N]}``,
    without gradients.
    """
    with tap(model, attend):
        for chunk in chunks:
            run_backbone(model, chunk["input_ids"][None].to(model.device))


def visit_layers(
    model: "PreTrainedModel",
    see: Callable[[LayerInputs], object],
    chunks: Iterable[Mapping[str, Tensor]],
    layers: Collection[int] | None = None,
) -> None:
    """Calls ``see`` with the inputs of each layer, or of each of ``layers``, in a dense pass over
    each of ``chunks``.
    """

    def seen_dense_attention(x: LayerInputs) -> Tensor:
        if layers is None or x.layer in layers:
            see(x)
        return dense_attention(x)

    run_tapped(model, seen_dense_attention, chunks)

"""Checks of the inputs of an attached model's forward pass, before the pass changes the cache.

Types and shapes are always checked. Ids are read from the device once for a prompt, but not for
single tokens after it, because these would have to wait for the GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.errors import UserError
from msattn.trainer.models.families import attention_layers, head_dim, num_kv_heads
from msattn.trainer.serving.contiguous.buffers import grown_capacity
from msattn.trainer.serving.contiguous.layers import GrowingCache

INTEGERS = (torch.int64, torch.int32)


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


def check_held(
    cache: GrowingCache,
    config: Any,
    num_layers: int,
    served: Sequence[int],
    batch: int,
    kv_heads: int,
    *,
    every_layer: bool,
) -> None:
    """Raises UserError unless a cache holds the keys and values of ``batch`` sequences of this
    model.

    The layers ``served`` are GrowingLayers with the ``kv_heads`` of this process. Every layer is
    checked once for each cache; the first and the last layer show whether a pass was interrupted.
    """
    layers = cache.layers
    length = layers[served[0]].get_seq_length()
    if len(layers) != num_layers:
        raise UserError(
            f"past_key_values: it has {len(layers)} layers; expected {num_layers}, as in the model"
        )
    accepted = [batch, kv_heads, length, head_dim(config)]
    for number in served if every_layer else (served[0], served[-1]):
        for buffer in (layers[number].key_buffer, layers[number].value_buffer):
            memory = buffer.memory if buffer.length else None
            shape = accepted.copy() if memory is None else list(memory.shape)
            shape[2] = min(buffer.length, shape[2])
            if shape != accepted:
                raise UserError(
                    f"past_key_values: it holds {shape} [sequences, heads, tokens, size]; expected "
                    f"{accepted}"
                )


def check_memory(
    cache: GrowingCache,
    config: Any,
    served: Sequence[int],
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises UserError if a static cache has no room for ``tokens`` more, or a GPU has too little
    free memory.
    """
    first, length = cache.layers[served[0]], cache.get_seq_length()
    capacity, limit = first.key_buffer.capacity, first.max_cache_len
    if limit is not None and length + tokens > limit:
        raise UserError(
            f"past_key_values: max_cache_len={limit}: {length + tokens} tokens need as many "
            f"positions"
        )
    if device.type != "cuda" or length + tokens <= capacity:
        return
    size_of_token = (
        2 * batch * num_kv_heads(config) * head_dim(config) * dtype.itemsize * len(served)
    )
    wanted, allocated = grown_capacity(length + tokens), size_of_token * capacity
    # layers grow in turn
    needed = (
        size_of_token * wanted - allocated + max(allocated, size_of_token * wanted) // len(served)
    )
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reusable
    if needed > free:
        raise UserError(
            f"past_key_values: a cache of {wanted:,} positions for {batch} sequences needs "
            f"{needed:,} bytes more, and {free:,} "
            "bytes are free; shorten the prompt or make the batch smaller"
        )


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

"""Decoding steps: passes over one new token of each sequence that replace the decoder's ordinary
passes.

A step reads lengths from the device and writes new keys at a position stored on the device. It
never synchronizes, and its tensors keep their addresses, so it can be captured
(:mod:`msattn.trainer.serving.graphs.capture`). Ordinary passes between steps enlarge buffers and
rebuild the bucket index.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from msattn.trainer.errors import ModelWarning
from msattn.trainer.models.families import attention_layers, family_of
from msattn.trainer.models.replacement import NotCopied, replaced
from msattn.trainer.models.tap import CACHE, LayerTap, left_padding
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.layers import GrowingCache
from msattn.trainer.serving.dispatch import BY_CHOICE
from msattn.trainer.serving.graphs.capture import (
    CurrentStep,
    NoGraph,
    Step,
    buffers_of,
    captured,
    inputs_of,
    model_state,
    on_capture_stream,
    side_stream,
    tokens_of,
    uncapturable,
    uncapturable_pass,
)
from msattn.trainer.serving.graphs.fused import FusedAttention, fused
from msattn.trainer.serving.graphs.prompt_graphs import PromptGraphs

logger = logging.getLogger(__name__)


class DecodingSteps(NotCopied):
    """Forward pass of an attached decoder: a step over single tokens or the graph of a prompt where
    possible, otherwise the original pass.

    With ``cuda_graphs`` steps are captured; otherwise they are launched kernel by kernel.
    """

    def __init__(self, decoder: nn.Module, sparse: Sparse, *, cuda_graphs: bool) -> None:
        self.decoder, self.sparse = decoder, sparse
        self.cuda_graphs = cuda_graphs and next(decoder.parameters()).is_cuda
        self.original = decoder.forward
        self.on_gpu = any(
            parameter.device.type in (Step.device_type, "meta")
            for parameter in decoder.parameters()
        )
        self.never = _never_steps(decoder)
        self.current = CurrentStep()
        self.measured = sparse.measure_recall or sparse.statistics.timer is not None
        captures_prompts = self.cuda_graphs and self.never is None and not self.measured
        self.prompts = PromptGraphs(decoder, sparse) if captures_prompts else None
        self._steps: WeakKeyDictionary[GrowingCache, Step] = WeakKeyDictionary()
        self._warned: set[str] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the forward passes of a decoder on a GPU and of its modules inside the
        context.
        """
        if not self.on_gpu:
            yield
            return
        with fused(self.decoder), replaced(self.decoder, self):
            yield

    def attention(self, tap: LayerTap) -> FusedAttention | None:
        """Returns the forward pass of an attention module; None: it keeps its own."""
        if not self.on_gpu or self.never is not None:
            return None
        return FusedAttention(tap, self.sparse, self.current)

    @torch.compiler.disable
    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Runs the decoder; its hooks turn all inputs into keyword ``arguments``."""
        if args:
            return self.original(*args, **arguments)
        cache: GrowingCache | None = arguments.get(CACHE)
        inputs = _step_inputs(arguments)
        if (
            inputs is None
            and self.prompts is not None
            and (output := self.prompts.run(arguments, self.original)) is not None
        ):
            return output
        if (
            inputs is None
            or cache is None
            or self.measured
            or cache.get_seq_length() == 0
            or tokens_of(inputs).device.type != Step.device_type
        ):
            return self._ordinary_pass(arguments)
        try:
            if reason := self.never or uncapturable_pass(self.decoder, self.sparse, arguments):
                raise NoGraph(reason)
            output = self._next_token(cache, inputs, arguments)
        except NoGraph as error:
            self._warn(str(error))
            self.sparse.statistics.count("eager_steps")
            output = None
        return self._ordinary_pass(arguments) if output is None else output

    def _ordinary_pass(self, arguments: dict[str, Any]) -> Any:
        cache: GrowingCache | None = arguments.get(CACHE)
        step = None if cache is None else self._steps.get(cache)
        if step is not None:
            step.set_valid_for(0, [])  # the next step checks buffers and hooks again
        return self.original(**arguments)

    def _next_token(
        self, cache: GrowingCache, inputs: dict[str, Tensor], arguments: dict[str, Any]
    ) -> Any:
        """Returns the output of a step; None if the bucket index must be rebuilt first.

        The mask, which has the padding, is on the device. In order not to wait for it, the step is
        launched with the padding of the step before, and run again if the mask has another one.
        """
        length = cache.get_seq_length()
        mask = arguments.get("attention_mask")
        step = self._steps.get(cache)
        if mask is not None and not (
            isinstance(mask, Tensor) and mask.shape == (len(tokens_of(inputs)), length + 1)
        ):
            return None  # the ordinary pass converts or refuses it
        computed, hidden = _computed(mask), None
        if step is not None and step.serves(cache, inputs):
            hidden = self._run(step, cache, inputs, arguments, step.padding)
        padding = _padding(mask, computed)
        if hidden is None or step is None or padding != step.padding:
            # a step that runs again is counted as it was first
            counted = nullcontext() if hidden is None else self.sparse.statistics.unchanged()
            step = self._step(cache, inputs, padding)
            if step is None:
                return None
            with counted:
                hidden = self._run(step, cache, inputs, arguments, padding)
        for layer in cache.layers:
            layer.add_tokens()
        self.sparse.statistics.count("eager_steps" if step.graph is None else "graph_steps")
        if step.dense:
            self.sparse.statistics.count(BY_CHOICE, len(self.sparse.dispatch.routed_layers))
        held = arguments[CACHE]
        return BaseModelOutputWithPast(last_hidden_state=hidden.clone(), **{CACHE: held})

    def _step(
        self, cache: GrowingCache, inputs: dict[str, Tensor], padding: list[int]
    ) -> Step | None:
        """Returns the step for the next token of ``cache``; None if its bucket index must be
        rebuilt first.
        """
        length, step = cache.get_seq_length(), self._steps.get(cache)
        layers = cache.layers
        until_routed = self.sparse.dispatch.tokens_until_routed(length + 1, len(tokens_of(inputs)))
        indexed = [] if until_routed else self.sparse.bucket_layers(cache)
        if any(layer.rebuild_due(1) for layer in indexed):
            return None
        for layer in layers:
            layer.reserve_token()
        shapes = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        addresses = tuple(layer.addresses() for layer in layers)
        signature = (
            shapes,
            until_routed > 0,
            bool(padding),
            model_state(self.decoder, self.sparse),
            addresses,
        )
        if step is None or step.signature != signature:
            step = self._steps[cache] = Step(
                signature, inputs, dense=until_routed > 0, padded=bool(padding)
            )
        room = min(layer.key_buffer.capacity for layer in layers) - length
        until_rebuild = [layer.rebuild_every - length + layer.indexed - 1 for layer in indexed]
        step.set_valid_for(min(room, until_routed or room, *until_rebuild), buffers_of(cache))
        return step

    def _run(
        self,
        step: Step,
        cache: GrowingCache,
        inputs: dict[str, Tensor],
        arguments: dict[str, Any],
        padding: list[int],
    ) -> Tensor:
        """Runs a step: as a graph if it was captured, and captures it if it has run before. Returns
        the last hidden states.
        """
        length = cache.get_seq_length()
        step.write(inputs, length, self.sparse.window(cache, length + 1), padding)
        if step.has_run and step.graph is None and self.cuda_graphs and not step.refused:
            self._capture(step, arguments)
        # the first run is on the stream of the capture, where libraries allocate their workspaces
        first = not step.has_run and self.cuda_graphs
        with on_capture_stream(step.position.device) if first else nullcontext():
            hidden = step.run(partial(self._launch, step, arguments))
        visible = (step.batch * (length + 1) - sum(padding)) * self.sparse.kv_heads
        self.sparse.statistics.add_visible(
            visible * len(self.sparse.dispatch.routed_layers), all_read=step.dense
        )
        return hidden

    def _launch(self, step: Step, arguments: dict[str, Any]) -> Tensor:
        """Launches the kernels of a step; returns the last hidden states."""
        self.current.step = step
        try:
            output = self.original(**{**arguments, **step.inputs, "attention_mask": None})
            step.advance()
            return output.last_hidden_state
        finally:
            self.current.step = None

    def _capture(self, step: Step, arguments: dict[str, Any]) -> None:
        """Captures the graph of a step; if that fails, the step continues to be launched, with a
        warning.
        """
        reason, began = uncapturable(self.decoder), time.monotonic()
        if reason is None:
            try:
                with on_capture_stream(step.position.device):
                    step.graph, step.hidden = captured(partial(self._launch, step, arguments))
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
        if reason is not None:
            step.refused = True
            self._warn(reason)
            return
        capacity = arguments[CACHE].layers[0].key_buffer.capacity
        took = time.monotonic() - began
        logger.info(
            f"decoding: captured a CUDA graph in {took:.2f} s (batch {step.batch}, {capacity:,} "
            f"positions)"
        )

    def _warn(self, reason: str) -> None:
        if reason not in self._warned and self.cuda_graphs:
            self._warned.add(reason)
            warnings.warn(
                f"decoding runs without CUDA graphs, more slowly: {reason}",
                ModelWarning,
                stacklevel=2,
            )


def _step_inputs(arguments: dict[str, Any]) -> dict[str, Tensor] | None:
    """Returns the tensors of one new token per sequence; None if the pass is over several
    tokens.
    """
    inputs = inputs_of(arguments)
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None or tokens.shape[1] != 1 or arguments.get(CACHE) is None:
        return None
    if "position_ids" not in inputs:
        length = arguments[CACHE].get_seq_length()
        inputs["position_ids"] = torch.full((len(tokens), 1), length, device=tokens.device)
    return inputs


def _computed(mask: Tensor | None) -> torch.cuda.Event | None:
    """Returns an event at the present end of the stream on which ``mask`` was computed; None on a
    CPU.
    """
    if mask is None or not mask.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(mask.device))
    return event


def _padding(mask: Tensor | None, computed: torch.cuda.Event | None) -> list[int]:
    """Returns the left padding of each row, [] if there is none; waits only for the event
    ``computed``.
    """
    if mask is None:
        return []
    if computed is None:
        padding = left_padding(mask)
    else:
        stream = side_stream(mask.device, "masks")
        stream.wait_event(computed)
        with torch.cuda.stream(stream):
            padding = left_padding(mask)
    return padding if any(padding) else []


def _never_steps(decoder: Any) -> str | None:
    """Returns the reason why no token of a decoder can be decoded in a step, or None."""
    devices = sorted({str(parameter.device) for parameter in decoder.parameters()})
    if len(devices) > 1:
        return f"the model is split over {', '.join(devices)}"
    if any(isinstance(parameter, DTensor) for parameter in decoder.parameters()):
        return "the model is divided among ranks (tensor parallelism)"
    if not family_of(decoder.config).llama_layers:
        return f"the layers of model_type={decoder.config.model_type} are not captured"
    if kept := next((layer for layer in attention_layers(decoder.config) if layer.kept), None):
        return f"layer {kept.layer} keeps the model's own attention ({kept.kept})"
    return None

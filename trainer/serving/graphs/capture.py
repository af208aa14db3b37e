"""The tensors of a decoding step, at fixed addresses, its capture as a CUDA graph, and the passes
that cannot be captured.

The host launches a step once, into a graph, and then replays this graph for each token: one launch
instead of about 600. Values that change from token to token are written to the tensors of the step
before each replay.

The first step of a graph runs without capture, to compile kernels and allocate workspaces. The
second one is captured.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from msattn.trainer.models.replacement import NotCopied
from msattn.trainer.models.tap import CACHE
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.buffers import Buffer
from msattn.trainer.serving.contiguous.layers import GrowingCache

# tensors of a pass at fixed addresses
INPUTS = ("input_ids", "inputs_embeds", "position_ids")
OTHER_ARGUMENTS = ("attention_mask", CACHE, "use_cache", "cache_position", "return_dict")
UNKNOWN = -1
_capturing = threading.Lock()
logger = logging.getLogger(__name__)


class NoGraph(Exception):
    """Raised if a token cannot be decoded with lengths on the device; the message gives the
    reason.
    """


class Step:
    """The tensors of a step, at fixed addresses, and its graph once it is captured."""

    device_type = "cuda"  # of the devices on which tokens are decoded in steps

    def __init__(
        self, signature: tuple, inputs: dict[str, Tensor], *, dense: bool, padded: bool
    ) -> None:
        first = next(iter(inputs.values()))
        batch, device = len(first), first.device
        # another signature needs another step
        self.signature, self.dense, self.batch = signature, dense, batch
        with torch.inference_mode(False):
            self.inputs = {name: torch.empty_like(x) for name, x in inputs.items()}
            # cache index of the new token
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            # Number of keys with the new one, and length of the dense window; left padding.
            self.kv_len, self.window = (
                torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2)
            )
            self.kv_start = torch.zeros(batch, dtype=torch.int32, device=device) if padded else None
        self.padding: list[int] = []
        self.has_run = self.refused = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hidden: Tensor | None = None  # what the graph writes
        self._length, self._window = UNKNOWN, UNKNOWN  # as on the device
        self.set_valid_for(0, [])

    def set_valid_for(self, tokens: int, buffers: list[Buffer]) -> None:
        """Records the number of tokens for which the step stays valid: no buffer grows and no index
        is rebuilt. Other ``buffers`` of the cache end it.
        """
        self._tokens_left, self._buffers = tokens, buffers

    def serves(self, cache: GrowingCache, inputs: dict[str, Tensor]) -> bool:
        """Returns True if the next token follows the last one, so that nothing else needs to be
        checked.
        """
        same = all(
            name in self.inputs and x.shape == self.inputs[name].shape for name, x in inputs.items()
        )
        if not same or self._tokens_left < 1 or self._length != cache.get_seq_length():
            return False
        return all(map(is_, self._buffers, buffers_of(cache)))  # runs for each token

    def write(
        self, inputs: dict[str, Tensor], length: int, window: int, padding: list[int]
    ) -> None:
        """Writes the tensors of the next token, after ``length`` cached ones; most values are
        already on the device.
        """
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        if self._length != length:
            self._length = length
            self.position.fill_(length)
            self.kv_len.fill_(length + 1)
        if self._window != window:
            self._window = window
            self.window.fill_(window)
        if self.kv_start is not None and self.padding != padding:
            self.kv_start.copy_(torch.tensor(padding, dtype=torch.int32))
        self.padding = padding

    def advance(self) -> None:
        """Sets the lengths of the following token, on the device."""
        self.position += 1
        self.kv_len += 1

    def run(self, launch: Callable[[], Tensor]) -> Tensor:
        """Replays the graph, or launches the step; returns the last hidden states."""
        # an exception may come before or after the device has advanced
        length, self._length = self._length, UNKNOWN
        if self.graph is None:
            hidden = launch()
        else:
            self.graph.replay()
            hidden = self.hidden
        assert hidden is not None
        self._length, self._tokens_left, self.has_run = length + 1, self._tokens_left - 1, True
        return hidden


class CurrentStep(threading.local):
    """The step that the current thread runs, if any."""

    step: Step | None = None


def buffers_of(cache: GrowingCache) -> list[Buffer]:
    """Returns the buffers of keys and values of all layers."""
    return [each for layer in cache.layers for each in (layer.key_buffer, layer.value_buffer)]


@contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Runs the block on the stream of captures, between the work before and after it on the current
    one.

    Only one thread at a time, since kernels that another thread launches there would become part of
    a capture.
    """
    stream, current = side_stream(device, "captures"), torch.cuda.current_stream(device)
    with _capturing:
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


def concurrently(x: Tensor, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the results of two functions of ``x``, whose kernels run concurrently in a graph.

    A single matrix-vector product does not use the full memory bandwidth.
    """
    captures = side_stream(x.device, "captures") if x.is_cuda else None
    if captures is None or torch.cuda.current_stream(x.device) != captures:
        return first(), second()
    side = side_stream(x.device, "products")
    side.wait_stream(captures)
    with torch.cuda.stream(side):
        after = second()
    before = first()
    captures.wait_stream(side)
    return before, after


def captured(launch: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Captures ``launch`` on the current stream, without running it; returns the graph and the
    tensor that it writes.

    Garbage is not collected meanwhile, since freeing older graphs would break the capture.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = launch()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                logger.debug("the capture was already broken")
            raise
        graph.capture_end()
        return graph, result
    finally:
        if collects:
            gc.enable()


@cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Returns the stream for ``purpose``. All models share it, because each further stream needs
    its own workspaces.
    """
    return torch.cuda.Stream(device)


def uncapturable(decoder: nn.Module) -> str | None:
    """Returns the reason why a decoder's forward pass cannot be captured, or None."""
    for name, module in decoder.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            return f"the module {name} is offloaded"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", hook)
            if not isinstance(owner, NotCopied) and not getattr(hook, "__module__", "").startswith(
                "transformers."
            ):
                return f"the module {name} has a forward hook, which a graph would not call"
    return None


def uncapturable_pass(decoder: Any, sparse: Sparse, arguments: dict[str, Any]) -> str | None:
    """Returns the reason why a pass with these arguments can neither be a step nor the graph of a
    prompt, or None.
    """
    others = {name: arguments[name] for name in arguments.keys() - {*INPUTS, *OTHER_ARGUMENTS}}
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        return f"the argument {given[0]} is given"
    if arguments.get("return_dict") is False or getattr(
        decoder.config, "output_hidden_states", False
    ):
        return "other outputs than the last hidden states are asked for"
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.is_autocast_enabled(Step.device_type):
        return "autocast is on"
    dynamic = sparse.rotation is None
    return "the angles of dynamic RoPE depend on the length" if dynamic else None


def model_state(decoder: nn.Module, sparse: Sparse) -> tuple:
    """Returns what a captured graph depends on: addresses of the weights of model, gate and router,
    the model's mode, adapters and hooks.
    """
    routed, gate = sparse.dispatch.routed, sparse.dispatch.gate
    modules = filter(None, (decoder, gate, None if routed is None else routed.router))
    addresses = tuple(
        _address(x) for module in modules for x in (*module.parameters(), *module.buffers())
    )
    tuners: list[Any] = [each for each in decoder.modules() if hasattr(each, "merged_adapters")]
    adapters = [
        f"{each.disable_adapters} {each.active_adapters} {each.merged_adapters} "
        f"{getattr(each, 'scaling', None)}"
        for each in tuners
    ]
    return addresses, decoder.training, tuple(adapters), uncapturable(decoder)


def inputs_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors among the arguments of a pass that a graph reads at fixed addresses."""
    return {name: arguments[name] for name in INPUTS if arguments.get(name) is not None}


def tokens_of(inputs: dict[str, Tensor]) -> Tensor:
    """Returns the ids or embeddings among these tensors."""
    return next(iter(inputs.values()))


def _address(x: Tensor) -> int:
    """Returns a number that changes when a weight is replaced; some quantized ones have no address
    of their own.
    """
    try:
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(x)

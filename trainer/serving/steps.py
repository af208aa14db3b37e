"""Decoding steps, passes over one new token of each sequence, as CUDA graphs.

A step reads lengths from the device and writes the new keys at a position that the device holds. It waits for nothing, and its
tensors keep their addresses. So the host launches it once, into a CUDA graph, and then replays this graph for each token: 1
launch for some 600. What changes from token to token is written to the step's tensors before the replay. Buffers that grow, and
the bucket index that is rebuilt now and then, are the business of ordinary passes between the replays.

The first step of a graph runs without capture: kernels are compiled and workspaces allocated. The second is captured.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from msattn.kernels.decoder_layer import rotate_and_append
from msattn.trainer.errors import ModelWarning
from msattn.trainer.models.families import project_heads
from msattn.trainer.models.tap import LayerInputs, NotCopied, left_padding
from msattn.trainer.serving.cache import BucketLayer, GrowingLayer
from msattn.trainer.serving.fused import fused_modules, replaced

if TYPE_CHECKING:
    from transformers import Cache

    from msattn.trainer.serving.sparse import Sparse

INPUTS = ("input_ids", "inputs_embeds", "position_ids")  # tensors of a step that change from token to token
OTHER_ARGUMENTS = ("attention_mask", "past_key_values", "use_cache", "cache_position", "return_dict")
_capturing = threading.Lock()  # streams and memory pools of a capture are shared by all threads
logger = logging.getLogger(__name__)


class NoGraph(Exception):
    """A step that cannot be a step with lengths on the device; the message says why."""


class Step:
    """The tensors of a step, at fixed addresses, and its graph once it is captured.

    Attributes
    ----------
    key : what the graph depends on; another key needs another step.
    routed : whether routed layers read buckets, else every key.
    position : int64 ``[1]``, cache index of the new token.
    kv_len, recent : int32 ``[B]``, number of keys with the new one, and length of the dense window.
    kv_start : int32 ``[B]`` or None, left padding.
    tokens_left : number of tokens for which no buffer grows and no index is rebuilt.
    expected_length : length of the cache before the next token, if nothing else changes it.
    """

    def __init__(self, key: tuple, inputs: dict[str, Tensor], *, routed: bool, padded: bool) -> None:
        first = next(iter(inputs.values()))
        batch, device = len(first), first.device
        self.key, self.routed, self.batch = key, routed, batch
        with torch.inference_mode(False):
            self.inputs = {name: torch.empty_like(x) for name, x in inputs.items()}
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            self.kv_len, self.recent = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
            self.kv_start = torch.zeros(batch, dtype=torch.int32, device=device) if padded else None
        self.tokens_left, self.expected_length = 0, -1
        self.has_run = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None

    def serves(self, length: int, inputs: dict[str, Tensor], padding: Sequence[int]) -> bool:
        """Returns whether the next token is as the last one: then nothing else has to be looked at."""
        same = {name: x.shape for name, x in inputs.items()} == {name: x.shape for name, x in self.inputs.items()}
        return same and self.tokens_left > 0 and self.expected_length == length and bool(padding) == (self.kv_start is not None)

    def write(self, inputs: dict[str, Tensor], length: int, window: int, padding: Sequence[int]) -> None:
        """Writes the tensors of the next token, which follows ``length`` cached ones."""
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.position.fill_(length)
        self.kv_len.fill_(length + 1)
        self.recent.fill_(window)
        if self.kv_start is not None:
            self.kv_start.copy_(torch.tensor(padding, dtype=torch.int32))

    def capture(self, run: Callable[[], Any]) -> None:
        """Captures ``run`` as the step's graph, without running it."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.output = run()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                logger.debug("the capture was already broken")
            raise
        graph.capture_end()
        self.graph = graph


class _Current(threading.local):
    """The step that the current thread runs."""

    step: Step | None = None


class DecodingSteps(NotCopied):
    """The forward pass of an attached decoder: steps over single tokens where possible, else the original one.

    Parameters
    ----------
    decoder : module with ``layers``; :func:`msattn.trainer.models.families.decoder` of the model.
    sparse : reads the attention of a step and counts what was read.
    cuda_graphs : whether steps are captured; without, they are launched kernel by kernel.
    """

    device_type = "cuda"

    def __init__(self, decoder: nn.Module, sparse: "Sparse", *, cuda_graphs: bool) -> None:
        self.decoder, self.sparse = decoder, sparse
        self.cuda_graphs = cuda_graphs and next(decoder.parameters()).is_cuda
        self.original = decoder.forward
        self.current = _Current()
        self._steps: WeakKeyDictionary[Cache, Step] = WeakKeyDictionary()
        self._warned: set[str] = set()

    @torch.compiler.disable
    def __call__(self, **arguments: Any) -> Any:
        """Runs the decoder; ``arguments`` are those of its forward pass, by name."""
        cache, inputs = arguments.get("past_key_values"), _step_inputs(arguments)
        if inputs is None or not self.sparse.takes_steps(cache) or next(iter(inputs.values())).device.type != self.device_type:
            return self._ordinary_pass(arguments)
        try:
            self._check(arguments)
            padding = self._padding(arguments.get("attention_mask"), cache)
            step = self._step(cache, inputs, padding)
        except NoGraph as reason:
            self._warn(str(reason))
            return self._ordinary_pass(arguments)
        if step is None:  # the bucket index is due
            return self._ordinary_pass(arguments)
        length = cache.get_seq_length()
        step.write(inputs, length, self.sparse.window(cache, length + 1), padding)
        output = self._run(step, arguments)
        for layer in cache.layers:
            layer.add_token()
        step.tokens_left, step.expected_length = step.tokens_left - 1, length + 1
        visible = (step.batch * (length + 1) - sum(padding)) * cache.layers[0].key_buffer.memory.shape[1]
        self.sparse.count_step(visible, routed=step.routed, graph=step.graph is not None)
        return type(output)(last_hidden_state=output.last_hidden_state.clone(), past_key_values=cache)

    def _ordinary_pass(self, arguments: dict[str, Any]) -> Any:
        cache: Any = arguments.get("past_key_values")
        step = None if cache is None else self._steps.get(cache)
        if step is not None:
            step.tokens_left = 0  # buffers and hooks are looked at again before the next step
        return self.original(**arguments)

    def _padding(self, attention_mask: Tensor | None, cache: "Cache") -> list[int]:
        num_keys = cache.get_seq_length() + 1
        if attention_mask is None:
            return []
        if attention_mask.ndim != 2 or attention_mask.shape[1] != num_keys:
            raise NoGraph("")  # the ordinary pass refuses it
        padding = left_padding(attention_mask)
        return padding if any(padding) else []

    def _check(self, arguments: dict[str, Any]) -> None:
        """Raises NoGraph if the pass cannot be a step."""
        given = [name for name in arguments.keys() - {*INPUTS, *OTHER_ARGUMENTS} if arguments[name] is not None]
        if given:
            raise NoGraph(f"the argument {given[0]} is given")
        if torch.is_grad_enabled():
            raise NoGraph("gradients are recorded")

    def _step(self, cache: Any, inputs: dict[str, Tensor], padding: list[int]) -> Step | None:
        """Returns the step for the next token of ``cache``; None if its bucket index is to be rebuilt first."""
        length, step = cache.get_seq_length(), self._steps.get(cache)
        if step is not None and step.serves(length, inputs, padding):
            return step
        layers = cache.layers
        if any(isinstance(layer, BucketLayer) and layer.rebuild_due(1) for layer in layers):
            return None
        for layer in layers:
            layer.reserve_token()
        batch = len(next(iter(inputs.values())))
        routed_from = self.sparse.routed_from(batch)
        routed = length + 1 >= routed_from
        shapes = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        key = (shapes, routed, bool(padding), self._model_state(), tuple(layer.addresses() for layer in layers))
        if step is None or step.key != key:
            step = self._steps[cache] = Step(key, inputs, routed=routed, padded=bool(padding))
        until_rebuild = [each.rebuild_every - length + each.indexed for each in layers if isinstance(each, BucketLayer)]
        room = min(layer.key_buffer.capacity for layer in layers) - length
        until_routed = room if routed else routed_from - 1 - length
        step.tokens_left = min(room, until_routed, *(each - 1 for each in until_rebuild))
        return step

    def _model_state(self) -> tuple:
        """Returns what a captured graph has fixed of the model: where its weights lie, and its active adapters."""
        adapters = [
            (each.disable_adapters, tuple(each.active_adapters), tuple(each.merged_adapters))
            for each in self.decoder.modules()
            if hasattr(each, "merged_adapters")
        ]
        return next(self.decoder.parameters()).data_ptr(), tuple(adapters)

    def _run(self, step: Step, arguments: dict[str, Any]) -> Any:
        """Runs a step: as a graph if it was captured, and captures it if it has run before."""
        if step.graph is None and step.has_run and self.cuda_graphs and not self._captured(step, arguments):
            self.cuda_graphs = False
        if step.graph is not None:
            step.graph.replay()
            return step.output
        if not self.cuda_graphs:
            return self._launch(step, arguments)
        stream = self._enter_side_stream()
        with torch.cuda.stream(stream):
            output = self._launch(step, arguments)
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        step.has_run = True
        return output

    def _launch(self, step: Step, arguments: dict[str, Any]) -> Any:
        """Launches the kernels of a step."""
        self.current.step = step
        try:
            return self.original(**{**arguments, **step.inputs, "attention_mask": None})
        finally:
            self.current.step = None

    def _enter_side_stream(self) -> torch.cuda.Stream:
        """Returns the stream of captures, after it waits for the current one."""
        device = next(self.decoder.parameters()).device
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def _captured(self, step: Step, arguments: dict[str, Any]) -> bool:
        """Captures the graph of a step and returns True; False, with a warning, if that is not possible."""
        reason = uncapturable(self.decoder)
        if reason is None:
            began = time.monotonic()
            try:
                with _capturing, torch.cuda.stream(self._enter_side_stream()):
                    step.capture(lambda: self._launch(step, arguments))
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
            else:
                torch.cuda.current_stream(step.position.device).wait_stream(_side_stream(step.position.device))
                capacity = arguments["past_key_values"].layers[0].key_buffer.capacity
                took = time.monotonic() - began
                logger.info(f"decoding: captured a CUDA graph in {took:.2f} s (batch {step.batch}, {capacity:,} positions)")
                return True
        self._warn(reason)
        return False

    def _warn(self, reason: str) -> None:
        """Warns once for each reason."""
        if not reason or not self.cuda_graphs:
            return
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"decoding runs without CUDA graphs, more slowly: {reason}", ModelWarning, stacklevel=2)


def _step_inputs(arguments: dict[str, Any]) -> dict[str, Tensor] | None:
    """Returns the tensors of one new token per sequence; None if the pass is over several tokens."""
    inputs = {name: arguments[name] for name in INPUTS if arguments.get(name) is not None}
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None or tokens.shape[1] != 1 or arguments.get("past_key_values") is None:
        return None
    if "position_ids" not in inputs:
        length = arguments["past_key_values"].get_seq_length()
        inputs["position_ids"] = torch.full((len(tokens), 1), length, device=tokens.device)
    return inputs


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures of a device; each further stream would get workspaces of its own."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def uncapturable(decoder: nn.Module) -> str | None:
    """Returns the reason for which a decoder's forward pass cannot be captured, or None."""
    for name, module in decoder.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            return f"the module {name} is offloaded"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", hook)
            if not isinstance(owner, NotCopied) and not getattr(hook, "__module__", "").startswith("transformers."):
                return f"the module {name} has a forward hook, which a graph would not call"
    return None


class StepAttention(NotCopied):
    """The forward pass of an attention module: fused in a step, else the original one."""

    def __init__(self, module: Any, layer: int, steps: DecodingSteps) -> None:
        self.module, self.layer, self.steps = module, layer, steps
        self.original = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.steps.current.step
        if step is None:
            return self.original(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        cache_layer: GrowingLayer = kwargs["past_key_values"].layers[self.layer]
        keys, values = cache_layer.key_buffer.memory, cache_layer.value_buffer.memory
        assert keys is not None
        assert values is not None
        cos, sin = kwargs["position_embeddings"]
        q_nope, k_nope, v = project_heads(self.module, hidden)
        q = rotate_and_append(q_nope, k_nope, v, cos, sin, keys, values, step.position)
        x = LayerInputs(
            self.layer, q, keys, values, q_nope, k_nope, cos, sin, self.module.scaling, step.kv_start, cache_layer,
            kv_len=step.kv_len,
        )  # fmt: skip
        out = self.steps.sparse.attend_step(x, step.recent, routed=step.routed)
        return self.module.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:2], -1)), None


@contextmanager
def decoding_steps(decoder: nn.Module, sparse: "Sparse", *, cuda_graphs: bool) -> Iterator[DecodingSteps]:
    """Replaces the forward passes of a decoder and of its modules inside the context; see :class:`DecodingSteps`."""
    layers: Any = decoder.layers
    with ExitStack() as replacements:
        for module, forward in fused_modules(decoder):
            replacements.enter_context(replaced(module, forward))
        steps = DecodingSteps(decoder, sparse, cuda_graphs=cuda_graphs)
        for number, layer in enumerate(layers):
            replacements.enter_context(replaced(layer.self_attn, StepAttention(layer.self_attn, number, steps)))
        replacements.enter_context(replaced(decoder, steps))
        yield steps

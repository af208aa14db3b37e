"""Prompts of small models as CUDA graphs, since the host launches their kernels more slowly than
they run.

The first prompt of a shape runs without a graph. The second prompt runs on the capture stream, so
that workspaces exist, and then its graph is captured; later prompts replay it. A graph is replaced
only if the latest prompts have not used it, since a capture costs more than a replay saves. A
graph fills its own cache at fixed addresses, whose layers are copied for each prompt while the
graph still runs.
"""

import copy
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from msattn.trainer.methods.blocks import shared_by_layers
from msattn.trainer.models.replacement import NotCopied
from msattn.trainer.models.tap import CACHE, left_padding
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.layers import GrowingCache, GrowingLayer
from msattn.trainer.serving.graphs.capture import (
    captured,
    inputs_of,
    model_state,
    on_capture_stream,
    tokens_of,
    uncapturable,
    uncapturable_pass,
)
from msattn.trainer.serving.statistics import Statistics

# matrix products of a layer, 0.5 ms on an H100: larger ones take longer than their launches
MAX_LAYER_FLOP = 2.5e11
MAX_TOKENS = 16384  # attention is not among these products
MAX_GRAPHS = 2  # each holds the activations of its prompt, and a cache
MAX_RECENT = 8  # prompts
logger = logging.getLogger(__name__)
# launches the kernels of a prompt with these inputs and this cache
Launch = Callable[[dict[str, Tensor], GrowingCache], Tensor]


class PromptGraphs(NotCopied):
    """CUDA graphs of one decoder's prompts, by shape; those that recent prompts used are
    kept.
    """

    def __init__(self, decoder: Any, sparse: Sparse) -> None:
        self.decoder, self.sparse = decoder, sparse
        weights = sum(parameter.numel() for parameter in decoder.layers.parameters()) / len(
            decoder.layers
        )
        self._most_tokens = min(MAX_TOKENS, MAX_LAYER_FLOP / (2 * max(weights, 1)))
        self._graphs: dict[tuple, PromptGraph] = {}
        self._recent = deque[tuple](maxlen=MAX_RECENT)  # signatures of prompts
        self._lock = Lock()

    def serves(self, inputs: dict[str, Tensor], cache: GrowingCache) -> bool:
        """Returns True if a prompt with an empty cache may become a graph."""
        tokens = next(iter(inputs.values()), None)
        if (
            tokens is None
            or tokens.ndim < 2
            or not 1 < tokens.shape[0] * tokens.shape[1] <= self._most_tokens
        ):
            return False
        return all(
            isinstance(layer, GrowingLayer) and layer.key_buffer.memory is None
            for layer in cache.layers
        )

    def run(
        self, arguments: dict[str, Any], forward: Callable[..., Any]
    ) -> BaseModelOutputWithPast | None:
        """Returns the output of a prompt without padding that runs as a graph, in place of the
        decoder's ``forward`` pass; None for other passes, for the first prompt of a shape, and if
        there is no graph.
        """
        inputs, cache = inputs_of(arguments), arguments.get(CACHE)
        mask = arguments.get("attention_mask")
        if (
            cache is None
            or not self.serves(inputs, cache)
            or uncapturable_pass(self.decoder, self.sparse, arguments)
            or not _is_whole(mask, tokens_of(inputs))
        ):
            return None

        def launch(inputs: dict[str, Tensor], cache: GrowingCache) -> Tensor:
            own = {CACHE: cache, "attention_mask": None, "cache_position": None}
            return forward(**{**arguments, **inputs, **own}).last_hidden_state

        hidden = self._hidden(inputs, cache, launch)
        if hidden is None:
            return None
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: cache})

    def _hidden(
        self, inputs: dict[str, Tensor], cache: GrowingCache, launch: Launch
    ) -> Tensor | None:
        """Fills the cache and returns the last hidden states, or None."""
        kinds = tuple((type(layer), layer.max_cache_len) for layer in cache.layers)
        shapes = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        signature = shapes, kinds, model_state(self.decoder, self.sparse)
        with self._lock:
            seen = signature in self._recent
            self._recent.append(signature)
            if signature in self._graphs:
                return self._graphs[signature].replay(inputs, cache)
            if not seen:
                return None
            if len(self._graphs) == MAX_GRAPHS:
                unused = next((each for each in self._graphs if each not in self._recent), None)
                if unused is None:
                    return None
                del self._graphs[unused]
            graph = self._graphs[signature] = PromptGraph(inputs, cache, self.sparse.statistics)
            return None if uncapturable(self.decoder) else graph.begin(inputs, cache, launch)


class PromptGraph:
    """The graph of prompts of one shape, its inputs and outputs at fixed addresses, and the cache
    that it fills.
    """

    def __init__(
        self, inputs: dict[str, Tensor], cache: GrowingCache, statistics: Statistics
    ) -> None:
        with torch.inference_mode(False):
            self.inputs = {name: torch.zeros_like(x) for name, x in inputs.items()}
        self.cache: GrowingCache | None = copy.deepcopy(cache)  # without tokens
        self.statistics, self.counts = statistics, Counter[str | int]()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hidden: Tensor | None = None
        self.done = torch.cuda.Event()  # the last prompt's results are copied

    def begin(self, inputs: dict[str, Tensor], cache: GrowingCache, launch: Launch) -> Tensor:
        """Runs a prompt on the capture stream and captures its graph; if that fails, later prompts
        run without a graph.
        """
        device, began = next(iter(inputs.values())).device, time.monotonic()
        with on_capture_stream(device):
            hidden = launch(inputs, cache)
        assert self.cache is not None
        try:
            with (
                on_capture_stream(device),
                shared_by_layers(),
                self.statistics.recorded() as self.counts,
            ):
                self.graph, self.hidden = captured(partial(launch, self.inputs, self.cache))
        except RuntimeError as error:
            self.cache = self.graph = self.hidden = None
            logger.info(f"prompts: no CUDA graph: {' '.join(str(error).split())[:200]}")
        else:
            logger.info(
                f"prompts: captured a CUDA graph in {time.monotonic() - began:.2f} s "
                f"({tuple(inputs)})"
            )
        self.done.record()
        return hidden

    def replay(self, inputs: dict[str, Tensor], cache: GrowingCache) -> Tensor | None:
        """Replays the graph and copies its results; None without a graph."""
        if self.graph is None or self.hidden is None or self.cache is None:
            return None
        self.done.wait()
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        with torch.inference_mode(False), torch.no_grad():
            cache.layers = copy.deepcopy(self.cache.layers)
        hidden = self.hidden.clone()
        self.done.record()
        self.statistics.count_again(self.counts)
        return hidden


def _is_whole(mask: Any, tokens: Tensor) -> bool:
    """Returns True for the mask of a prompt without padding, and without a mask."""
    return mask is None or (
        isinstance(mask, Tensor) and mask.shape == tokens.shape[:2] and not any(left_padding(mask))
    )

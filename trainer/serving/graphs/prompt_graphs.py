"""Prompts of small models as CUDA graphs, since the host launches their kernels more slowly than
they run.

The first prompt of a shape runs without a graph. The second prompt runs on the capture stream, so
that workspaces exist, and then its graph is captured; later prompts replay it. A graph fills its
own cache at fixed addresses, whose layers are copied for each prompt while the graph still runs.
"""

import copy
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.methods.blocks import shared_by_layers
from msattn.trainer.models.replacement import NotCopied
from msattn.trainer.serving.contiguous.layers import GrowingCache, GrowingLayer
from msattn.trainer.serving.graphs.capture import captured, on_capture_stream, uncapturable
from msattn.trainer.serving.statistics import Statistics

# matrix products of a layer, 0.5 ms on an H100: larger ones take longer than their launches
MAX_LAYER_FLOP = 2.5e11
MAX_TOKENS = 16384  # attention is not among these products
MAX_GRAPHS = 2  # each holds the activations of its prompt, and a cache
logger = logging.getLogger(__name__)
# launches the kernels of a prompt with these inputs and this cache
Launch = Callable[[dict[str, Tensor], GrowingCache], Tensor]


class PromptGraphs(NotCopied):
    """CUDA graphs of one decoder's prompts, by shape; the latest graphs are kept."""

    def __init__(self, decoder: Any, statistics: Statistics) -> None:
        self.decoder, self.statistics = decoder, statistics
        weights = sum(parameter.numel() for parameter in decoder.layers.parameters()) / len(
            decoder.layers
        )
        self._most_tokens = min(MAX_TOKENS, MAX_LAYER_FLOP / (2 * max(weights, 1)))
        # None: the shape was seen once
        self._graphs: OrderedDict[tuple, PromptGraph | None] = OrderedDict()
        self._lock = Lock()

    def serves(self, inputs: dict[str, Tensor], cache: GrowingCache | None) -> bool:
        """Returns True if a prompt with an empty cache may become a graph."""
        tokens = next(iter(inputs.values()), None)
        if (
            tokens is None
            or cache is None
            or tokens.ndim < 2
            or not 1 < tokens.shape[0] * tokens.shape[1] <= self._most_tokens
        ):
            return False
        return all(
            isinstance(layer, GrowingLayer) and layer.key_buffer.memory is None
            for layer in cache.layers
        )

    def run(
        self, inputs: dict[str, Tensor], cache: GrowingCache, state: tuple, launch: Launch
    ) -> Tensor | None:
        """Fills the cache and returns the last hidden states; None for the first prompt of a shape,
        and if there is no graph.

        ``state`` is what a graph has fixed of the model.
        """
        kinds = tuple((type(layer), layer.max_cache_len) for layer in cache.layers)
        signature = (tuple((name, x.shape, x.dtype) for name, x in inputs.items()), kinds, state)
        with self._lock:
            seen, graph = signature in self._graphs, self._graphs.pop(signature, None)
            self._graphs[signature] = graph
            if not seen:
                if len(self._graphs) > MAX_GRAPHS:
                    self._graphs.popitem(last=False)
                return None
            if graph is None:
                graph = self._graphs[signature] = PromptGraph(inputs, cache, self.statistics)
                return None if uncapturable(self.decoder) else graph.begin(inputs, cache, launch)
            return graph.replay(inputs, cache)


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

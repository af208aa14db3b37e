"""Managers of transformers' continuous batching for an attached model, which end with the context;
their configuration.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from msattn.kernels.common.paged_checks import MAX_BUCKETS
from msattn.trainer.config.policies import Multiscale
from msattn.trainer.config.values import require
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.models.families import (
    attention_layers,
    check_length,
    check_transformers,
    decoder,
    max_length,
    text_config,
)
from msattn.trainer.models.replacement import NotCopied, replaced
from msattn.trainer.models.tap import BATCHED_IMPLEMENTATION, PAGES, is_tapped
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.engines.batch_pages import (
    AllocatedState,
    begin_pass,
)
from msattn.trainer.serving.engines.whole_blocks import WholeBlocks
from msattn.trainer.serving.graphs.capture import uncapturable

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

# default limit of concurrent requests: each takes memory for the slots of the longest possible
# request
MAX_REQUESTS = 256


@contextmanager
def batching(model: Any, sparse: Sparse, *, cuda_graphs: bool) -> Iterator["Managers | None"]:
    """Lets a model create managers of continuous batching inside the context, which end with it;
    None for a model without them.
    """
    original = getattr(model, "init_continuous_batching", None)
    if original is None:
        yield None
        return
    managers = Managers(original, sparse, cuda_graphs=cuda_graphs)
    with (
        replaced(managers.model, managers.create, name="init_continuous_batching"),
        replaced(managers.model, managers.generate_batch, name="generate_batch"),
    ):
        try:
            yield managers
        finally:
            managers.end()


class Managers(NotCopied):
    """The managers that an attached model has created, and the state of their caches."""

    def __init__(self, original: Any, sparse: Sparse, *, cuda_graphs: bool) -> None:
        self.original, self.sparse, self.cuda_graphs = original, sparse, cuda_graphs
        self.model = original.__self__  # for a PEFT model, the model inside
        self.original_batch = self.model.generate_batch
        self._managers: WeakSet[Any] = WeakSet()
        self._states: WeakKeyDictionary[Any, AllocatedState] = WeakKeyDictionary()
        self._lock = RLock()  # managers are created, and have their passes, in several threads

    @torch.no_grad()
    def create(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """Replaces ``init_continuous_batching``; raises UserError for an unsupported version, model
        or value.
        """
        check_transformers("generate_batch")
        if reason := unbatched(self.model, self.sparse):
            raise UserError(f"generate_batch: {reason}; use model.generate")
        config = (
            self.sparse.batching_config()
            if continuous_batching_config is None
            else copy(continuous_batching_config)
        )
        check_config(config, self.sparse)
        # transformers would look for a GPU, not for the model's device
        if self.model.device.type != "cuda":
            config.use_cuda_graph = config.use_async_batching = False
        if workload_hints is not None:
            longest = workload_hints.max_prompt_length
            check_length(self.model.config, longest, f"prompt of {longest} tokens")
        manager = getattr(self.model, "_cached_continuous_batching_manager", None)
        if manager is not None and manager not in self._managers:
            raise UserError(
                "generate_batch: a manager created before attach is still cached; first call "
                "model.destroy_cached_continuous_batching_manager()"
            )
        # transformers would warn of none
        pages, config.max_blocks_per_request = config.max_blocks_per_request, None
        config_of_model = self.model.config
        with self._lock:
            before = config_of_model._attn_implementation
            config_of_model._attn_implementation = BATCHED_IMPLEMENTATION  # until the context ends
            try:
                manager = self.original(
                    generation_config=generation_config,
                    continuous_batching_config=config,
                    workload_hints=workload_hints,
                )
                if manager not in self._managers:
                    if pages is None:
                        pages = -(-_longest(config_of_model, workload_hints) // config.page_size)
                    self._configure(manager, config, pages)
                    self._managers.add(manager)
            except BaseException:
                config_of_model._attn_implementation = before
                raise
        return manager

    def generate_batch(self, inputs: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        """Replaces ``generate_batch``, which would log a refused prompt and return no answer."""
        if torch.is_inference_mode_enabled():
            raise UserError(
                "generate_batch: called in torch.inference_mode(); use torch.no_grad() or neither"
            )
        for prompt in inputs:
            check_prompt(prompt, self.model.config)
        return self.original_batch(inputs, *args, **kwargs)

    def begin_pass(self, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the decoder, which describe the pass over a manager's cache to
        its layers; UserError for a manager of another attention.
        """
        current = begin_pass(self.sparse.paged, self._state(kwargs["cache"], config), kwargs)
        attend = partial(self.sparse.attend_pages, current)
        # transformers makes no mask where it gets one, and since 5.24 would write to the cache
        own = {"attention_mask": torch.empty(1, 1, 0, 0), "cache": None}
        return {**kwargs, **own, PAGES: attend}

    def _state(self, cache: Any, config: Any) -> AllocatedState:
        with self._lock:
            if cache not in self._states:
                owners = [
                    each
                    for each in self._managers
                    if getattr(each.batch_processor, "cache", None) is cache
                ]
                if not owners:
                    raise UserError(
                        "generate_batch: this manager was created outside the attached context; "
                        "create it inside"
                    )
                requests = owners[0].continuous_batching_config.max_requests_per_batch
                options = self.sparse.paged.state_options(config, requests)
                self._states[cache] = AllocatedState(cache, **options)
                self.sparse.paged.create_counters(self._states[cache])
            return self._states[cache]

    def _configure(self, manager: Any, given: Any, pages: int) -> None:
        """Enables decoding over block tables, for which transformers would require its own kernel,
        and CUDA graphs.
        """
        resolved = manager.continuous_batching_config
        captures = self.cuda_graphs and resolved.cuda_graph_booleans[1]
        reason = uncapturable(decoder(self.model))
        if captures and reason is not None:
            warnings.warn(
                f"generate_batch runs without CUDA graphs, more slowly: {reason}",
                ModelWarning,
                stacklevel=3,
            )
        resolved.max_blocks_per_request = pages
        resolved.use_cuda_graph = (False, captures and reason is None)
        if given.max_requests_per_batch is None:
            resolved.max_requests_per_batch = min(resolved.max_requests_per_batch, MAX_REQUESTS)
        manager._create_batch_processor = partial(
            self._create_processor, manager, manager._create_batch_processor
        )
        manager.warmup = partial(self._warm_up, manager.warmup)
        manager.add_request = partial(self._add_request, manager.add_request)

    def _create_processor(self, manager: Any, create: Callable[[], Any]) -> Any:
        """Creates or resets what runs the passes, and waits for it.

        transformers creates and clears the tensors of passes in one stream, and fills them in
        another without waiting: on a GPU that others keep busy, the first passes found them
        cleared.
        """
        is_new = manager.batch_processor is None
        processor = create()
        if is_new:
            WholeBlocks(processor.scheduler, *self.sparse.paged.chunks)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return processor

    def _warm_up(self, warm_up: Callable[[], None]) -> None:
        """Runs the passes of transformers' warm-up, which belong to no request, without counting
        them.
        """
        with self.sparse.statistics.unchanged():
            warm_up()

    def _add_request(
        self, add: Callable[..., Any], input_ids: Sequence[int], *args: Any, **kwargs: Any
    ) -> Any:
        """Adds a request after checking its prompt, because a request that fails in a pass would
        end all others.
        """
        check_prompt(input_ids, self.model.config)
        return add(input_ids, *args, **kwargs)

    def end(self) -> None:
        """Stops the managers, whose graphs and caches belong to this context, and releases the
        caches.
        """
        with ExitStack() as ends:  # all of them run, whatever one raises
            ends.callback(self._release)
            for manager in list(self._managers):
                ends.callback(self._end, manager)

    def _release(self) -> None:
        with self._lock:
            for state in self._states.values():
                state.release()
            self._states.clear()

    def _end(self, manager: Any) -> None:
        """Stops a manager, and forgets it where it is kept on the model."""
        manager.start = manager.warmup = _ended
        try:
            if manager.is_running():
                manager.stop(hard_stop=True)
        finally:
            if getattr(self.model, "_cached_continuous_batching_manager", None) is manager:
                self.model.destroy_cached_continuous_batching_manager()


def _ended() -> None:
    raise UserError(
        "generate_batch: this manager has ended with its attached context; create another one"
    )


def unbatched(model: Any, sparse: Sparse) -> str | None:
    """Returns the reason why the sparse attention of ``model`` does not work over the pages of
    ``generate_batch``; None if it does.
    """
    if not is_tapped(model.config):
        return "models with images are not supported"
    if any(
        getattr(getattr(layer, "self_attn", None), "sinks", None) is not None
        for layer in decoder(model).layers
    ):
        return "attention sinks are not supported"
    return unpaged(decoder(model).config, sparse)


def unpaged(config: Any, sparse: Sparse) -> str | None:
    """Returns the reason why the sparse attention of a decoder does not work over pages; None if it
    does.
    """
    if reason := unpaged_layers(config):
        return reason
    if sparse.measure_recall or sparse.statistics.timer is not None:
        return "measure_recall and measure_time are not supported"
    policy = None if sparse.dispatch.selection is None else sparse.dispatch.selection.policy
    if any(
        isinstance(each, Multiscale)
        for each in (policy if isinstance(policy, Sequence) else [policy])
    ):
        return "select.policy=multiscale reads no pages"
    if sparse.dispatch.gate is not None and sparse.dispatch.gate.cfg.rope == "model":
        return "pages pool keys before RoPE, for gates with gate.rope=true or false"
    routed = sparse.dispatch.routed
    if routed is None:
        return None
    if routed.router.grouping != "buckets":
        return (
            "qmodel may be a query classifier, a k-means or random buckets, no decode gate or pages"
        )
    if routed.independent:
        return "independent=True is not supported, because a query group shares its buckets"
    if (buckets := routed.router.num_buckets) > MAX_BUCKETS:
        return f"qmodel may have up to {MAX_BUCKETS:,} buckets, this router has {buckets:,}"
    return None


def unpaged_layers(config: Any) -> str | None:
    """Returns the reason why a layer of a decoder cannot be sparse over pages; None if all can."""
    for layer in attention_layers(config):
        if layer.kept is not None:
            return f"layer {layer.layer} keeps the model's own attention: {layer.kept}"
    # without any, transformers keeps the cache of a window as one
    kinds = getattr(config, "layer_types", None)
    windows = kinds is None and getattr(config, "sliding_window", None) is not None
    if windows or set(kinds or ["full_attention"]) != {"full_attention"}:
        return "layers with a sliding window are not supported"
    return None


def check_config(config: "ContinuousBatchingConfig", sparse: Sparse) -> None:
    """Raises UserError for a configuration value that sparse attention does not support."""
    block, _ = sparse.paged.chunks
    require(
        config.page_size % block == 0,
        "page_size",
        config.page_size,
        f"expected a multiple of {block}, the block size of the selection",
    )
    tokens, least = config.max_batch_tokens, 2 * block
    keys = "max_batch_tokens, server.batch_tokens"
    require(
        tokens is None or tokens >= least, keys, tokens, f"expected {least} or more, two blocks"
    )
    require(
        config.cpu_offload_space == 0, "cpu_offload_space", config.cpu_offload_space, "expected 0"
    )
    compiled = (
        config.varlen_compile_config or config.decode_compile_config or config.default_compile_level
    )
    require(
        not compiled,
        "varlen_compile_config, decode_compile_config, default_compile_level",
        compiled,
        "not accepted",
    )
    graphs = config.use_cuda_graph
    prompts = graphs if isinstance(graphs, bool) else graphs is not None and graphs[0]
    require(
        not prompts,
        "use_cuda_graph",
        graphs,
        "prompts are not captured; expected False or (False, True)",
    )


def check_prompt(ids: Sequence[int], config: Any) -> None:
    """Raises UserError for a prompt that is empty, longer than the model's positions, or contains
    invalid ids.
    """
    size = text_config(config).vocab_size
    require(len(ids) > 0, "input_ids", list(ids), "expected one token or more")
    require(
        min(ids) >= 0 and max(ids) < size,
        "input_ids",
        f"{min(ids)} to {max(ids)}",
        f"expected 0 to {size - 1}",
    )
    check_length(config, len(ids), f"prompt of {len(ids)} tokens")


def _longest(config: Any, hints: Any) -> int:
    """Returns the number of tokens of the longest request that is expected."""
    # one of them is not known
    if hints is None or 0 in (hints.max_prompt_length, hints.max_generated_length):
        return max_length(config)
    return min(hints.max_prompt_length + hints.max_generated_length, max_length(config))

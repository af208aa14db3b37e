"""Memory that msattn needs beside the KV cache, which vLLM sizes after a pass without attention."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from msattn.trainer.models.families import attention_layers
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.engines.vllm.engine import sparse_of_layers, state_options
from msattn.trainer.serving.engines.vllm.metadata import Metadata, cache_scales, cache_views
from msattn.trainer.serving.engines.vllm.received import KEPT_BYTES
from msattn.trainer.serving.paged.state import PagedState

GIB = 2**30

_log = logging.getLogger("vllm.msattn")  # vLLM shows what its own loggers say


class Needed(NamedTuple):
    """Bytes that a rank needs beside the KV cache."""

    per_page: int  # of the state of a page in all layers
    fixed: int  # of the state that does not depend on the pages
    work_space: int

    def left(self, available: int, page: int) -> int:
        """Returns the bytes left for the cache, whose pages have ``page`` bytes in all layers."""
        return (available - self.fixed - self.work_space) * page // (page + self.per_page)


def available_memory(impl_class: type, profile: Callable[[], int], worker: Any) -> int:
    """Returns the memory that a worker's ``determine_available_memory`` finds, without what layers
    of a class need beside the cache.
    """
    layers = worker.vllm_config.compilation_config.static_forward_context
    specs = worker.model_runner.get_kv_cache_spec()
    own = {name: spec for name, spec in specs.items() if type(layers[name].impl) is impl_class}
    if not own:
        return profile()
    needed = _needed(worker, own)  # loads artifacts, whose memory vLLM then counts
    available = profile()
    page, note = sum(spec.page_size_bytes for spec in specs.values()), ""
    if worker.vllm_config.cache_config.kv_cache_memory_bytes:
        left, note = available, "; the size of the cache was given, so leave room for both"
    else:
        left = needed.left(available, page)
    pages = left // page
    _log.info(
        "msattn: %.2f GiB of KV cache; beside it %.2f GiB of pooled keys and buckets and %.2f GiB "
        "of work space%s",
        left / GIB,
        (needed.fixed + pages * needed.per_page) / GIB,
        needed.work_space / GIB,
        note,
    )
    return left


def _needed(worker: Any, specs: dict[str, Any]) -> Needed:
    """Returns what the layers of ``specs`` need."""
    config, device = worker.vllm_config, worker.device
    sparse = sparse_of_layers(config, specs, device)
    options = state_options(config, sparse)
    one, two = (_state_bytes(specs, pages, options) for pages in (1, 2))
    has_transfer = config.kv_transfer_config is not None
    of_received = KEPT_BYTES * config.cache_config.block_size if has_transfer else 0
    chunk, tokens = 0, 0
    if device.type == "cuda":  # on a CPU vLLM counts no work space either
        most, longest = (
            config.scheduler_config.max_num_batched_tokens,
            config.model_config.max_model_len,
        )
        chunk, tokens = (
            _peak_bytes(partial(largest_pass, config, sparse, specs, device, *size), device)
            for size in ((1, min(most, longest)), (min(most, options["requests"]), 1))
        )
    # a CUDA graph over new tokens keeps its own work space
    return Needed(two - one + of_received, 2 * one - two, max(chunk, tokens) + tokens)


def _state_bytes(specs: dict[str, Any], pages: int, options: dict[str, Any]) -> int:
    """Returns the bytes of the state of a cache with this many pages."""
    caches = {
        extract_layer_index(name): cache_views(_cache(spec, pages, torch.device("meta")))
        for name, spec in specs.items()
    }
    return PagedState(caches, **options).nbytes


def _cache(spec: Any, pages: int, device: torch.device) -> torch.Tensor:
    shape = pages, spec.num_kv_heads, spec.block_size, 2 * spec.head_size
    return torch.zeros(shape, dtype=spec.dtype, device=device)


def _peak_bytes(compute: Any, device: torch.device) -> int:
    """Returns the largest number of bytes that a computation holds on a GPU."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def largest_pass(
    config: Any,
    sparse: Sparse,
    specs: dict[str, Any],
    device: torch.device,
    rows: int,
    queries: int,
) -> None:
    """Computes one layer's attention of ``queries`` new tokens in each of ``rows`` sequences of the
    greatest length, whose pages are all the same one.
    """
    names = {extract_layer_index(name): name for name in specs}
    routed = [number for number in names if number in sparse.dispatch.routed_layers][:1]
    number = (routed or [*names])[0]
    spec, longest = specs[names[number]], config.model_config.max_model_len
    text, tokens = config.model_config.hf_text_config, rows * queries
    options = state_options(config, sparse) | {"bucket_layers": routed}
    layer = config.compilation_config.static_forward_context[names[number]]
    caches, scales = {number: cache_views(_cache(spec, 1, device))}, cache_scales({number: layer})
    state = PagedState(caches, scales=scales, **options)
    ints = {"dtype": torch.int32, "device": device}
    starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32)
    given = CommonAttentionMetadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts,
        seq_lens=torch.full((rows,), longest, **ints), num_reqs=rows, num_actual_tokens=tokens,
        max_query_len=queries, max_seq_len=longest,
        block_table_tensor=torch.zeros(rows, -(-longest // spec.block_size), **ints),
        slot_mapping=torch.zeros(tokens, dtype=torch.long, device=device),
    )  # fmt: skip
    rotates = [layer.rotates for layer in attention_layers(text)]
    assert sparse.rotation is not None
    metadata = Metadata(sparse, state, given, sparse.rotation, rotates, config.model_config.dtype)
    with sparse.statistics.unchanged(), torch.inference_mode():
        layer.impl.warm_up(layer, metadata)

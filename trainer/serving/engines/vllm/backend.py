"""Attention over the pages of vLLM: the backend, its builder, and the layers."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from msattn.trainer.models.families import attention_layers
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.engines.vllm.engine import (
    CACHE_DTYPES,
    PAGE_SIZES,
    check_drafts,
    check_layer,
    drafts_of,
    sparse_of_layers,
    state_options,
)
from msattn.trainer.serving.engines.vllm.memory import available_memory
from msattn.trainer.serving.engines.vllm.metadata import Metadata, cache_scales, cache_views
from msattn.trainer.serving.engines.vllm.plugin import backend_name
from msattn.trainer.serving.engines.vllm.received import ReceivedKeys
from msattn.trainer.serving.engines.vllm.unfinished import UnfinishedChunks
from msattn.trainer.serving.engines.vllm.worker import wrap_method
from msattn.trainer.serving.paged.state import PagedState


class Backend(AttentionBackend):
    """The attention backend ``MSATTN`` (before vLLM 0.32: ``CUSTOM``)."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = list(CACHE_DTYPES)  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> "type[Impl]":
        return Impl

    @staticmethod
    def get_builder_cls() -> "type[Builder]":
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(PAGE_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Returns the size of pages if none is asked for: smaller ones take longer to read."""
        return max(default_block_size, 64)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Returns the shape of a cache. Only vLLM before 0.29 asks for it; later versions always
        use this one.
        """
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class Builder(AttentionMetadataBuilder[Metadata]):
    """Describes passes, and holds the artifacts and the state of the pages."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # with drafts: of one and all drafts

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.config = vllm_config.model_config.hf_text_config
        self.sparse = sparse_of_layers(vllm_config, layer_names, device)
        self.rotates = [layer.rotates for layer in attention_layers(self.config)]
        self.unfinished = UnfinishedChunks()
        self._state: PagedState | None = None
        self._received: ReceivedKeys | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """Returns a pass, which its first layer describes."""
        assert self.sparse.rotation is not None
        state, dtype = self.state(), self.vllm_config.model_config.dtype
        if has_kv_transfer_group() and (state.buckets or state.pooled):
            if self._received is None:
                self._received = ReceivedKeys(self.sparse, state, self.rotates, dtype)
                self._received.follow(get_kv_transfer_group())
            self._received.begin(common_attn_metadata)
        return Metadata(
            self.sparse, state, common_attn_metadata, self.sparse.rotation, self.rotates, dtype,
            drafts_of(self.vllm_config), self.unfinished.sizes,
        )  # fmt: skip

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Metadata:
        """Returns a pass after its layers have run once, so that its capture compiles no kernel and
        folds no classifier.

        vLLM's own run before the capture may be too short to reach the kernels that the capture
        launches.
        """
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if metadata.new_tokens:
            layers = self.vllm_config.compilation_config.static_forward_context
            with self.sparse.statistics.unchanged():
                for name in sorted(self.layer_names, key=extract_layer_index):
                    layers[name].impl.warm_up(layers[name], metadata)
        return metadata

    def state(self) -> PagedState:
        """Returns the state of the pages, which vLLM allocates after it has created its
        builders.
        """
        if self._state is None:
            every = self.vllm_config.compilation_config.static_forward_context
            layers = {extract_layer_index(name): every[name] for name in self.layer_names}
            caches = {number: cache_views(layer.kv_cache) for number, layer in layers.items()}
            options = state_options(self.vllm_config, self.sparse)
            self._state = PagedState(caches, scales=cache_scales(layers), **options)
            self.sparse.paged.create_counters(self._state)
        return self._state


class Impl(AttentionImpl[Metadata]):
    """The attention of a layer; its parameters are vLLM's. UserError for attention that the kernels
    do not compute.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        check_layer(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=None if kv_cache_dtype in CACHE_DTYPES else kv_cache_dtype,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=None if sinks is None else "...",
        )
        self.num_heads, self.head_size, self.num_kv_heads = (
            num_heads,
            head_size,
            num_kv_heads or num_heads,
        )
        self.scale, self.softcap, self.kv_cache_dtype = (
            float(scale),
            logits_soft_cap or None,
            kv_cache_dtype,
        )
        self.sparse: Sparse | None = None
        config = get_current_vllm_config()
        check_drafts(config)
        wrap_method(config, "determine_available_memory", partial(available_memory, Impl))
        wrap_method(config, "execute_model", _with_unfinished)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes keys, values and buckets of the new tokens, and their attention ``[T, Hq, D]`` to
        ``output``.

        In vLLM's profiling passes there is no metadata, and the output is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("msattn does not quantize its output")
        if attn_metadata is None:
            return output.zero_()
        number = extract_layer_index(layer.layer_name)
        layers = attn_metadata.state.caches
        if number == min(layers):
            attn_metadata.begin_pass()
        x = attn_metadata.inputs(number, query, key, value, scale=self.scale, softcap=self.softcap)
        output[: attn_metadata.tokens] = attn_metadata.attend(x)[0].transpose(0, 1)
        if number == max(layers):
            attn_metadata.end_pass()
        return output

    def warm_up(self, layer: Any, metadata: Metadata) -> None:
        """Computes the attention of zeros in a pass, whose slots belong to no request."""
        like = {"dtype": metadata.dtype, "device": metadata.given.seq_lens.device}
        q, k = (
            torch.zeros(metadata.tokens, heads, self.head_size, **like)
            for heads in (self.num_heads, self.num_kv_heads)
        )
        self.forward(layer, q, k, k, layer.kv_cache, metadata, torch.empty_like(q))


def stats(worker: Any) -> dict[str, Any]:
    """Returns what :meth:`msattn.trainer.serving.attend.Sparse.stats` does, for
    ``llm.collective_rpc(stats)``.
    """
    (builder,) = _builders_of_worker(worker)
    return dict(builder.sparse.stats())  # a type that vLLM's processes can exchange


def clear_stats(worker: Any) -> None:
    """Forgets what was counted, such as the passes with which vLLM warms up, for
    ``llm.collective_rpc(clear_stats)``.
    """
    for builder in _builders_of_worker(worker):
        builder.sparse.statistics.clear()


def _with_unfinished(execute: Callable[[Any], Any], worker: Any, scheduled: Any) -> Any:
    """Executes a pass with its unfinished chunks, which the scheduler tells."""
    builders = _builders_of_worker(worker)
    for builder in builders:
        builder.unfinished.begin(scheduled)
    try:
        return execute(scheduled)
    finally:
        for builder in builders:
            builder.unfinished.end()


def _builders_of_worker(worker: Any) -> list[Builder]:
    """Returns the builders of a worker's layers; a draft model has another backend."""
    groups = chain.from_iterable(worker.model_runner.attn_groups)
    return [group.get_metadata_builder() for group in groups if group.backend is Backend]

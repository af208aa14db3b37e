"""Keys that a connector of vLLM brings into the pages, from another engine or from storage.

No pass of this engine computes them, so their buckets and pooled keys are missing, and those in
their place may be of earlier keys. They are found by their content: 4 bytes of each key that a pass
writes are kept.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from msattn.kernels.common.fp8 import dequantize
from msattn.trainer.methods.buckets import BucketRouter
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.paged.state import PagedState

KEPT_BYTES = 4  # of a slot
AT_ONCE = 65536  # keys; bounds the memory of keys before RoPE


class ReceivedKeys:
    """Computes the missing state of cached keys, before each pass that may read them.

    The kept bytes are those of the last layer, where keys depend on all tokens before them. They
    are compared with the pages, for which the host waits.
    """

    def __init__(
        self, sparse: Sparse, state: PagedState, rotates: Sequence[bool], dtype: torch.dtype
    ) -> None:
        self.sparse, self.state, self.rotates, self.dtype = sparse, state, rotates, dtype
        keys, _ = state.caches[max(state.caches)]
        self._bytes = keys[:, :, 0].view(torch.int32)[..., 0]  # [P, page_size], of the pages
        self._kept = self._bytes.clone()
        self._written: Tensor | None = None  # int64 [T], slots that the last pass wrote
        self._given: CommonAttentionMetadata | None = None

    def follow(self, connector: Any) -> None:
        """Lets a worker's connector call :meth:`recover` after the loads that a pass waits for."""
        load = connector.start_load_kv

        @wraps(load)
        def start_load_kv(*arguments: Any, **options: Any) -> None:
            load(*arguments, **options)
            self.recover()

        connector.start_load_kv = start_load_kv

    def begin(self, given: CommonAttentionMetadata) -> None:
        """Begins a pass, after those before it have written their keys."""
        if self._written is not None:
            self._keep(self._written // self.state.page_size, self._written % self.state.page_size)
        slots = given.slot_mapping[: given.num_actual_tokens]
        self._written, self._given = slots.long().clamp(min=0), given
        self.recover()

    def recover(self) -> None:
        """Computes the state of the pass's cached keys that another one brought."""
        given, size = self._given, self.state.page_size
        if given is None:
            return
        table = given.block_table_tensor[:, : -(-given.max_seq_len // size)].long()
        cached = given.seq_lens - given.query_start_loc.diff()
        position = torch.arange(table.shape[1] * size, device=table.device)
        received = (self._bytes != self._kept)[table].flatten(1) & (position < cached[:, None])
        for row in received.any(1).nonzero()[:, 0].tolist():
            for some in received[row].nonzero()[:, 0].split(AT_ONCE):
                self._recover(table[row, some // size], some % size, some)

    def _recover(self, pages: Tensor, offsets: Tensor, positions: Tensor) -> None:
        """Computes the state of keys in these slots."""
        state = self.state
        for layer, buckets in state.buckets.items():
            assert self.sparse.dispatch.routed is not None
            router, rotation = self.sparse.dispatch.routed.router, self.sparse.rotation
            assert isinstance(router, BucketRouter)
            assert rotation is not None
            k = state.caches[layer][0][pages, offsets].transpose(0, 1)[None]
            if scales := state.scales(layer):
                k = dequantize(k, scales["k_scale"], self.dtype)
            k_nope = rotation.invert(k, positions[None]) if self.rotates[layer] else k
            buckets[pages, offsets] = router.assign(layer, k_nope, k)[0].T.to(buckets.dtype)
        if state.pooled:
            state.mark_pooled(state.blocks_of(pages, offsets).unique(), pooled=False)
        if state.sizes is not None:
            state.sizes.forget()
        self._keep(pages, offsets)

    def _keep(self, pages: Tensor, offsets: Tensor) -> None:
        self._kept[pages, offsets] = self._bytes[pages, offsets]

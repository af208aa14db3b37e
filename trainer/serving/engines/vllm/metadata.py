"""The description of a pass over the pages of vLLM, and of its layers' inputs.

vLLM hands over queries and keys after RoPE, which the positions invert. The state of the pages
belongs to slots, so shared prefixes and preempted requests need nothing here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from msattn.kernels.common.fp8 import FP8
from msattn.kernels.paged.write import round_keys
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from msattn.trainer.models.rope import Rotation
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.paged.passes import PagedPass
from msattn.trainer.serving.paged.state import PagedState


@dataclass
class Metadata:
    """A forward pass, which all layers share.

    Its first layer describes it, from vLLM's tensors: they have fixed addresses, so a CUDA graph of
    a pass, which is replayed for later ones, describes each of them.
    """

    sparse: Sparse
    state: PagedState
    given: CommonAttentionMetadata  # maybe with requests and tokens of padding
    rotation: Rotation
    rotates: list[bool]  # whether each layer has RoPE
    dtype: torch.dtype  # dtype of the model
    drafts: int = 0  # the most that a request has after its new token
    # numbers of queries and keys of the chunks that do not end their prompts
    unfinished: Collection[tuple[int, int]] = ()
    current: PagedPass = field(init=False)
    positions: Tensor = field(init=False)  # int64 [1, T]
    cos: Tensor = field(init=False)  # [1, T, r]
    sin: Tensor = field(init=False)

    @property
    def tokens(self) -> int:
        """The number of tokens; vLLM's tensors may be padded to more."""
        return self.given.num_actual_tokens

    @property
    def new_tokens(self) -> int:
        """The number of new tokens of every request, drafts included, if it is the same; else
        0.
        """
        number = self.given.max_query_len
        equal = number * len(self.given.seq_lens) == self.tokens
        return number if equal and number <= 1 + self.drafts else 0

    def inputs(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> LayerInputs:
        """Returns the inputs of a layer from its queries, keys and values ``[T, H, D]`` after
        RoPE.
        """
        q, k, v = (x[: self.tokens].transpose(0, 1)[None] for x in (q, k, v))
        if scales := self.state.scales(layer):  # selections and buckets are of the keys as stored
            k = round_keys(k[0], scales["k_scale"])[None]
        cos, sin, q_nope, k_nope = self.cos, self.sin, q, k
        if self.rotates[layer]:
            q_nope, k_nope = (self.rotation.undo(x, cos, sin) for x in (q, k))
        else:
            cos, sin = cos[..., :0], sin[..., :0]
        angles, scoring = Angles(cos, sin, self.positions), Scoring(scale, softcap)
        return LayerInputs(layer, q, k, v, q_nope, k_nope, angles, scoring)

    def attend(self, x: LayerInputs) -> Tensor:
        """Returns the attention of a layer, ``[1, Hq, T, D]``."""
        return self.sparse.attend_pages(self.current, x)

    def begin_pass(self) -> None:
        """Describes the pass, before its first layer."""
        given, state, kv_len = self.given, self.state, self.given.seq_lens
        # padding is -1; page 0 belongs to no request
        slots = given.slot_mapping[: self.tokens].long().clamp(min=0)
        places = slots // state.page_size, slots % state.page_size
        table = given.block_table_tensor[:, : -(-given.max_seq_len // state.page_size)]
        if self.new_tokens:
            self.current = self.sparse.paged.begin_new_tokens(
                state, *places, table, kv_len, given.max_seq_len, self.new_tokens
            )
            assert self.current.decoded is not None
            positions = (self.current.decoded.kv_len.long() - 1).clamp(min=0)
        else:
            self.current = self.sparse.paged.begin_tables(
                state,
                *places,
                table,
                given.query_start_loc,
                kv_len,
                drafts=self.drafts,
                unfinished=self.unfinished,
            )
            positions = _positions(given.query_start_loc, kv_len, self.tokens)
        self.positions = positions[None]
        self.cos, self.sin = self.rotation.angles(self.positions, self.dtype)

    def end_pass(self) -> None:
        """Records what the pass has computed, after its last layer."""
        self.sparse.paged.end(self.current)


def cache_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values ``[P, page_size, Hkv, D]`` of vLLM's
    ``[P, Hkv, page_size, 2 D]``, which is bytes if they are in FP8.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(FP8)
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


def cache_scales(layers: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Returns the scales of keys and values of those of vLLM's layers, by number, whose cache is in
    FP8.
    """
    return {
        number: {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        for number, layer in layers.items()
        if layer.impl.kv_cache_dtype.startswith("fp8")
    }


def _positions(cu_queries: Tensor, kv_len: Tensor, tokens: int) -> Tensor:
    """Returns the position of each token in its sequence, int64 ``[tokens]``."""
    queries = cu_queries.diff()
    # position of a sequence's first token, less its place in the pass
    before = (kv_len - queries - cu_queries[:-1]).long()
    return torch.arange(tokens, device=kv_len.device) + before.repeat_interleave(
        queries, output_size=tokens
    )

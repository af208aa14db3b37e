"""The tensors of one attention layer in a forward pass, as the tap hands them to attention functions."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one attention layer: N current tokens and M keys, cached ones included.

    ``q_nope`` and ``k_nope`` are queries and keys of the current tokens before RoPE, after the q/k norm if the model has one.
    In a layer without RoPE they are those that are scored, with all that the model applies to them.
    """

    layer: int
    q: Tensor  # [B, Hq, N, D], after RoPE
    k: Tensor  # [B, Hkv, M, D], after RoPE
    v: Tensor  # [B, Hkv, M, D]
    q_nope: Tensor  # [B, Hq, N, D]
    k_nope: Tensor  # [B, Hkv, N, D]
    cos: Tensor  # [B or 1, N, r], of the current tokens and of the r channels that rotate; r is 0 in a layer without RoPE
    sin: Tensor
    scale: float  # of the scores
    kv_start: Tensor | None  # int32 [B], number of padded positions before each sequence; None without padding
    cache: Any  # of this layer (transformers' ``CacheLayerMixin``), already updated, or None
    positions: Tensor | None = None  # int64 [B or 1, N], of the current tokens in RoPE
    pooled_keys: Tensor | None = None  # fp32 [B, Hkv, Tc, P], of all blocks, for gates after cached tokens
    kv_len: Tensor | None = None  # int32 [B], number of filled positions of k and v, if they have free ones
    softcap: float | None = None  # limit of the scores, which become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [Hq], a logit of each query head that takes part in the softmax without a value
    prompt_keys: int | None = None  # keys of the cache that the last prompt or earlier passes brought; None: all
    ends_prompt: bool = True  # the last token is the last one of a prompt; False in its chunks before

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scaled scores as the layer's softmax gets them."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def sequence(self, b: int) -> "LayerInputs":
        """Returns the inputs of sequence ``b`` of a pass without a cache and without padding, as a batch of one."""
        one = {name: getattr(self, name)[b : b + 1] for name in ("q", "k", "v", "q_nope", "k_nope")}
        of_batch = {name: getattr(self, name) for name in ("cos", "sin", "positions")}
        one |= {name: x if x is None or len(x) == 1 else x[b : b + 1] for name, x in of_batch.items()}
        return replace(self, **one)

    @property
    def rotates(self) -> bool:
        """Returns whether the layer has RoPE."""
        return self.cos.shape[-1] > 0

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2]

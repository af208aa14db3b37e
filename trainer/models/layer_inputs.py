"""The tensors of one attention layer in a forward pass, as the tap hands them to attention functions."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one attention layer: N current tokens and M keys, cached ones included.

    Attributes
    ----------
    layer : index of the layer.
    q, k, v : Tensor [B, Hq, N, D], [B, Hkv, M, D], [B, Hkv, M, D], after RoPE.
    q_nope, k_nope : Tensor [B, Hq, N, D], [B, Hkv, N, D]
        Queries and keys of the current tokens before RoPE, after the q/k norm if the model has one. In a layer without RoPE
        they are those that are scored, with all that the model applies to them.
    cos, sin : Tensor [B or 1, N, r], of the current tokens and of the r channels that rotate; r is 0 in a layer without RoPE.
    scale : factor of the scores.
    softcap : limit of the scores, which become ``softcap * tanh(score / softcap)``, or None.
    sinks : Tensor [Hq] or None
        A logit of each query head that takes part in the softmax without a value.
    kv_start : int32 Tensor [B] or None
        Number of padded positions before each sequence; None without padding.
    cache : this layer's cache object (transformers' ``CacheLayerMixin``), already updated, or None.
    positions : int64 Tensor [B or 1, N] or None
        Positions of the current tokens in RoPE.
    pooled_keys : fp32 Tensor [B, Hkv, Tc, P] or None
        Pooled keys before RoPE of all blocks, for gates in passes after cached tokens.
    kv_len : int32 Tensor [B] or None
        Number of filled positions of k and v, where they are buffers with free positions.
    ends_prompt : whether the last token is the last one of a prompt; False in its chunks before.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    q_nope: Tensor
    k_nope: Tensor
    cos: Tensor
    sin: Tensor
    scale: float
    kv_start: Tensor | None
    cache: Any
    positions: Tensor | None = None
    pooled_keys: Tensor | None = None
    kv_len: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    ends_prompt: bool = True

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

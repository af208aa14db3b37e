"""The tensors of one attention layer, as the tap passes them to attention functions, and dense
attention over them.

Attention may have soft-capped scores and attention sinks, which SDPA lacks. Functions take all
inputs of the layer, so that no caller forgets how its scores are modified.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.flash_decode.score_mod import softcap
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.kernels.types import MaxPoolAttention, SparseAttention
from msattn.trainer.config.sizes import BlockSizes

SIZES = BlockSizes(64, 64)  # of blocks whose sizes do not matter


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one attention layer: N current tokens and M keys, cached ones included.

    ``q_nope`` and ``k_nope`` are queries and keys of the current tokens before RoPE, after the q/k
    norm if the model has one. In a layer without RoPE they are those that are scored, with all that
    the model applies to them.
    """

    layer: int
    q: Tensor  # [B, Hq, N, D], after RoPE
    k: Tensor  # [B, Hkv, M, D], after RoPE
    v: Tensor  # [B, Hkv, M, D]
    q_nope: Tensor  # [B, Hq, N, D]
    k_nope: Tensor  # [B, Hkv, N, D]
    # [B or 1, N, r], of the current tokens and of the r channels that rotate; r is 0 in a layer
    # without RoPE
    cos: Tensor
    sin: Tensor
    scale: float  # scale of the scores
    # int32 [B], number of padded positions before each sequence; None without padding
    kv_start: Tensor | None
    cache: Any  # this layer's cache (transformers' ``CacheLayerMixin``), already updated, or None
    positions: Tensor | None = None  # int64 [B or 1, N], of the current tokens in RoPE
    # fp32 [B, Hkv, Tc, P], of all blocks, for gates after cached tokens
    pooled_keys: Tensor | None = None
    # int32 [B], number of filled positions of k and v, if they have free ones
    kv_len: Tensor | None = None
    # limit of the scores, which become softcap * tanh(score / softcap)
    softcap: float | None = None
    # [Hq], a logit of each query head that takes part in the softmax without a value
    sinks: Tensor | None = None
    # keys of the cache that the last prompt or earlier passes brought; None: all
    prompt_keys: int | None = None
    # of the layer, if these are only a part of its heads
    kv_heads: slice = field(default_factory=partial(slice, None))
    # the last token is the last one of a prompt; False in its chunks before
    ends_prompt: bool = True

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scaled scores with the layer's soft cap."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def sequence(self, b: int) -> "LayerInputs":
        """Returns the inputs of sequence ``b`` of a pass without a cache and without padding, as a
        batch of one.
        """
        one = {name: getattr(self, name)[b : b + 1] for name in ("q", "k", "v", "q_nope", "k_nope")}
        of_batch = {name: getattr(self, name) for name in ("cos", "sin", "positions")}
        one |= {
            name: x if x is None or len(x) == 1 else x[b : b + 1] for name, x in of_batch.items()
        }
        return replace(self, **one)

    def of_heads(self, kv_heads: slice) -> "LayerInputs":
        """Returns the inputs of some of the key/value heads of the layer, and of the query heads
        that read them.
        """
        group = self.q.shape[1] // self.k.shape[1]
        q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part: dict[str, Any] = {name: getattr(self, name)[:, q_heads] for name in ("q", "q_nope")}
        part |= {name: getattr(self, name)[:, kv_heads] for name in ("k", "v", "k_nope")}
        if self.pooled_keys is not None:
            part["pooled_keys"] = self.pooled_keys[:, kv_heads]
        if self.sinks is not None:
            part["sinks"] = self.sinks[q_heads]
        return replace(self, **part, kv_heads=kv_heads)

    @property
    def rotates(self) -> bool:
        """Returns True if the layer has RoPE."""
        return self.cos.shape[-1] > 0

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2]


def score_options(x: LayerInputs) -> dict[str, Any]:
    """Returns the arguments of operations that say how scores are computed and masked: scale,
    softcap, padding.
    """
    return {"scale": x.scale, "softcap": x.softcap, "kv_start": x.kv_start}


def with_sinks(x: LayerInputs, state: SparseAttention) -> SparseAttention:
    """Adds the layer's attention sinks to the softmax of a result; a sink counts as attention mass
    that is always read.
    """
    return state if x.sinks is None else apply_sinks(state, x.sinks)


def block_map(x: LayerInputs, sizes: BlockSizes = SIZES, pool: str = "max") -> MaxPoolAttention:
    """Returns dense attention of a layer and its block map; see
    :func:`msattn.kernels.maxpool_attention.maxpool_attention`.
    """
    options: dict[str, Any] = score_options(x) | sizes.arguments | {"pool": pool, "sinks": x.sinks}
    return maxpool_attention(x.q, x.k, x.v, **options)


def dense_attention(x: LayerInputs) -> Tensor:
    """Computes the attention of a layer over all keys, as the model does, differentiable:
    ``[B, Hq, N, D]``.
    """
    if x.softcap is None and x.sinks is None:
        return causal_attention(x.q, x.k, x.v, scale=x.scale, kv_start=x.kv_start)
    rows, cols = (-(-tokens // SIZES.queries) for tokens in (x.num_queries, x.num_keys))
    every = torch.ones(1, 1, rows, cols, dtype=torch.bool, device=x.q.device)
    return with_sinks(
        x,
        block_sparse_attention(x.q, x.k, x.v, every, block_size=SIZES.queries, **score_options(x)),
    ).out


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, kv_start: Tensor | None
) -> Tensor:
    """Computes causal attention with PyTorch's SDPA; arguments as in :class:`LayerInputs`, output
    ``[B, Hq, N, D]``.

    The causal mask is bottom-right aligned if there are more keys than queries. The output of
    padded queries is 0.
    """
    if q.shape[2] == 1:
        return _dense_decode(q, k, v, scale, kv_start)
    if kv_start is None:
        return _causal(q, k, v, scale)
    past = k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for b, start in enumerate(kv_start.tolist()):  # each row runs as an unpadded sequence
        first = max(start - past, 0)
        if first < q.shape[2]:
            row = slice(b, b + 1)
            out[row, :, first:] = _causal(
                q[row, :, first:], k[row, :, start:], v[row, :, start:], scale
            )
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # SDPA's memory-efficient backend, needed for fp32, has no GQA
    if q.is_cuda and q.dtype == torch.float32:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    from torch.nn.attention.bias import causal_lower_right

    bias: Any = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=gqa)


def _dense_decode(q: Tensor, k: Tensor, v: Tensor, scale: float, kv_start: Tensor | None) -> Tensor:
    """Computes attention of one query per head: the queries of a group become the rows of their key
    head.

    This form also supports padding masks. 16-bit tensors on a GPU without padding use SDPA's
    kernels for a single query.
    """
    if q.is_cuda and q.dtype != torch.float32 and kv_start is None:
        return F.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    if kv_start is None:
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
    visible = torch.arange(k.shape[2], device=q.device) >= kv_start[:, None]
    empty = ~visible.any(dim=1, keepdim=True)
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=(visible | empty)[:, None, None], scale=scale
    )
    return out.masked_fill(empty[:, None, None], 0).reshape(q.shape)


def decoded_attention(x: LayerInputs) -> SparseAttention:
    """Computes dense attention of one new token of each sequence, for inference; ``x.kv_len``
    limits the keys.
    """
    cap = None if x.softcap is None else softcap(x.softcap)
    state = flash_decode(
        x.q, x.k, x.v, scale=x.scale, score_mod=cap, kv_start=x.kv_start, kv_len=x.kv_len
    )
    return with_sinks(x, state)


def attention_recall(lse: Tensor, dense_lse: Tensor) -> Tensor:
    """Returns the recall of each head: fp32 ``[H]``, the mean over batch and queries.

    A query reads ``exp(lse - dense_lse)`` of its attention mass, at most 1, where both are fp32
    ``[B, H, N]`` over the same inputs. Rows whose ``dense_lse`` is -inf (padding) do not count.
    """
    real = dense_lse > -torch.inf
    share = (lse - dense_lse).exp().clamp(max=1).masked_fill(~real, 0)
    return share.sum((0, 2)) / real.sum((0, 2)).clamp(min=1)

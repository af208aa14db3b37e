"""The tensors of one attention layer, as the tap passes them to attention functions, and dense
attention over them.

Attention may have soft-capped scores and attention sinks, which SDPA lacks. Functions take all
inputs of the layer, so that no caller forgets how its scores are modified.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.flash_decode.score_mod import softcap
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.kernels.multiscale_attention import multiscale_attention
from msattn.kernels.types import MaxPoolAttention, SparseAttention
from msattn.trainer.config.sizes import BlockSizes

if TYPE_CHECKING:
    from transformers.cache_utils import CacheLayerMixin

SIZES = BlockSizes(64, 64)  # of blocks whose sizes do not matter
ALL = slice(None)


class Angles(NamedTuple):
    """The rotations of the current tokens."""

    # [B or 1, N, r], of the r channels that rotate; r is 0 in a layer without RoPE
    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None  # int64 [B or 1, N]

    def part(self, rows: slice = ALL, tokens: slice = ALL) -> "Angles":
        """Returns those of some of the rows, unless all rows share them, and of some tokens."""

        def own(x: Tensor) -> Tensor:
            return x[:, tokens] if len(x) == 1 else x[rows, tokens]

        positions = None if self.positions is None else own(self.positions)
        return Angles(own(self.cos), own(self.sin), positions)


class Scoring(NamedTuple):
    """Options of a layer's scores."""

    scale: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    # [Hq], a logit of each query head that takes part in the softmax without a value
    sinks: Tensor | None = None


class Pooled(NamedTuple):
    """The keys of a sequence as gates score them, which stand for the keys of a cache."""

    keys: Tensor  # fp32 [B, Hkv, Tc, P], of all blocks
    num_keys: int
    # keys of the cache that the last prompt or earlier passes brought; None: all
    prompt_keys: int | None = None


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
    angles: Angles
    scoring: Scoring
    # int32 [B], number of padded positions before each sequence; None without padding
    kv_start: Tensor | None = None
    cache: "CacheLayerMixin | None" = None  # of this layer, already updated
    pooled: Pooled | None = None  # for gates after cached tokens
    # int32 [B], number of filled positions of k and v, if they have free ones
    kv_len: Tensor | None = None
    # of the layer, if these are only a part of its heads
    kv_heads: slice = field(default_factory=lambda: ALL)
    # the last token is the last one of a prompt; False in its chunks before
    ends_prompt: bool = True

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scaled scores with the layer's soft cap."""
        limit = self.scoring.softcap
        return scores if limit is None else limit * (scores / limit).tanh()

    def sequence(self, b: int) -> "LayerInputs":
        """Returns the inputs of sequence ``b`` of a pass without a cache and without padding, as a
        batch of one.
        """
        rows = slice(b, b + 1)
        one = {name: getattr(self, name)[rows] for name in ("q", "k", "v", "q_nope", "k_nope")}
        return replace(self, **one, angles=self.angles.part(rows))

    def of_heads(self, kv_heads: slice) -> "LayerInputs":
        """Returns the inputs of some of the key/value heads of the layer, and of the query heads
        that read them.
        """
        group = self.q.shape[1] // self.k.shape[1]
        q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part: dict[str, Any] = {name: getattr(self, name)[:, q_heads] for name in ("q", "q_nope")}
        part |= {name: getattr(self, name)[:, kv_heads] for name in ("k", "v", "k_nope")}
        if self.pooled is not None:
            part["pooled"] = self.pooled._replace(keys=self.pooled.keys[:, kv_heads])
        if self.scoring.sinks is not None:
            part["scoring"] = self.scoring._replace(sinks=self.scoring.sinks[q_heads])
        return replace(self, **part, kv_heads=kv_heads)

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return self.scoring.scale

    @property
    def rotates(self) -> bool:
        """Returns True if the layer has RoPE."""
        return self.angles.cos.shape[-1] > 0

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2] if self.pooled is None else self.pooled.num_keys


def score_options(x: LayerInputs) -> dict[str, Any]:
    """Returns the arguments of operations that say how scores are computed and masked: scale,
    softcap, padding.
    """
    return {"scale": x.scale, "softcap": x.scoring.softcap, "kv_start": x.kv_start}


def with_sinks(x: LayerInputs, state: SparseAttention) -> SparseAttention:
    """Adds the layer's attention sinks to the softmax of a result; a sink counts as attention mass
    that is always read.
    """
    return state if x.scoring.sinks is None else apply_sinks(state, x.scoring.sinks)


def block_map(x: LayerInputs, sizes: BlockSizes = SIZES, pool: str = "max") -> MaxPoolAttention:
    """Returns dense attention of a layer and its block map; see
    :func:`msattn.kernels.maxpool_attention.maxpool_attention`.
    """
    options: dict[str, Any] = (
        score_options(x) | sizes.arguments | {"pool": pool, "sinks": x.scoring.sinks}
    )
    return maxpool_attention(x.q, x.k, x.v, **options)


def dense_attention(x: LayerInputs) -> Tensor:
    """Computes the attention of a layer over all keys, as the model does, differentiable:
    ``[B, Hq, N, D]``.
    """
    if x.scoring.softcap is None and x.scoring.sinks is None:
        return causal_attention(x.q, x.k, x.v, scale=x.scale, kv_start=x.kv_start)
    rows, cols = (-(-tokens // SIZES.queries) for tokens in (x.num_queries, x.num_keys))
    every = torch.ones(1, 1, rows, cols, dtype=torch.bool, device=x.q.device)
    return selected_attention(x, every, SIZES).out


def selected_attention(x: LayerInputs, selected: Tensor, sizes: BlockSizes) -> SparseAttention:
    """Computes the attention of a layer over the selected blocks.

    ``selected [B | 1, Hq | Hkv | 1, Tr, Tc]`` is a bool block mask or its bits for
    ``block_sparse_attention``, or uint8 zooms for ``multiscale_attention``.
    """
    if selected.dtype == torch.uint8:
        return with_sinks(
            x,
            multiscale_attention(
                x.q, x.k, x.v, selected, block_size=sizes.queries, **score_options(x)
            ),
        )
    return with_sinks(
        x,
        block_sparse_attention(x.q, x.k, x.v, selected, **sizes.arguments, **score_options(x)),
    )


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
    cap = None if x.scoring.softcap is None else softcap(x.scoring.softcap)
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

"""Attention of a tapped layer whose scores are soft-capped or that has attention sinks, and block maps of any layer.

SDPA computes neither. Each function takes the layer's inputs whole, so that no caller forgets what is done to its scores.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.flash_decode.score_mod import softcap
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.kernels.types import MaxPoolAttention, SparseAttention
from msattn.trainer.models.layer_inputs import LayerInputs

BLOCK = 64


def score_options(x: LayerInputs) -> dict[str, Any]:
    """Returns the arguments of operations that say how scores are computed and masked: scale, softcap, padding."""
    return {"scale": x.scale, "softcap": x.softcap, "kv_start": x.kv_start}


def with_sinks(x: LayerInputs, state: SparseAttention) -> SparseAttention:
    """Adds the layer's attention sinks to the softmax of a result; a sink counts as attention mass that is always read."""
    return state if x.sinks is None else apply_sinks(state, x.sinks)


def block_map(x: LayerInputs, block_size: int = BLOCK, pool: str = "max") -> MaxPoolAttention:
    """Returns dense attention of a layer and its block map; see :func:`msattn.kernels.maxpool_attention.maxpool_attention`."""
    options: dict[str, Any] = score_options(x) | {"block_size": block_size, "pool": pool, "sinks": x.sinks}
    return maxpool_attention(x.q, x.k, x.v, **options)


def capped_attention(x: LayerInputs) -> SparseAttention:
    """Computes dense attention with soft-capped scores and sinks, differentiable: sparse attention that reads every block."""
    rows, cols = (-(-tokens // BLOCK) for tokens in (x.num_queries, x.num_keys))
    every = torch.ones(1, 1, rows, cols, dtype=torch.bool, device=x.q.device)
    return with_sinks(x, block_sparse_attention(x.q, x.k, x.v, every, block_size=BLOCK, **score_options(x)))


def decoded_attention(x: LayerInputs) -> SparseAttention:
    """Computes dense attention of one new token of each sequence, for inference; ``x.kv_len`` limits the keys."""
    cap = None if x.softcap is None else softcap(x.softcap)
    state = flash_decode(x.q, x.k, x.v, scale=x.scale, score_mod=cap, kv_start=x.kv_start, kv_len=x.kv_len)
    return with_sinks(x, state)


def attention_recall(lse: Tensor, dense_lse: Tensor) -> Tensor:
    """Returns the recall of each head: fp32 ``[H]``, the mean over batch and queries.

    A query reads ``exp(lse - dense_lse)`` of its attention mass, at most 1, where both are fp32 ``[B, H, N]`` over the same
    inputs. Rows whose ``dense_lse`` is -inf (padding) do not count.
    """
    real = dense_lse > -torch.inf
    share = (lse - dense_lse).exp().clamp(max=1).masked_fill(~real, 0)
    return share.sum((0, 2)) / real.sum((0, 2)).clamp(min=1)

"""Attention with scores mixed over heads in PyTorch, and its gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_per_sequence, check_qkv, resolve_scale
from msattn.kernels.common.mta_checks import check_head_weight
from msattn.kernels.reference.mixed_scores import mixed_attention, mixed_attention_backward


class _HeadMixing(NamedTuple):
    """Mixing over heads: ``mixed[h] = sum over g of weight[h, g] * scores[g]``."""

    before: int = 0
    left: int = 0
    right: int = 0

    def forward(self, weight: Tensor, scores: Tensor) -> Tensor:
        return torch.einsum("hg,bgnm->bhnm", weight, scores)

    def backward(self, weight: Tensor, scores: Tensor, dmixed: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("bhnm,bgnm->hg", dmixed, scores), torch.einsum("hg,bhnm->bgnm", weight, dmixed)


def head_mix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.head_mix_attention`.

    It holds the scores of a few queries at a time and is differentiable.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value, or if ``kv_start`` exceeds the number of keys.
    """
    return head_mix_attention_forward(q, k, v, weight, causal=causal, scale=scale, kv_start=kv_start)[0]


def head_mix_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool,
    scale: float | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output of :func:`head_mix_attention` and the LSE of mixed scores."""
    check_qkv(q, k, v)
    check_head_weight(weight, q)
    check_per_sequence("kv_start", kv_start, q)
    return mixed_attention(q, k, v, weight, _HeadMixing(), causal, resolve_scale(scale, q.shape[3]), kv_start)


def head_mix_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and weight."""
    return mixed_attention_backward(dout, q, k, v, weight, out, lse, _HeadMixing(), causal, scale, kv_start)

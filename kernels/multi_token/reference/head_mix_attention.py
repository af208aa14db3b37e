"""Attention with scores mixed over heads in PyTorch, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.multi_token.reference.mixed_scores import (
    Mixing,
    mixed_attention,
    mixed_attention_backward,
)


def head_mix_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Reference of :func:`msattn.head_mix_attention`, with its options; differentiable."""
    return head_mix_attention_forward(q, k, v, weight, **options)[0]


def head_mix_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns the output of :func:`head_mix_attention` and the LSE of mixed scores."""
    return mixed_attention(q, k, v, weight, MIXING, **options)


def head_mix_attention_backward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and weight."""
    return mixed_attention_backward(mixing=MIXING, **arguments)


def _mix(weight: Tensor, scores: Tensor) -> Tensor:
    """Returns ``mixed[h] = sum over g of weight[h, g] * scores[g]``."""
    return torch.einsum("hg,bgnm->bhnm", weight, scores)


def _mix_backward(weight: Tensor, scores: Tensor, dmixed: Tensor) -> tuple[Tensor, Tensor]:
    return torch.einsum("bhnm,bgnm->hg", dmixed, scores), torch.einsum(
        "hg,bhnm->bgnm", weight, dmixed
    )


MIXING = Mixing(_mix, _mix_backward)

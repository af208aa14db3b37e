"""Attention with convolved scores in PyTorch, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.multi_token.checks import key_taps_after, key_taps_before
from msattn.kernels.multi_token.reference.mixed_scores import (
    Mixing,
    mixed_attention,
    mixed_attention_backward,
)


def conv_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Reference of :func:`msattn.conv_attention`, with its options; differentiable."""
    return conv_attention_forward(q, k, v, weight, **options)[0]


def conv_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    mask: str = "query",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the output of :func:`conv_attention` and the LSE of convolved scores."""
    return mixed_attention(
        q, k, v, weight, _convolution(weight, causal, mask), causal=causal, **options
    )


def conv_attention_backward(
    *, weight: Tensor, causal: bool, mask: str, **others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and weight."""
    return mixed_attention_backward(
        weight=weight, mixing=_convolution(weight, causal, mask), causal=causal, **others
    )


def _convolution(weight: Tensor, causal: bool, mask: str) -> Mixing:
    """Returns the convolution of each head,
    ``mixed[i, j] = sum over a, b of weight[a, b] * scores[i + a, j + b]``.

    With ``mask="key"`` the sum leaves out keys after query i of the output. The last row of
    ``mixed`` sees all columns, as a chunk's keys end with its last query.
    """
    key_mask, before = causal and mask == "key", key_taps_before(weight)

    def counted(mixed: Tensor, b: int) -> Tensor:
        return mixed.tril(mixed.shape[3] - mixed.shape[2] + before - b) if key_mask else mixed

    def convolve(weight: Tensor, scores: Tensor) -> Tensor:
        shifted = _shifted_scores(weight, scores)
        mixed = torch.zeros_like(shifted[0][2])
        for a, b, part in shifted:
            mixed = mixed.addcmul(counted(part, b), weight[:, a, b, None, None])
        return mixed

    def convolve_backward(weight: Tensor, scores: Tensor, dmixed: Tensor) -> tuple[Tensor, Tensor]:
        dweight, dscores = torch.zeros_like(weight), torch.zeros_like(scores)
        for (a, b, part), (_, _, dpart) in zip(
            _shifted_scores(weight, scores), _shifted_scores(weight, dscores), strict=True
        ):
            of_tap = counted(dmixed, b)
            dweight[:, a, b] = (of_tap * part).sum((0, 2, 3))
            dpart.addcmul_(of_tap, weight[:, a, b, None, None])
        return dweight, dscores

    return Mixing(
        convolve,
        convolve_backward,
        weight.shape[1] - 1,
        before,
        key_taps_after(weight),
        not key_mask,
    )


def _shifted_scores(weight: Tensor, scores: Tensor) -> list[tuple[int, int, Tensor]]:
    """Returns (a, b, shifted scores) for each tap of the kernel."""
    c_q, c_k = weight.shape[1:]
    n, m = scores.shape[2] - c_q + 1, scores.shape[3] - c_k + 1
    return [(a, b, scores[:, :, a : a + n, b : b + m]) for a in range(c_q) for b in range(c_k)]

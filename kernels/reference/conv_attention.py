"""Attention with convolved scores in PyTorch, and its gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_per_sequence, check_qkv, resolve_scale
from msattn.kernels.common.mta_checks import check_conv_weight, key_taps_after, key_taps_before
from msattn.kernels.reference.mixed_scores import mixed_attention, mixed_attention_backward


class _Convolution(NamedTuple):
    """Convolution of each head.

    ``mixed[i, j] = sum over a, b of weight[a, b] * scores[i + a, j + b]``
    """

    before: int
    left: int
    right: int

    def forward(self, weight: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[2] - self.before, scores.shape[3] - self.left - self.right
        mixed = scores.new_zeros((*scores.shape[:2], *size))
        for a, b, part in self._shifted_scores(scores):
            mixed = mixed.addcmul(part, weight[:, a, b, None, None])
        return mixed

    def backward(self, weight: Tensor, scores: Tensor, dmixed: Tensor) -> tuple[Tensor, Tensor]:
        dweight, dscores = torch.zeros_like(weight), torch.zeros_like(scores)
        for (a, b, part), (_, _, dpart) in zip(self._shifted_scores(scores), self._shifted_scores(dscores), strict=True):
            dweight[:, a, b] = (dmixed * part).sum((0, 2, 3))
            dpart.addcmul_(dmixed, weight[:, a, b, None, None])
        return dweight, dscores

    def _shifted_scores(self, scores: Tensor) -> list[tuple[int, int, Tensor]]:
        """Returns (a, b, shifted scores) for each tap of the kernel."""
        n, m = scores.shape[2] - self.before, scores.shape[3] - self.left - self.right
        taps = [(a, b) for a in range(self.before + 1) for b in range(self.left + self.right + 1)]
        return [(a, b, scores[:, :, a : a + n, b : b + m]) for a, b in taps]


def _convolution(weight: Tensor) -> _Convolution:
    return _Convolution(weight.shape[1] - 1, key_taps_before(weight), key_taps_after(weight))


def conv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.conv_attention`.

    It holds the scores of a few queries at a time and is differentiable.

    Raises
    ------
    ValueError
        If an argument has a wrong shape, dtype or value, or if ``kv_start`` exceeds the number of keys.
    """
    return conv_attention_forward(q, k, v, weight, causal=causal, scale=scale, kv_start=kv_start)[0]


def conv_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool,
    scale: float | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output of :func:`conv_attention` and the LSE of convolved scores."""
    check_qkv(q, k, v)
    check_conv_weight(weight, q)
    check_per_sequence("kv_start", kv_start, q)
    return mixed_attention(q, k, v, weight, _convolution(weight), causal, resolve_scale(scale, q.shape[3]), kv_start)


def conv_attention_backward(
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
    return mixed_attention_backward(dout, q, k, v, weight, out, lse, _convolution(weight), causal, scale, kv_start)

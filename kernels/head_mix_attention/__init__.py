"""Attention whose scores are mixed over heads before the softmax (multi-token attention, head convolution)."""

from msattn.kernels.head_mix_attention.operation import head_mix_attention

__all__ = ["head_mix_attention"]

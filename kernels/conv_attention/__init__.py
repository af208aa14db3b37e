"""Attention whose scores are convolved along queries and keys (multi-token attention, key-query convolution)."""

from msattn.kernels.conv_attention.operation import conv_attention

__all__ = ["conv_attention"]

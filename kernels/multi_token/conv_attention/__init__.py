"""Attention with scores convolved along queries and keys (Multi-Token Attention)."""

from msattn.kernels.multi_token.conv_attention.operation import conv_attention

__all__ = ["conv_attention"]

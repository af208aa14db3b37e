"""Attention with scores mixed over heads (Multi-Token Attention)."""

from msattn.kernels.multi_token.head_mix_attention.operation import head_mix_attention

__all__ = ["head_mix_attention"]

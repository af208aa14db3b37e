"""Attention over key blocks, each read whole or as means of 2, 4 or 8 tokens (multi-scale KV pooling)."""

from msattn.kernels.multiscale_attention.forward import multiscale_attention

__all__ = ["multiscale_attention"]

"""Attention over the key blocks that a mask selects, for each block of queries (SeerAttention, section 3.2)."""

from msattn.kernels.block_sparse_attention.forward import block_sparse_attention

__all__ = ["block_sparse_attention"]

"""Block-sparse attention (SeerAttention, section 3.2)."""

from msattn.kernels.block_sparse_attention.forward import block_sparse_attention

__all__ = ["block_sparse_attention"]

"""Attention mass of each bucket of keys (SAAP, arXiv 2502.08246, section 3)."""

from msattn.kernels.bucket_mass.forward import bucket_mass

__all__ = ["bucket_mass"]

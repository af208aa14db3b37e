"""Attention of a few queries over a long cache (flash decoding)."""

from msattn.kernels.flash_decode.forward import flash_decode

__all__ = ["flash_decode"]

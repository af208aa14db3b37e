"""Multi-scale attention: key blocks read whole or as means (KV pooling)."""

from msattn.kernels.multiscale_attention.forward import multiscale_attention, zoom_of_mask

__all__ = ["multiscale_attention", "zoom_of_mask"]

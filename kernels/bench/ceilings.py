"""What this machine can do at most, measured: one large matrix product, and a copy and a sum of a large buffer."""

from functools import cache

import torch

from msattn.kernels.bench.rows import Rate
from msattn.kernels.bench.timing import time_ms


@cache
def ceilings(device: str, dtype: torch.dtype) -> Rate:
    """Operations a second of a matrix product in ``dtype``, and the faster of copying and reading memory; some seconds."""
    side, size = (1024, 2**26) if device == "cpu" else (8192, 2**31)
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    product = time_ms(lambda: a @ b, device, budget_s=1.0)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = time_ms(lambda: target.copy_(source), device, budget_s=1.0)
    read = time_ms(source.sum, device, budget_s=1.0)
    return Rate(2 * side**3 / product.median / 1e9, max(2 * size / copied.median, size / read.median) / 1e9)

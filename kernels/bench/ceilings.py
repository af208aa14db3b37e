"""Measured roofline ceilings of this machine.

A large matrix product gives the compute ceiling, a copy and a sum of a large buffer the memory ceiling.
"""

from functools import cache

import torch

from msattn.kernels.bench.rows import PeakRates
from msattn.kernels.bench.timing import time_ms


@cache
def ceilings(device: str, dtype: torch.dtype) -> PeakRates:
    """Measures the peak TFLOP/s of a matrix product in ``dtype``, and peak TB/s.

    This takes some seconds; the result is cached. The memory ceiling is the larger bandwidth of a copy (which reads and writes)
    and a sum (which only reads).
    """
    side, size = (1024, 2**26) if device == "cpu" else (8192, 2**31)
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    product = time_ms(lambda: a @ b, device, budget_s=1.0)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = time_ms(lambda: target.copy_(source), device, budget_s=1.0)
    read = time_ms(source.sum, device, budget_s=1.0)
    return PeakRates(2 * side**3 / product.median / 1e9, max(2 * size / copied.median, size / read.median) / 1e9)

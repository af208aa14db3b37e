"""Keys and values of a cache in FP8 (e4m3): a number is ``stored * scale``, with one scale for all
heads or one for each key/value head.
"""

import torch
from torch import Tensor

from msattn.kernels.common.primitives import tl, triton

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
LARGEST_FP16 = tl.constexpr(65504.0)


def quantize(x: Tensor, scale: Tensor | None) -> Tensor:
    """Returns ``x [..., Hkv, T, D]`` as a cache stores it: rounded to even, and saturated."""
    x = x.float() if scale is None else x.float() / scale.view(-1, 1, 1)
    largest = torch.finfo(FP8).max
    return x.clamp(-largest, largest).to(FP8)


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the numbers that ``x [..., Hkv, T, D]`` stores, rounded to ``dtype``."""
    if scale is None:
        return x.to(dtype)
    full = torch.float64 if dtype == torch.float64 else torch.float32
    return (x.to(full) * scale.view(-1, 1, 1)).to(dtype)


def head_stride(scale: Tensor | None) -> int:
    """Returns the distance between the scales of two heads: 0 if all have the same."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


@triton.jit
def to_fp8(x, scale):
    """Quantizes a tile, as :func:`quantize` does.

    It rounds before the conversion, because Triton's interpreter would lose the carry of rounded
    numbers: adding 1.5 times a power of two, and subtracting it again, leaves 3 bits after the
    first one, and multiples of 2^-9 below 2^-6.
    """
    x = tl.clamp(
        tl.div_rn(x.to(tl.float32), scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL
    )
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    shift = 1.5 * (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    return ((x + shift) - shift).to(tl.float8e4nv)


@triton.jit
def queries_of_products(q, stored_ptr):
    """Casts bf16 queries of FP8 keys to fp16, saturated if they are finite.

    GPUs convert two numbers of FP8 to fp16 with one instruction, to bf16 only from there.
    """
    if stored_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float32)
        finite = tl.abs(q) < float("inf")
        q = tl.where(finite, tl.clamp(q, -LARGEST_FP16, LARGEST_FP16), q).to(tl.float16)
    return q


@triton.jit
def load_scale(scale_ptr, kv_head, stride_scale):
    """Loads the scale of a key/value head; 1 without scales."""
    return 1.0 if scale_ptr is None else tl.load(scale_ptr + kv_head * stride_scale)

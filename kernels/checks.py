"""Checks of arguments that every operation shares: plain PyTorch, metadata only, so that nothing here waits for a device.

Values that live on the device (``kv_start``, zoom levels, probes) are not looked at: that would stall the stream. The references,
which run where looking is free, check them.
"""

import math
import os

import torch
from torch import Tensor

from msattn.kernels.types import Backend

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256
BLOCK_SIZES = (16, 32, 64, 128)


def resolve_backend(backend: Backend | None, q: Tensor) -> Backend:
    """The backend that serves ``q``: Triton on CUDA, the reference on CPU, unless one is named.

    Raises
    ------
    ValueError
        For an unknown name, and for ``"triton"`` where it cannot run: fp64 input, or a CPU tensor without the interpreter.
    """
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"backend={backend!r}: expected 'triton', 'torch' or None")
    chosen = backend or ("triton" if q.is_cuda else "torch")
    if chosen == "triton":
        if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' for a tensor on {q.device}: expected a CUDA tensor, or TRITON_INTERPRET=1 set before start"
            )
        if q.dtype not in FLOATS:
            raise ValueError(f"q.dtype={q.dtype}: the Triton kernels take float32, float16 and bfloat16")
    return chosen


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``q [B, Hq, N, D]`` fits ``k, v [B, Hkv, M, D]``: ranks, sizes, head ratio, head size, dtype and device; else ValueError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected 4 dimensions [batch, heads, tokens, head size]")
        if min(x.shape) < 1:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected every size to be at least 1")
        if x.dtype != q.dtype or x.dtype not in (*FLOATS, torch.float64):
            raise ValueError(
                f"{name}.dtype={x.dtype} beside q.dtype={q.dtype}: expected one floating dtype, 16 bits or more"
            )
        if x.device != q.device:
            raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"v.shape={tuple(v.shape)}: expected k's shape, {tuple(k.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's batch size, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's head size, {q.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}: expected a multiple, so that groups of query heads share one"
        )
    if q.shape[3] % 8 or q.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(f"head size {q.shape[3]}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")


def check_per_sequence(name: str, x: Tensor | None, q: Tensor) -> None:
    """``kv_start`` and ``kv_len``: None, or int32 ``[B]`` on q's device; else ValueError."""
    if x is None:
        return
    if x.dtype != torch.int32 or tuple(x.shape) != (q.shape[0],):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 ({q.shape[0]},), one number for each sequence"
        )
    if x.device != q.device:
        raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")


def check_block_size(block_size: int) -> None:
    """Blocks are as long as a tile can be: a power of two from 16 to 128; else ValueError."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}")


def resolve_scale(scale: float | None, head_size: int) -> float:
    """The factor of the scores, ``head_size ** -0.5`` unless given; must be positive (a row's largest score stays its largest)."""
    if scale is None:
        return head_size**-0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r}: expected a positive, finite number")
    return float(scale)


def query_offset(num_queries: int, num_keys: int, causal: bool) -> int:
    """Position of query 0 among the keys.

    Causal attention is bottom-right aligned, so that with more queries than keys the first queries stand before the first key and see
    nothing. Without a causal order all queries see the keys, and positions only say where the padding of a sequence ends.
    """
    offset = num_keys - num_queries
    return offset if causal else max(offset, 0)


def check_layout(**tensors: Tensor) -> None:
    """What the kernels ask of memory: rows are contiguous and everything is aligned to 16 bytes, views welcome; else ValueError.

    For use inside a custom operator: it looks at addresses, which a traced tensor does not have.
    """
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}.stride()={x.stride()}: expected the last dimension to be contiguous")
        apart = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        if x.data_ptr() % 16 or any(stride * x.element_size() % 16 for stride in apart):
            raise ValueError(f"{name}.stride()={x.stride()}, address {x.data_ptr()}: expected rows aligned to 16 bytes")

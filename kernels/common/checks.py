"""Argument checks of all operations, and shape arithmetic that they share with the references.

Checks read metadata only (shapes, dtypes, devices, strides), so that they never wait for a device.
Values that tensors hold (``kv_start``, zoom levels, probes) are checked only by the references,
where reading them is free. Every check raises ValueError with the name of the argument, its value
and what is expected. Checks that a family of operations shares are in
:mod:`~msattn.kernels.common.block_checks`, :mod:`~msattn.kernels.common.bucket_checks`,
:mod:`~msattn.kernels.common.paged_checks` and ``msattn.kernels.multi_token.checks``; those of a
single operation stand in its public function.
"""

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from msattn.kernels.types import Backend

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 512
HAS_TRITON = find_spec("triton") is not None


def resolve_backend(backend: Backend | None, q: Tensor, name: str = "q") -> Backend:
    """Returns the backend for ``q``, an argument called ``name``: the given one, else Triton on
    CUDA, torch on CPU.

    Refuses Triton where it is not installed, for fp64, for a tensor on the CPU without the
    interpreter, and for bf16 with it, since the interpreter multiplies the bits of bf16 numbers as
    integers.
    """
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"backend={backend!r}: expected 'triton', 'torch' or None")
    chosen = backend or ("triton" if q.is_cuda else "torch")
    if chosen == "triton":
        if not HAS_TRITON:
            raise ValueError("backend='triton': triton is not installed, use backend='torch'")
        if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' with {name}.device={q.device}: expected a CUDA tensor, "
                "or TRITON_INTERPRET=1 set before the process starts"
            )
        if q.is_floating_point() and q.dtype not in FLOATS:
            raise ValueError(
                f"{name}.dtype={q.dtype}: the Triton kernels accept float32, float16 and bfloat16"
            )
        if not q.is_cuda and q.dtype == torch.bfloat16:
            raise ValueError(
                f"{name}.dtype={q.dtype}: Triton's interpreter computes it wrongly, use float32, "
                f"float16 or backend='torch'"
            )
    return chosen


def resolve_scale(scale: float | None, head_size: int) -> float:
    """Returns the factor of the scores, ``head_size ** -0.5`` by default.

    It must be positive, since the kernels take maxima of unscaled scores.
    """
    if scale is None:
        return head_size**-0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r}: expected a positive, finite number")
    return float(scale)


def resolve_softcap(softcap: float | None) -> float | None:
    """Returns the limit of soft-capped scores as a float, or None for scores without one.

    It is kept from 1e-20 to 1e20, where a cap makes fp32 scores equal or leaves them as they are,
    so that nothing overflows.
    """
    if softcap is None:
        return None
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap!r}: expected a positive, finite number, or None")
    return min(max(float(softcap), 1e-20), 1e20)


def check_sinks(sinks: Tensor | None, heads: int, x: Tensor) -> None:
    """Checks floating-point ``sinks [Hq]``, one for each query head, on the device of ``x``."""
    if sinks is None:
        return
    if not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks is {sinks.dtype} {tuple(sinks.shape)}: expected floating point ({heads},), "
            f"one per query head"
        )
    check_vector("sinks", sinks)
    check_device("sinks", sinks, "q", x)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums, maxima and LSEs: fp32, or fp64 for fp64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def query_offset(num_queries: int, num_keys: int, causal: bool) -> int:
    """Returns the position of query 0 among the keys.

    Causal attention is bottom-right aligned: with more queries than keys, the first queries are at
    negative positions and see no key. Without causality all queries see all keys, and positions
    only tell which queries are padding.
    """
    offset = num_keys - num_queries
    return offset if causal else max(offset, 0)


def first_query(
    num_queries: int, num_keys: int, kv_start: Tensor | None, device: torch.device
) -> Tensor | None:
    """Returns the first causal query that sees a key, int64 ``[B | 1]``.

    None means query 0 in every sequence.
    """
    if kv_start is None and num_queries <= num_keys:
        return None
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    return (start - (num_keys - num_queries)).clamp(min=0)


def has_aligned_rows(x: Tensor) -> bool:
    """Returns True if rows are contiguous and start at multiples of 16 bytes.

    Reads addresses, which a traced tensor does not have: call it inside a custom operator only.
    """
    row_strides = [
        stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1
    ]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in row_strides)
    )


def aligned_gradient(dout: Tensor) -> Tensor:
    """Returns a gradient that tensor descriptors can read, copied if necessary.

    Autograd may pass an expanded scalar, a transposed tensor, or one that is not aligned to 16
    bytes.
    """
    if has_aligned_rows(dout) and 0 not in dout.stride():
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def check_layout(**tensors: Tensor) -> None:
    """Checks that rows are contiguous and 16-byte aligned, as descriptors require."""
    for name, x in tensors.items():
        if not has_aligned_rows(x):
            raise ValueError(
                f"{name}.stride()={x.stride()}, {name}.data_ptr()={x.data_ptr()}: expected "
                f"contiguous rows aligned to 16 bytes"
            )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks ``q [B, Hq, N, D]`` against ``k, v [B, Hkv, M, D]``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name}.shape={tuple(x.shape)}: expected 4 dimensions [batch, heads, tokens, "
                f"head size]"
            )
        if min(x.shape) < 1:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected every size to be at least 1")
        if x.dtype != q.dtype or x.dtype not in (*FLOATS, torch.float64):
            raise ValueError(
                f"{name}.dtype={x.dtype}, q.dtype={q.dtype}: expected one dtype of float32, "
                f"float16, bfloat16 and float64"
            )
        check_device(name, x, "q", q)
    if k.shape != v.shape:
        raise ValueError(f"v.shape={tuple(v.shape)}: expected k's shape, {tuple(k.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's batch size, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's head size, {q.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, k has {k.shape[1]}: expected q's to be a multiple of k's"
        )
    _check_head_size(q)


def check_tokens(name: str, x: Tensor) -> None:
    """Checks that ``x`` is a floating ``[B, H, T, D]`` with a supported head size."""
    if x.dim() != 4 or min(x.shape) < 1:
        raise ValueError(
            f"{name}.shape={tuple(x.shape)}: expected [batch, heads, tokens, head size], each at "
            f"least 1"
        )
    if x.dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"{name}.dtype={x.dtype}: expected float32, float16, bfloat16 or float64")
    _check_head_size(x)


def check_per_sequence(q: Tensor, **numbers: Tensor | None) -> None:
    """Checks numbers such as ``kv_start`` and ``kv_len``: None, or int32 ``[B]`` on q's device."""
    for name, x in numbers.items():
        if x is not None:
            check_tensor(name, x, torch.int32, (q.shape[0],), "q", q, "one for each sequence")


def check_splits(splits: int | None) -> None:
    """Checks the number of parts that the keys are divided into."""
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r}: expected an integer of at least 1, or None")


def check_no_gradient(name: str, *tensors: Tensor) -> None:
    """Raises NotImplementedError if a gradient of the function called ``name`` would be needed."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{name} is for inference and has no gradient: detach its inputs, or use "
            f"torch.no_grad()"
        )


def check_tensor(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    other_name: str,
    other: Tensor,
    meaning: str = "",
) -> None:
    """Checks dtype, shape and device of ``x``, the device being that of ``other``; ``meaning``
    explains the shape. Vectors of integers must be contiguous.
    """
    if x.dtype != dtype or tuple(x.shape) != tuple(shape):
        expected = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected}{meaning and f', {meaning}'}"
        )
    if not dtype.is_floating_point:
        check_vector(name, x)
    check_device(name, x, other_name, other)


def check_vector(name: str, x: Tensor) -> None:
    """Checks that a 1D tensor is contiguous: kernels read numbers one after the other."""
    if x.dim() == 1 and not x.is_contiguous():
        raise ValueError(f"{name}.stride()={x.stride()}: expected a contiguous tensor")


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Checks that ``x`` is on the device of ``other``."""
    if x.device != other.device:
        raise ValueError(
            f"{name}.device={x.device}: expected {other_name}'s device, {other.device}"
        )


def _check_head_size(x: Tensor) -> None:
    if x.shape[3] % 8 or x.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(f"head size {x.shape[3]}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")

"""Building blocks of the kernels: launch arguments, masking, online softmax.

Kernels count positions from the start of the unpadded sequence: query ``t`` and key ``u`` begin at
0, and causal query ``t`` sees keys ``u <= t + delta``. Scores are kept unscaled. Row statistics are
in base 2 inside a kernel (``scale2 = scale * log2(e)``) and are stored in base e.
"""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msattn.kernels import tuned

if TYPE_CHECKING:
    import triton.language as tl

    # otherwise a type checker reads a launch, kernel[grid](...), as a call of the kernel
    triton: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except (
        ImportError
    ):  # no wheel for this platform: kernels can be defined but not launched; references work

        class _NoTriton:
            def __getattr__(self, name):
                return self

            def __call__(self, *args, **kwargs):
                return self

            def __getitem__(self, grid):
                raise ModuleNotFoundError("triton is not installed: use backend='torch'")

        triton = tl = _NoTriton()

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))
TILE_ELEMENTS = 2048  # elements per program that moves rows
WARP_ELEMENTS = 512  # two 16-byte loads for each thread in 16 bits


# --- on the host ---


def precision(dtype: torch.dtype) -> str:
    """Returns the input precision for ``tl.dot``.

    fp32 inputs are multiplied in full fp32, never TF32. It has no effect on 16-bit inputs.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


def padded_head(head_size: int) -> int:
    """Returns the head size padded for a tile.

    Triton requires a power of two, and ``tl.dot`` at least 16.
    """
    return max(16, 1 << (head_size - 1).bit_length())


def tile_view(x: Tensor, rows: int, cols: int | None = None, heads: int = 1) -> Any:
    """Returns a tensor descriptor of ``x [B, H, T, D]``.

    Its tiles are ``[heads, rows, cols or padded head]``. Loads out of bounds give 0.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Descriptors require strides that are multiples of 16 bytes; the stride of a size-1 dimension
    # is arbitrary in PyTorch.
    strides = [
        stride if size > 1 else 16
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return TensorDescriptor(
        x, list(x.shape), [*strides, 1], [1, heads, rows, cols or padded_head(x.shape[-1])]
    )


def row_tile(channels: int) -> tuple[int, int]:
    """Returns tokens and padded channels of a program of four warps that moves rows of
    ``channels``; each is a power of two.

    They do not depend on the number of tokens, so that a few do not wait for another kernel to
    compile.
    """
    padded = triton.next_power_of_2(channels)
    return max(1, TILE_ELEMENTS // padded), padded


@cache
def num_sms(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors (SMs).

    It is 3 where kernels are interpreted, to keep the number of programs small.
    """
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 3
    )


@cache  # PyTorch takes microseconds, at every launch
def capability(device: torch.device) -> int:
    """Returns the compute capability as an integer, 90 for ``sm_90``.

    It is 80, the oldest supported, where kernels are interpreted.
    """
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def tuned_tile(kernel: str, x: Tensor) -> tuned.Tile:
    """Returns the tile of a kernel for the heads ``x [..., D]``."""
    return tuned.pick(kernel, padded_head(x.shape[-1]), x.dtype, capability(x.device))


def pdl_args(device: torch.device) -> dict[str, bool]:
    """Launch arguments for programmatic dependent launch (sm_90 and later)."""
    supported = capability(device) >= 90
    return {"PDL": supported, "launch_pdl": supported}


# --- on the device ---


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Waits for the results of the preceding kernel.

    Call it before the first load of them, and before any store.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Lets the dependent kernel start on free SMs, where it waits.

    Call it after :func:`pdl_wait`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]


@triton.jit
def sequence_span(kv_start_ptr, b, num_queries, num_keys, offset):
    """Returns the bounds of sequence b without its left padding.

    They are the first key, the first query, the number of keys, the number of queries, and
    ``delta`` (see the module docstring). ``offset`` is the position of query 0, from
    :func:`msattn.kernels.common.checks.query_offset`.
    """
    first_key = tl.zeros((), tl.int32)
    if kv_start_ptr is not None:
        first_key = tl.load(kv_start_ptr + b)
    first_query = tl.minimum(tl.maximum(first_key - offset, 0), num_queries)
    return (
        first_key,
        first_query,
        tl.maximum(num_keys - first_key, 0),
        num_queries - first_query,
        tl.maximum(offset - first_key, 0),
    )


@triton.jit
def load_tile(desc, b, h, row, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Loads the tile ``[ROWS, COLS]`` of head h of sequence b that starts at ``row``."""
    return tl.reshape(desc.load([b, h, row, 0]), [ROWS, COLS])


@triton.jit
def load_rows(row_ptrs, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Loads the rows at ``row_ptrs [ROWS]`` as a tile ``[ROWS, COLS]``."""
    d = tl.arange(0, COLS)
    mask = None if HEAD == COLS else (d < HEAD)[None, :]
    return tl.load(row_ptrs[:, None] + d[None, :], mask=mask, other=None if HEAD == COLS else 0.0)


@triton.jit
def mask_scores(s, t, u, num_keys, delta, CAUSAL: tl.constexpr):
    """Masks scores ``s [BM, BN]`` of queries t and keys u with -inf.

    A score is masked if its key does not exist or, if causal, comes after the query.
    """
    seen = (u < num_keys)[None, :]
    if CAUSAL:
        seen = seen & (u[None, :] <= t[:, None] + delta)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def softmax_step(s, s_max, v, m, l, acc, scale2, PRECISION: tl.constexpr):
    """Accumulates a tile of keys into the online softmax.

    ``s [BM, BN]`` are scores, ``s_max [BM]`` their row maxima, ``v [BN, D]`` values. ``m [BM]`` is
    the running maximum (base 2), ``l [BM]`` the running sum, ``acc [BM, D]`` the running output. A
    row without visible keys so far keeps ``m = -inf``, ``l = 0``.
    """
    m_new, p, alpha = softmax_weights(s, s_max, m, scale2)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def softmax_weights(s, s_max, m, scale2):
    """Returns the new running maximum, the weights of a tile relative to it, and the factor of
    older sums.

    Arguments are those of :func:`softmax_step`.
    """
    m_new = tl.maximum(m, s_max * scale2)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
    p = tl.exp2(s * scale2 - base[:, None])
    return m_new, p, tl.exp2(m - base)


@triton.jit
def softmax_finalize(m, l, acc, exists):
    """Returns the normalized output and the base-2 LSE ``[BM]``.

    They are 0 and -inf for rows without visible keys and for rows that do not exist, and NaN if
    ``l`` is, as after a NaN score.
    """
    seen = exists & (l != 0)
    l = tl.where(seen, l, 1.0)
    return tl.where(seen[:, None], acc / l[:, None], 0.0), tl.where(
        seen, m + tl.log2(l), float("-inf")
    )


@triton.jit
def store_rows(
    out_ptr, lse_ptr, out, lse2, b, h, t, first_query,
    q_heads, num_queries, stride_b, stride_h, stride_n,
    HEAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the rows ``t`` of a sequence and their LSEs; see :func:`store_tile`."""
    store_tile(
        out_ptr, out, b, h, t, first_query, num_queries, stride_b, stride_h, stride_n, HEAD, COLS
    )
    i = first_query + t
    i = tl.where(i < num_queries, i, i - num_queries)
    tl.store(
        lse_ptr + (b * q_heads + h).to(tl.int64) * num_queries + i,
        lse2 * LN_2,
        mask=t < num_queries,
    )


@triton.jit
def store_tile(
    ptr,
    tile,
    b,
    h,
    t,
    first,
    total,
    stride_b,
    stride_h,
    stride_n,
    HEAD: tl.constexpr,
    COLS: tl.constexpr,
):
    """Stores the rows ``t`` of a sequence.

    The sequence occupies rows ``first`` to ``total``, the end of the tensor. Rows past its end wrap
    around to the padding before its start and are stored as zeros, so that programs for all
    ``total`` rows initialize the whole output.
    """
    i = first + t
    exists = i < total
    i = tl.where(exists, i, i - total)
    d = tl.arange(0, COLS)
    rows = (
        ptr
        + b.to(tl.int64) * stride_b
        + h.to(tl.int64) * stride_h
        + i.to(tl.int64)[:, None] * stride_n
    )
    tile = tl.where(exists[:, None], tile, 0.0).to(ptr.dtype.element_ty)
    tl.store(rows + d[None, :], tile, mask=(t < total)[:, None] & (d < HEAD)[None, :])


@triton.jit
def load_lse2(lse_ptr, t, queries):
    """Loads base-2 LSEs ``[BM]`` to recompute P.

    They are +inf, which makes P 0, for rows without visible keys and for rows that do not exist.
    """
    lse = tl.load(lse_ptr + t, mask=t < queries, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * (1.0 / LN_2))

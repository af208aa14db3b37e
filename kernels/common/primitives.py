"""Jitted pieces that several kernels share: where a sequence lies, the online softmax, storing rows, and their launch.

Inside a kernel everything is counted from the start of the unpadded sequence: query ``t`` and key ``u`` run from 0, and
causal query ``t`` sees keys ``u <= t + delta``. Scores stay unscaled; statistics are in base 2 (``scale2 = scale *
log2(e)``) and leave the kernels in base e.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

    triton: Any = None  # else a checker takes a launch, kernel[grid](...), for a call of the kernel
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # no wheel for this platform: the references serve; kernels are defined but cannot be launched

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


# --- on the host ---


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies: fp32 in full fp32, never TF32; 16-bit inputs have one way only."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded_head(head_size: int) -> int:
    """Columns of a tile that holds a head: the power of two that Triton wants, at least the 16 that ``tl.dot`` wants."""
    return max(16, 1 << (head_size - 1).bit_length())


def tile_view(x: Tensor, rows: int, cols: int | None = None, heads: int = 1) -> Any:
    """Descriptor that reads ``x [B, H, T, D]`` in tiles ``[heads, rows, cols or padded head]``; what lies outside is 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A dimension of size 1 may have any stride; a descriptor wants multiples of 16 bytes everywhere.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, heads, rows, cols or padded_head(x.shape[-1])])


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; a handful of programs where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def capability(device: torch.device) -> int:
    """Compute capability as in ``sm_90``; the oldest that is served where kernels are interpreted."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def pdl_args(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel that gets ready while the one before it ends, where the GPU can: programmatic dependent launch."""
    can = capability(device) >= 90
    return {"PDL": can, "launch_pdl": can}


# --- on the device ---


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Until the results of the kernel before are there. Comes before anything that reads them, or writes."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """From here on the next kernel may come, to the room that is left, and wait. Comes after :func:`pdl_wait`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]


@triton.jit
def sequence_span(kv_start_ptr, b, num_queries, num_keys, offset):
    """Where sequence b lies: first key, first query, number of keys, number of queries, delta (see the module's docstring).

    ``offset`` is the position of the first given query (checks.query_offset).
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
    """Tile ``[ROWS, COLS]`` of head h of sequence b, from the given row on."""
    return tl.reshape(desc.load([b, h, row, 0]), [ROWS, COLS])


@triton.jit
def mask_scores(s, t, u, num_keys, delta, CAUSAL: tl.constexpr):
    """Scores ``s [BM, BN]`` of queries t and keys u, -inf where the key does not exist or, if causal, comes after the query."""
    seen = (u < num_keys)[None, :]
    if CAUSAL:
        seen = seen & (u[None, :] <= t[:, None] + delta)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def softmax_step(s, s_max, v, m, l, acc, scale2, PRECISION: tl.constexpr):
    """One step of the online softmax: scores ``s [BM, BN]`` with row maxima ``s_max [BM]``, values ``v [BN, D]``.

    ``m``, ``l [BM]`` are the running maximum (base 2) and sum, ``acc [BM, D]`` the running output. A row that has seen
    nothing yet keeps ``m = -inf``, ``l = 0``.
    """
    m_new = tl.maximum(m, s_max * scale2)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
    p = tl.exp2(s * scale2 - base[:, None])
    alpha = tl.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def softmax_end(m, l, acc, exists):
    """Normalised output and base-2 LSE ``[BM]``; 0 and -inf for rows that saw nothing or do not exist."""
    seen = exists & (l > 0)
    l = tl.where(seen, l, 1.0)
    return tl.where(seen[:, None], acc / l[:, None], 0.0), tl.where(seen, m + tl.log2(l), float("-inf"))


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    lse2,
    b,
    h,
    t,
    first_query,
    q_heads,
    num_queries,
    stride_b,
    stride_h,
    stride_n,
    HEAD: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write the rows ``t`` of a sequence and their LSEs; see :func:`store_tile`."""
    store_tile(out_ptr, out, b, h, t, first_query, num_queries, stride_b, stride_h, stride_n, HEAD, COLS)
    i = first_query + t
    i = tl.where(i < num_queries, i, i - num_queries)
    tl.store(lse_ptr + (b * q_heads + h).to(tl.int64) * num_queries + i, lse2 * LN_2, mask=t < num_queries)


@triton.jit
def store_tile(ptr, tile, b, h, t, first, total, stride_b, stride_h, stride_n, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Write the rows ``t`` of a sequence that starts at ``first`` and ends with the tensor, at ``total``.

    Rows past its end wrap around, as zeros, to the padding before its start: programs for every row write it all.
    """
    i = first + t
    exists = i < total
    i = tl.where(exists, i, i - total)
    d = tl.arange(0, COLS)
    rows = ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + i.to(tl.int64)[:, None] * stride_n
    tile = tl.where(exists[:, None], tile, 0.0).to(ptr.dtype.element_ty)
    tl.store(rows + d[None, :], tile, mask=(t < total)[:, None] & (d < HEAD)[None, :])


@triton.jit
def load_lse2(lse_ptr, t, queries):
    """Base-2 LSEs ``[BM]`` for making P again; ``+inf``, so that P is 0, for rows that saw nothing or do not exist."""
    lse = tl.load(lse_ptr + t, mask=t < queries, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * (1.0 / LN_2))

"""Elementwise work of a decoder layer between its matrix products, for inference.

A decoding step of an eager model launches about 20 elementwise kernels per layer, each of which
takes longer to launch than to run. These functions launch one kernel each, and round exactly where
the modules of transformers do::

    rms_norm            round(round(x * rsqrt(mean(x^2) + eps)) * weight)
    gated_silu          round(round(silu(gate)) * up)
    rotate_and_append   round(round(x * cos) + round(rotate_half(x) * sin)) for q and k;
                        k and v are written to the cache

They are plain functions of tensors, not registered operations. The plain PyTorch form of each is in
this file too.

Tiles: BR rows, BD columns of a row, BN elements or tokens, BH half a head. Prefixes: o_ offset, m_
mask, b_ tile. Grids: (rows), (row and block of it), (tokens and head, sequence).
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from msattn.kernels.common.checks import (
    FLOATS,
    check_device,
    check_no_gradient,
    check_qkv,
    check_tensor,
    resolve_backend,
)
from msattn.kernels.common.primitives import (
    WARP_ELEMENTS,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    tl,
    triton,
)
from msattn.kernels.types import Backend

MAX_ROW = 2**14  # elements: one program holds a whole row
# up to here small tiles use more SMs; beyond, large tiles start fewer programs
MAX_SMALL_TILE_ELEMENTS = 2**20
SMALL_TILE, LARGE_TILE = 512, 4096
TOKENS = 16  # tokens of a head per program


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None) -> Tensor:
    """Normalizes rows ``x [..., D]`` by their root mean square, as LlamaRMSNorm in transformers.

    ``x`` is fp32, fp16 or bf16, D up to 16384. Rows with regular strides are not copied, such as
    the heads of a fused projection. ``weight [D]``, in x's dtype, is a parameter: the kernel may
    load it while the kernel launched before is still running, so it must not be that kernel's
    output. The result is contiguous on the Triton backend. Raises ValueError for an invalid
    argument, NotImplementedError if a gradient is required.
    """
    check_no_gradient("rms_norm", x, weight)
    if x.dtype not in FLOATS or x.dim() < 1 or not 1 <= x.shape[-1] <= MAX_ROW:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}: expected float32, float16 or bfloat16 [..., D], D "
            f"from 1 to {MAX_ROW}"
        )
    check_tensor("weight", weight, x.dtype, x.shape[-1:], "x", x)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps!r}: expected a finite number, 0 or more")
    if resolve_backend(backend, x, "x") == "triton":
        with torch.cuda.device_of(x):
            return launch_rms_norm(x, weight, eps)
    full = x.float()
    return weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated_silu(gate: Tensor, up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Computes ``silu(gate) * up``, the gated activation of an MLP, of tensors ``[..., F]`` of one
    shape; fp32, fp16 or bf16.

    Rows with regular strides are not copied, such as the halves of a fused projection. The result
    is contiguous on the Triton backend. Raises ValueError for an invalid argument,
    NotImplementedError if a gradient is required.
    """
    check_no_gradient("gated_silu", gate, up)
    if gate.dtype not in FLOATS or gate.dim() < 1:
        raise ValueError(
            f"gate is {gate.dtype} {tuple(gate.shape)}: expected float32, float16 or bfloat16 "
            f"[..., F]"
        )
    check_tensor("up", up, gate.dtype, gate.shape, "gate", gate)
    if resolve_backend(backend, gate, "gate") == "triton":
        with torch.cuda.device_of(gate):
            return launch_gated_silu(gate, up)
    return torch.nn.functional.silu(gate) * up


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | int,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Applies RoPE to the new tokens of each sequence and writes their keys and values to the
    cache.

    RoPE has the half-split layout of transformers, ``x * cos + rotate_half(x) * sin``.
    ``q [B, Hq, N, D]``, ``k`` and ``v [B, Hkv, N, D]`` are before RoPE, fp32, fp16 or bf16 (fp64 on
    the torch backend); strided views are not copied. ``cos`` and ``sin``, ``[B | 1, N, D]`` in q's
    dtype, have both halves filled, as the rotary embedding of a model returns them. The cache,
    ``keys`` and ``values [B, Hkv, capacity, D]``, is written from ``position`` on, an int, or int64
    ``[1]`` on q's device, and not at all at positions outside it; with a tensor a captured CUDA
    graph serves any position.

    Returns the queries after RoPE, of one token after another in memory: ``[B, N, Hq, D]``,
    transposed. Raises ValueError for an invalid argument, NotImplementedError if a gradient is
    required.
    """
    check_no_gradient("rotate_and_append", q, k, v, cos, sin, keys, values)
    check_qkv(q, k, v)
    (batch, heads, tokens, head), dtype = k.shape, q.dtype
    if q.shape[2] != tokens:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected {tokens} tokens, as k")
    for name, x in (("cos", cos), ("sin", sin)):
        if (
            x.dtype != dtype
            or x.dim() != 3
            or x.shape[0] not in (batch, 1)
            or x.shape[1:] != (tokens, head)
        ):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: expected {dtype} [{batch} or 1, {tokens}, "
                f"{head}]"
            )
        check_device(name, x, "q", q)
    for name, x in (("keys", keys), ("values", values)):
        if (
            x.dtype != dtype
            or x.dim() != 4
            or x.shape[:2] != (batch, heads)
            or x.shape[2] < 1
            or x.shape[3] != head
        ):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: expected {dtype} [{batch}, {heads}, 1 or "
                f"more, {head}]"
            )
        check_device(name, x, "q", q)
    if values.shape != keys.shape:
        raise ValueError(
            f"values.shape={tuple(values.shape)}: expected that of keys, {tuple(keys.shape)}"
        )
    if isinstance(position, Tensor):
        check_tensor("position", position, torch.int64, (1,), "q", q)
    if resolve_backend(backend, q) == "triton":
        with torch.cuda.device_of(q):
            return launch_rotate_and_append(q, k, v, cos, sin, keys, values, position)
    cos, sin = cos[:, None], sin[:, None]
    at = torch.arange(q.shape[2], device=q.device) + position
    inside = (at >= 0) & (at < keys.shape[2])
    for cache, x in ((keys, _apply_rope(k, cos, sin)), (values, v)):
        cache[:, :, at[inside]] = x[:, :, inside]
    return _apply_rope(q, cos, sin).transpose(1, 2).contiguous().transpose(1, 2)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launches the kernel; the grid depends only on shapes."""
    out = x.new_empty(x.shape)
    cols = x.shape[-1]
    rows, padded = x.numel() // cols, triton.next_power_of_2(cols)
    rows_each = max(1, _tile_elements(x) // padded)
    x, *layout = _row_layout(x)
    if rows:
        _rms_norm_kernel[(triton.cdiv(rows, rows_each),)](
            x, weight, out, eps, rows, *layout, weight.stride(0),
            COLS=cols, BR=rows_each, BD=padded,
            num_warps=min(16, max(1, rows_each * padded // WARP_ELEMENTS)),
            **pdl_args(x.device),
        )  # fmt: skip
    return out


def launch_gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Launches the kernel; the grid depends only on shapes."""
    out, tile = gate.new_empty(gate.shape), _tile_elements(gate)
    if not gate.numel():
        return out
    rows, cols = 1, gate.numel()  # contiguous tensors are one long row
    inner, gate_strides, up_strides = 1, (0, 0), (0, 0)
    if not (gate.is_contiguous() and up.is_contiguous()):
        rows, cols = cols // gate.shape[-1], gate.shape[-1]
        gate, inner, *gate_strides = _row_layout(gate)
        up, _, *up_strides = _row_layout(up)
    blocks = triton.cdiv(cols, tile)
    _gated_silu_kernel[(rows * blocks,)](
        gate, up, out, cols, blocks, inner, *gate_strides, *up_strides,
        BN=tile, num_warps=tile // WARP_ELEMENTS, **pdl_args(gate.device),
    )  # fmt: skip
    return out


def launch_rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | int,
) -> Tensor:
    """Launches the kernel; the grid depends only on shapes."""
    (batch, q_heads, tokens, head), (kv_heads, capacity) = q.shape, keys.shape[1:3]
    out = q.new_empty((batch, tokens, q_heads, head)).transpose(1, 2)
    on_device, start = (position, 0) if isinstance(position, Tensor) else (None, position)
    rows = min(TOKENS, triton.next_power_of_2(tokens))
    # Without fused multiply-adds, which would round once where eager PyTorch rounds twice in fp32.
    _rotate_and_append_kernel[((q_heads + kv_heads) * triton.cdiv(tokens, rows), batch)](
        q, k, v, cos, sin, keys, values, on_device, out,
        q_heads, q_heads + kv_heads, tokens, capacity, start,
        *q.stride(), *k.stride(), *v.stride(),
        *(stride for x in (cos, sin) for stride in (x.stride(0) if len(x) > 1 else 0,
            *x.stride()[1:])),
        *keys.stride(), *values.stride(), *out.stride()[:3],
        HALF=head // 2, BH=triton.next_power_of_2(head // 2), BN=rows,
        num_warps=1 if rows == 1 else 4, enable_fp_fusion=False,
        **pdl_args(q.device),
    )  # fmt: skip
    return out


def _tile_elements(x: Tensor) -> int:
    return SMALL_TILE if x.numel() <= MAX_SMALL_TILE_ELEMENTS else LARGE_TILE


def _row_layout(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Returns ``x [..., D]``, the length of its inner dimension, its outer and its inner stride.

    Row r starts at ``r // inner * outer_stride + r % inner * inner_stride``. A tensor that is not
    laid out so is copied. Tensors of one shape have the same ``inner``.
    """
    dims = [
        (size, stride)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        if size > 1
    ]
    *outer, (inner, inner_stride) = dims or [(1, 0)]
    regular = all(before == size * stride for (_, before), (size, stride) in pairwise(outer))
    if not regular or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return _row_layout(x.contiguous())
    return x, inner, outer[-1][1] if outer else 0, inner_stride


@triton.jit(do_not_specialize=["rows", "inner"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, rows, inner, stride_outer, stride_inner, stride_weight,
    COLS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, o_d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    m_d = o_d < COLS
    mask = (row < rows)[:, None] & m_d[None, :]
    o_row = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner
    # Before the wait, as parameters are not written by the kernel before.
    b_weight = tl.load(weight_ptr + o_d * stride_weight, mask=m_d, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    # [BR, BD]
    b_x = tl.load(x_ptr + o_row[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(b_x * b_x, 1) / COLS + eps)
    b_x = (b_x * factor[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    b_out = (b_x * b_weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * COLS + o_d[None, :], b_out, mask=mask)


@triton.jit(do_not_specialize=["blocks", "inner"])
def _gated_silu_kernel(
    gate_ptr, up_ptr, out_ptr, cols, blocks, inner,
    stride_gate_outer, stride_gate_inner, stride_up_outer, stride_up_inner,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_outer, i_inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    col = block.to(tl.int64) * BN + tl.arange(0, BN)
    mask = col < cols
    gate_ptr += i_outer * stride_gate_outer + i_inner * stride_gate_inner
    up_ptr += i_outer * stride_up_outer + i_inner * stride_up_inner
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    b_gate = tl.load(gate_ptr + col, mask=mask, other=0.0)
    b_up = tl.load(up_ptr + col, mask=mask, other=0.0)
    b_gate = b_gate.to(tl.float32)
    b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(gate_ptr.dtype.element_ty)
    b_out = (b_silu.to(tl.float32) * b_up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * cols + col, b_out, mask=mask)


@triton.jit(do_not_specialize=["q_heads", "heads", "tokens", "capacity", "start"])
def _rotate_and_append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, position_ptr, out_ptr, q_heads,
    heads, tokens, capacity, start,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_cos_b, stride_cos_n, stride_cos_d, stride_sin_b, stride_sin_n, stride_sin_d,
    stride_keys_b, stride_keys_h, stride_keys_m, stride_keys_d,
    stride_values_b, stride_values_h, stride_values_m, stride_values_d,
    stride_out_b, stride_out_h, stride_out_n,
    HALF: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotates some tokens of a query head, or rotates keys and copies them and their values to the
    cache.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    head, batch = tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) // heads * BN + tl.arange(0, BN)
    o_n, o_d = n.to(tl.int64)[:, None], tl.arange(0, BH)[None, :]
    mask = (n < tokens)[:, None] & (o_d < HALF)
    cos_ptrs = cos_ptr + batch * stride_cos_b + o_n * stride_cos_n + o_d * stride_cos_d
    sin_ptrs = sin_ptr + batch * stride_sin_b + o_n * stride_sin_n + o_d * stride_sin_d
    cos_first, cos_second = _halves(cos_ptrs, HALF * stride_cos_d, mask)
    sin_first, sin_second = _halves(sin_ptrs, HALF * stride_sin_d, mask)
    if head < q_heads:
        q_ptrs = (
            q_ptr
            + batch * stride_qb
            + head.to(tl.int64) * stride_qh
            + o_n * stride_qn
            + o_d * stride_qd
        )
        q_first, q_second = _halves(q_ptrs, HALF * stride_qd, mask)
        q_first, q_second = _rotated(
            q_first, q_second, cos_first, cos_second, sin_first, sin_second
        )
        out_ptrs = out_ptr + batch * stride_out_b + head * stride_out_h + o_n * stride_out_n + o_d
        tl.store(out_ptrs, q_first, mask=mask)
        tl.store(out_ptrs + HALF, q_second, mask=mask)
    else:
        kv_head = (head - q_heads).to(tl.int64)
        position = o_n + start
        if position_ptr is not None:
            position = o_n + tl.load(position_ptr)
        k_ptrs = k_ptr + batch * stride_kb + kv_head * stride_kh + o_n * stride_kn + o_d * stride_kd
        v_ptrs = v_ptr + batch * stride_vb + kv_head * stride_vh + o_n * stride_vn + o_d * stride_vd
        k_first, k_second = _halves(k_ptrs, HALF * stride_kd, mask)
        v_first, v_second = _halves(v_ptrs, HALF * stride_vd, mask)
        k_first, k_second = _rotated(
            k_first, k_second, cos_first, cos_second, sin_first, sin_second
        )
        m_write = mask & (position >= 0) & (position < capacity)
        keys_ptrs = keys_ptr + batch * stride_keys_b + kv_head * stride_keys_h
        keys_ptrs += position * stride_keys_m + o_d * stride_keys_d
        values_ptrs = values_ptr + batch * stride_values_b + kv_head * stride_values_h
        values_ptrs += position * stride_values_m + o_d * stride_values_d
        tl.store(keys_ptrs, k_first, mask=m_write)
        tl.store(keys_ptrs + HALF * stride_keys_d, k_second, mask=m_write)
        tl.store(values_ptrs, v_first, mask=m_write)
        tl.store(values_ptrs + HALF * stride_values_d, v_second, mask=m_write)


@triton.jit
def _halves(ptrs, half, mask):
    """Loads both halves of heads."""
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + half, mask=mask, other=0.0)


@triton.jit
def _rotated(x_first, x_second, cos_first, cos_second, sin_first, sin_second):
    """Returns both halves of heads after RoPE, in their dtype."""
    return (
        (_rounded_product(x_first, cos_first) - _rounded_product(x_second, sin_first)).to(
            x_first.dtype
        ),
        (_rounded_product(x_second, cos_second) + _rounded_product(x_first, sin_second)).to(
            x_first.dtype
        ),
    )


@triton.jit
def _rounded_product(x, y):
    """Returns the product in fp32, rounded to the dtype of x."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)

"""Copies the keys or values of one sequence from a paged cache, for kernels over contiguous ones.

By indexing, PyTorch moves single elements, and heads and tokens must be transposed in another copy;
this is one kernel that copies rows.

A plain function of tensors, no registered operation; its form in PyTorch is in this file too.
Tiles: BT tokens, BD channels. Prefixes: o_ offset, m_ mask. Grid: (block of tokens, key/value
head).
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_tensor, resolve_backend
from msattn.kernels.common.fp8 import FP8, dequantize, head_stride, load_scale
from msattn.kernels.common.paged_checks import check_scale
from msattn.kernels.common.primitives import (
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    row_tile,
    tl,
    triton,
)
from msattn.kernels.types import Backend


def read_pages(
    stored: Tensor,
    table: Tensor,
    first: int,
    end: int,
    dtype: torch.dtype | None = None,
    *,
    stored_scale: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Returns the keys, or values, at positions ``first`` to ``end - 1`` of a sequence:
    ``[Hkv, end - first, D]``.

    ``stored [P, page_size, Hkv, D]`` has any strides; ``table``, int32 ``[pages]``, whose values
    are not checked, are the sequence's pages. Numbers in FP8 are multiplied by ``stored_scale``,
    one of those of :class:`~msattn.kernels.types.PagedKeys`, and become ``dtype``, which others
    already have. Raises ValueError for an invalid argument.
    """
    if stored.dim() != 4 or min(stored.shape) < 1:
        raise ValueError(
            f"stored.shape={tuple(stored.shape)}: expected [P, page_size, Hkv, D], each at least 1"
        )
    dtype = dtype or stored.dtype
    if dtype == FP8 or not dtype.is_floating_point or stored.dtype not in (dtype, FP8):
        raise ValueError(f"dtype={dtype}: expected that of the result, of stored {stored.dtype}")
    check_tensor("table", table, torch.int32, (len(table),), "stored", stored)
    capacity = len(table) * stored.shape[1]
    if not 0 <= first < end <= capacity:
        raise ValueError(
            f"first={first}, end={end}: expected 0 <= first < end <= {capacity}, the positions of "
            f"{len(table)} pages"
        )
    if stored_scale is not None and stored.dtype != FP8:
        raise ValueError(f"stored_scale: expected None for stored {stored.dtype}")
    check_scale("stored_scale", stored_scale, stored.shape[2], "stored", stored)
    out = stored.new_empty((stored.shape[2], end - first, stored.shape[3]), dtype=dtype)
    if resolve_backend(backend, out, "stored") == "triton":
        with torch.cuda.device_of(stored):
            launch(stored, table, first, out, stored_scale)
        return out
    pages = table[first // stored.shape[1] : -(-end // stored.shape[1])].long()
    begin = first % stored.shape[1]
    found = stored[pages].flatten(0, 1)[begin : begin + end - first].transpose(0, 1)
    return out.copy_(dequantize(found, stored_scale, dtype) if stored.dtype == FP8 else found)


def launch(stored: Tensor, table: Tensor, first: int, out: Tensor, scale: Tensor | None) -> None:
    """Launches the kernel."""
    heads, tokens, size = out.shape
    rows, padded = row_tile(size)
    _read_kernel[(triton.cdiv(tokens, rows), heads)](
        stored, table.contiguous(), out, scale, first, tokens, *stored.stride(),
        head_stride(scale), PAGE=stored.shape[1], SIZE=size, BT=rows, BD=padded,
        **pdl_args(stored.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "tokens"], do_not_specialize_on_alignment=["table_ptr"])
def _read_kernel(
    stored_ptr, table_ptr, out_ptr, scale_ptr, first, tokens,
    stride_p, stride_s, stride_h, stride_d, stride_scale,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    o_d = tl.arange(0, BD)[None, :]
    m_token, position = token < tokens, first + token
    mask = m_token[:, None] & (o_d < SIZE)
    page = tl.load(table_ptr + position // PAGE, mask=m_token, other=0).to(tl.int64)
    o_token = page * stride_p + position % PAGE * stride_s + head * stride_h
    x = tl.load(stored_ptr + o_token[:, None] + o_d * stride_d, mask=mask)
    if stored_ptr.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32) * load_scale(scale_ptr, head, stride_scale)
    o_out = (head * tokens + token)[:, None] * SIZE + o_d
    tl.store(out_ptr + o_out, x.to(out_ptr.dtype.element_ty), mask=mask)

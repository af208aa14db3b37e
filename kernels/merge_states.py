"""Merges attention over disjoint sets of keys into attention over their union.

    lse = log(sum_s exp(lse_s))        out = sum_s exp(lse_s - lse) * out_s

Layouts: ``outs [S, B, H, N, D]``, ``lses [S, B, H, N]``. A program owns ROWS of the B * H * N rows.
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import FLOATS, check_tensor, resolve_backend, statistics_dtype
from msattn.kernels.common.primitives import padded_head, tl, triton
from msattn.kernels.common.registration import USE_NO_GRAD, register_op
from msattn.kernels.reference import merge_states as reference
from msattn.kernels.types import Backend, SparseAttention


def merge_states(outs: Tensor, lses: Tensor, *, backend: Backend | None = None) -> SparseAttention:
    """Merges normalized attention results of disjoint sets of keys.

    Parameters
    ----------
    outs : Tensor ``[S, B, H, N, D]``
        Partial outputs, fp32, fp16 or bf16 (fp64 on the torch backend).
    lses : Tensor ``[S, B, H, N]``
        Their LSEs: natural logarithms, fp32 (fp64 for fp64). -inf marks a row without visible keys
        in that part; its output is not read.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, H, N, D]``, ``lse [B, H, N]``; 0 and -inf where all parts are empty.

    Raises
    ------
    ValueError
        If an argument is invalid.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    if outs.dim() != 5 or min(outs.shape) < 1 or outs.dtype not in (*FLOATS, torch.float64):
        raise ValueError(
            f"outs is {outs.dtype} {tuple(outs.shape)}: expected a floating-point [parts, batch, "
            "heads, tokens, head size], each size at least 1"
        )
    check_tensor("lses", lses, statistics_dtype(outs), outs.shape[:4], "outs", outs)
    return SparseAttention(*_operator(outs, lses, resolve_backend(backend, outs, name="outs")))


def launch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Launches the kernel."""
    parts, batch, heads, queries, head = outs.shape
    out = outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:])
    cols = padded_head(head)
    rows = max(1, 4096 // cols)
    _merge_states_kernel[(triton.cdiv(batch * heads * queries, rows),)](
        outs, lses, out, lse, *outs.stride(), *lses.stride(),
        parts, batch * heads * queries, heads, queries,
        HEAD=head, COLS=cols, ROWS=rows,
    )  # fmt: skip
    return out, lse


def _empty(outs: Tensor, lses: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


_operator = register_op(
    "merge_states", launch, reference.merge_states, _empty, no_gradient=USE_NO_GRAD
)


@triton.jit
def _merge_states_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    stride_os, stride_ob, stride_oh, stride_on, stride_od,
    stride_ls, stride_lb, stride_lh, stride_ln,
    parts, num_rows, heads, queries,
    HEAD: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    b, h, i = row // (heads * queries), row // queries % heads, row % queries
    d = tl.arange(0, COLS)
    outs_ptr += (b * stride_ob + h * stride_oh + i * stride_on)[:, None] + d[None, :] * stride_od
    lses_ptr += b * stride_lb + h * stride_lh + i * stride_ln

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for _ in tl.range(0, parts):
        part_lse = tl.load(lses_ptr, mask=inside, other=float("-inf"))
        m_new = tl.maximum(m, part_lse)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        weight, alpha = tl.exp(part_lse - base), tl.exp(m - base)
        # outputs of weight 0 are not read; where it is NaN, so is the sum
        needed = inside & (weight > 0)
        part = tl.load(outs_ptr, mask=needed[:, None] & (d < HEAD)[None, :], other=0.0)
        acc = acc * alpha[:, None] + part.to(tl.float32) * weight[:, None]
        l = l * alpha + weight
        m = m_new
        outs_ptr += stride_os
        lses_ptr += stride_ls
    seen = l != 0
    l = tl.where(seen, l, 1.0)
    acc = acc / l[:, None]  # 0 where all parts are empty
    out_ptr += row[:, None] * HEAD + d[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (d < HEAD)[None, :])
    tl.store(lse_ptr + row, tl.where(seen, m + tl.log(l), float("-inf")), mask=inside)

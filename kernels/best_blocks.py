"""Selection of blocks: masked softmax over blocks, best blocks of each row.

    block_softmax(logits)[r, c] = exp(logits[r, c]) / sum over the visible c' of exp(logits[r, c'])
    best_blocks(scores)[r, c]   = c is visible, and in always, or among the counts[r] first blocks,
                                  or scores[r, c] >= threshold * v ** exponent
                                                     * (1 - above / v) ** edge_exponent,
                                  where v > above blocks are visible in r

A program owns a row (:mod:`msattn.kernels.common.best_of_row`).
"""

import math

import torch
from torch import Tensor

from msattn.kernels.common.best_of_row import MAX_COLUMNS, best_of_row, row_options
from msattn.kernels.common.checks import check_device, resolve_backend
from msattn.kernels.common.primitives import LOG2_E, tl, triton
from msattn.kernels.common.registration import register_op
from msattn.kernels.reference import best_blocks as reference
from msattn.kernels.types import Backend


def block_softmax(logits: Tensor, visible: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Computes the softmax over the visible blocks of each row, 0 elsewhere.

    Rows without visible blocks are 0, not NaN.

    Parameters
    ----------
    logits : Tensor ``[B, H, Tr, Tc]``
        fp32 (fp64 on the torch backend), finite, with contiguous rows; up to 65,536 columns on the
        Triton backend.
    visible : Tensor bool ``[B | 1, 1, Tr, Tc]``
        Blocks that enter the softmax.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        Shape and dtype of ``logits``, with respect to which it is differentiable.

    Raises
    ------
    ValueError
        If an argument is invalid.
    """
    backend = resolve_backend(backend, logits, name="logits")
    _check_scores("logits", logits, backend)
    _check_rows("visible", visible, logits, torch.bool, logits.shape[3])
    return _softmax_operator(logits, visible, backend)


def best_blocks(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    always: Tensor,
    *,
    threshold: float = math.inf,
    exponent: float = 0.0,
    edge_exponent: float = 0.0,
    above: float = 0.0,
    backend: Backend | None = None,
) -> Tensor:
    """Selects the ``counts`` best visible blocks of each row.

    Blocks in ``always`` rank first, the others by score. Of blocks with equal scores, the first
    ranks higher.

    Parameters
    ----------
    scores : Tensor ``[B, H, Tr, Tc]``
        fp32 (fp64 on the torch backend), finite, with contiguous rows; up to 65,536 columns on the
        Triton backend.
    counts : Tensor int32 ``[B | 1, 1, Tr, 1]``
        Number of blocks per row, 0 or more. A row with fewer visible blocks selects them all; a row
        with more visible blocks in ``always`` selects all of those.
    visible, always : Tensor bool ``[B | 1, 1, Tr, Tc]``
        Blocks that may be selected, and those of them that must be.
    threshold, exponent, edge_exponent, above : float
        A row with ``v > above`` visible blocks also selects those with a score of at least
        ``threshold * v ** exponent * (1 - above / v) ** edge_exponent``.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    Tensor
        bool ``[B, H, Tr, Tc]``.

    Raises
    ------
    ValueError
        If an argument is invalid.
    """
    backend = resolve_backend(backend, scores, name="scores")
    _check_scores("scores", scores, backend)
    _check_rows("counts", counts, scores, torch.int32, 1)
    _check_rows("visible", visible, scores, torch.bool, scores.shape[3])
    _check_rows("always", always, scores, torch.bool, scores.shape[3])
    return _best_operator(
        scores, counts, visible, always, threshold, exponent, edge_exponent, above, backend
    )


def _check_scores(name: str, x: Tensor, backend: Backend) -> None:
    if x.dim() != 4 or min(x.shape) < 1 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected float32 (or float64) [batch, heads, "
            "row blocks, column blocks], each size at least 1"
        )
    if backend == "triton" and x.shape[3] > MAX_COLUMNS:
        raise ValueError(
            f"{name} has {x.shape[3]} columns: the Triton kernels accept at most {MAX_COLUMNS}"
        )
    _check_contiguous_rows(name, x)


def _check_rows(name: str, x: Tensor, scores: Tensor, dtype: torch.dtype, cols: int) -> None:
    batch, _, rows, _ = scores.shape
    if x.dtype != dtype or tuple(x.shape) not in ((1, 1, rows, cols), (batch, 1, rows, cols)):
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected} [{batch} or 1, 1, {rows}, "
            f"{cols}]"
        )
    check_device(name, x, "scores", scores)
    _check_contiguous_rows(name, x)


def _check_contiguous_rows(name: str, x: Tensor) -> None:
    if x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(
            f"{name}.stride()={x.stride()}: expected contiguous rows (a last stride of 1)"
        )


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


def _softmax_backward(ctx, gradient):
    (probabilities,) = ctx.saved_tensors
    return reference.block_softmax_backward(gradient, probabilities), None, None


def launch_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Launches the softmax kernel."""
    batch, heads, rows, cols = logits.shape
    width = triton.next_power_of_2(cols)
    probabilities = logits.new_empty(logits.shape)
    _block_softmax_kernel[(heads * rows * batch,)](
        logits, visible.view(torch.uint8), probabilities,
        *logits.stride()[:3], *_row_strides(visible), heads, rows, cols, LOG2_E,
        COLS=width, **row_options(width),
    )  # fmt: skip
    return probabilities


def launch_best(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    always: Tensor,
    threshold: float,
    exponent: float,
    edge_exponent: float,
    above: float,
) -> Tensor:
    """Launches the selection kernel."""
    batch, heads, rows, cols = scores.shape
    width = triton.next_power_of_2(cols)
    mask = scores.new_empty(scores.shape, dtype=torch.bool)
    _best_blocks_kernel[(heads * rows * batch,)](
        scores, counts, visible.view(torch.uint8), always.view(torch.uint8), mask.view(torch.uint8),
        *scores.stride()[:3], *_row_strides(counts), *_row_strides(visible), *_row_strides(always),
        heads, rows, cols, threshold, exponent, edge_exponent, above,
        COLS=width, **row_options(width),
    )  # fmt: skip
    return mask


_softmax_operator = register_op(
    "block_softmax", launch_softmax, reference.block_softmax, lambda x, *_: x.new_empty(x.shape)
)
torch.library.register_autograd(_softmax_operator, _softmax_backward, setup_context=_save)
_best_operator = register_op(
    "best_blocks",
    launch_best,
    reference.best_blocks,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.bool),
)


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Returns the strides of sequences and rows of ``x [B | 1, 1, Tr, ...]``."""
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(2)


@triton.jit(do_not_specialize=["heads", "rows"])
def _block_softmax_kernel(
    logits_ptr, visible_ptr, probabilities_ptr, stride_b, stride_h, stride_r, stride_vb, stride_vr,
    heads, rows, cols, log2_e,
    COLS: tl.constexpr,
):  # fmt: skip
    pid, b, h, r = _row(heads, rows)
    c = tl.arange(0, COLS)
    visible = tl.load(visible_ptr + b * stride_vb + r * stride_vr + c, mask=c < cols, other=0) != 0
    s = tl.load(
        logits_ptr + b * stride_b + h * stride_h + r * stride_r + c,
        mask=_load_mask(visible, c, cols),
        other=0.0,
    )
    s = tl.where(visible, s * log2_e, float("-inf"))
    m = tl.max(s, 0)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m))  # -inf - -inf is NaN
    l = tl.sum(p, 0)
    p = tl.where(visible, p / tl.where(l != 0, l, 1.0), 0.0)
    tl.store(probabilities_ptr + pid * cols + c, p, mask=c < cols)


@triton.jit(
    do_not_specialize=[
        "stride_nb",
        "stride_nr",
        "heads",
        "rows",
        "threshold",
        "exponent",
        "edge_exponent",
        "above",
    ]
)
def _best_blocks_kernel(
    scores_ptr, counts_ptr, visible_ptr, always_ptr, mask_ptr,
    stride_b, stride_h, stride_r, stride_nb, stride_nr, stride_vb, stride_vr, stride_ab, stride_ar,
    heads, rows, cols, threshold, exponent, edge_exponent, above, COLS: tl.constexpr,
):  # fmt: skip
    pid, b, h, r = _row(heads, rows)
    c = tl.arange(0, COLS)
    visible = tl.load(visible_ptr + b * stride_vb + r * stride_vr + c, mask=c < cols, other=0) != 0
    always = visible & (
        tl.load(always_ptr + b * stride_ab + r * stride_ar + c, mask=c < cols, other=0) != 0
    )
    score = tl.load(
        scores_ptr + b * stride_b + h * stride_h + r * stride_r + c,
        mask=_load_mask(visible, c, cols),
        other=0.0,
    )
    taken = best_of_row(
        score, visible, always, tl.load(counts_ptr + b * stride_nb + r * stride_nr),
        threshold, exponent, edge_exponent, above,
    )  # fmt: skip
    tl.store(mask_ptr + pid * cols + c, taken.to(tl.uint8), mask=c < cols)


@triton.jit
def _row(heads, rows):
    """Returns the program's row number, and its sequence, head and row block."""
    pid = tl.program_id(0).to(tl.int64)
    return pid, pid // (heads * rows.to(tl.int64)), pid // rows % heads, pid % rows


@triton.jit
def _load_mask(visible, c, cols):
    """Masks columns after the last visible one, in multiples of 16 for wide loads."""
    end = tl.max(tl.where(visible, c + 1, 0), 0)
    return (c < tl.cdiv(end, 16) * 16) & (c < cols)

"""The check at the size that is timed, against the reference in fp64.

A decoding step is compared whole. Of longer prompts the operation runs whole, and its reference, whose memory and time that
bounds, takes the last sequence of the batch and windows of its rows: at the beginning, in the middle and at the end. In a
backward pass only these rows have a gradient of the output, so that the gradients of keys, values and weights are known
everywhere.

An error is that of a whole row, over its size (or the typical one of the 128 rows around it, if that is more): from the first
rows to the last ones values fall by orders of magnitude, and the largest of all would hide what is small. That of an LSE is
absolute.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.bench.cases import Case, Disagreement, Layer, Window, is_float, outputs
from msattn.kernels.bench.eager import BLOCK

FEW = 16  # queries that are compared whole
ROWS = 128  # of a window, a multiple of BLOCK
ROUNDINGS = 8  # of the input's dtype, by which a row may be off; a gradient is off by 2
LEAST = 2**-14  # what fp32 may be off by


def error_at_size(case: Case, backward: bool) -> float | None:
    """Largest error of a row of the outputs, or gradients.

    Returns
    -------
    float or None
        None where the case names no window, or the device's memory does not hold the comparison.

    Raises
    ------
    Disagreement
        If it is more than rounding makes.
    """
    q = case.layers[0][0]
    try:
        if (case.queries or q.shape[2]) <= FEW:
            errors = _errors_of_all(case)
        elif case.window is not None:
            errors = _errors_of_gradients(case, case.window) if backward else _errors_of_windows(case, case.window)
        else:
            return None
        error = max(errors)
    except torch.OutOfMemoryError:
        return None
    if not error <= max(ROUNDINGS * torch.finfo(q.dtype).eps, LEAST):
        setting = f"{case.setting}, " if case.setting else ""
        raise Disagreement(f"{setting}first input {list(q.shape)}: off by {error:.1e} of a row's size")
    return error


def _errors_of_all(case: Case) -> Iterator[float]:
    layer = case.layers[0]
    with torch.no_grad():
        for got, want in zip(outputs(case.call(*layer)), outputs(case.reference(*_exact(layer))), strict=True):
            yield _error(got, want)


def _errors_of_windows(case: Case, window: Window) -> Iterator[float]:
    layer = case.layers[0]
    queries = case.queries or layer[0].shape[2]
    with torch.no_grad():
        results = [x[-1:] for x in outputs(case.call(*layer))]
        last = _last(layer)
        for begin, end in _spans(queries):
            first = max(0, begin - case.context)
            exact = outputs(case.reference(*_exact(window(last, first, end))))
            for got, want in zip(results, exact, strict=True):
                tokens = 1 if got.shape[2] == queries else BLOCK  # a row
                got = got[:, :, begin // tokens : -(-end // tokens)]
                want = want[:, :, (begin - first) // tokens :]
                yield _error(got[..., : want.shape[-1]] if tokens > 1 else got, want)


def _errors_of_gradients(case: Case, window: Window) -> Iterator[float]:
    """Those of the first output's gradients alone, as the backward pass is timed."""
    leaves = [x.detach().requires_grad_() if is_float(x) else x for x in case.layers[0]]
    out = outputs(case.call(*leaves))[0]
    last = [x.requires_grad_() if is_float(x) else x for x in _exact(_last(case.layers[0]))]
    wanted = [x for x in last if is_float(x)]
    exact = [torch.zeros_like(x) for x in wanted]
    dout, generator = torch.zeros_like(out), torch.Generator(out.device).manual_seed(0)
    for begin, end in _spans(out.shape[2]):
        rows = dout[-1:, :, begin:end].normal_(generator=generator)
        first = max(0, begin - case.context)
        of_window = outputs(case.reference(*window(tuple(last), first, end)))[0][:, :, begin - first :]
        for total, part in zip(exact, torch.autograd.grad(of_window, wanted, rows.double()), strict=True):
            total += part
    gradients = torch.autograd.grad(out, [x for x in leaves if is_float(x)], dout)
    for got, want in zip(gradients, exact, strict=True):
        yield _error(got[-1:], want) if got.ndim == 4 else _error(*(x.flatten(1)[None, None] for x in (got, want)))


def _spans(queries: int) -> Iterator[tuple[int, int]]:
    """First row of each window and the end of its rows."""
    for begin in sorted({0, queries // 2 // ROWS * ROWS, (queries - 1) // ROWS * ROWS}):
        yield begin, min(begin + ROWS, queries)


def _last(layer: Layer) -> Layer:
    """The last sequence alone; what sequences share stays."""
    return tuple(x[-1:] if isinstance(x, Tensor) and x.ndim == 4 else x for x in layer)


def _exact(layer: Layer) -> Layer:
    return tuple(x.detach().double() if is_float(x) else x for x in layer)


def _error(got: Tensor, want: Tensor) -> float:
    """Largest error of a row, as the top of this file says; infinite where there is NaN or infinities differ."""
    finite = want.isfinite()
    if got.shape != want.shape or not torch.equal(got[~finite].double(), want[~finite].double()):
        return float("inf")
    if want.ndim == 3:  # LSEs
        errors = (got[finite].double() - want[finite]).abs()
    else:
        errors = torch.stack([_error_of_rows(*rows) for rows in zip(got.split(ROWS, 2), want.split(ROWS, 2), strict=True)])
    return errors.max().nan_to_num(nan=float("inf")).item()


def _error_of_rows(got: Tensor, want: Tensor) -> Tensor:
    """The largest of rows ``[B, H, rows, n]``: an error's length over the row's, or its head's typical if that is more."""
    size = want.norm(dim=3)
    typical = size.square().mean(2, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return ((got.double() - want).norm(dim=3) / size.maximum(typical)).max()

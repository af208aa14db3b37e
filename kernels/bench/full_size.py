"""Comparison with the fp64 reference at the size that is timed.

All results of a decoding step are compared. On a prompt the operation runs on the whole problem. To
limit memory and time, the reference runs on windows of query rows of the last sequence: at the
beginning, in the middle and at the end. In a backward pass the gradient of the output is zero
outside these rows, so that the exact gradients of all keys, values and weights are known.

The error of a row is the norm of the difference, relative to the norm of the row or to the root
mean square norm in its group of 128 rows, whichever is larger. Values decrease by orders of
magnitude from the first rows to the last, so an error relative to the largest value would hide
errors in small ones. The error of an LSE is absolute.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.bench.cases import (
    BenchCase,
    Layer,
    ReferenceMismatch,
    Window,
    is_float,
    outputs,
)
from msattn.kernels.bench.rows import BLOCK

MAX_WHOLE_QUERIES = 16  # up to this number of queries all results are compared
WINDOW_ROWS = 128  # a multiple of BLOCK
# in units of the epsilon of the input's dtype; correct gradients have errors of about 2
TOLERANCE_EPS = 8
FP32_TOLERANCE = 2**-14


def error_at_full_size(case: BenchCase, backward: bool) -> float | None:
    """Returns the largest error of a row of the outputs, or of the gradients.

    It is None if the case has no window, or if the device has too little memory for the comparison.
    Raises ReferenceMismatch if the error exceeds rounding.
    """
    q = case.layers[0][0]
    try:
        if (case.queries or q.shape[2]) <= MAX_WHOLE_QUERIES:
            errors = _whole_errors(case)
        elif case.window is not None:
            errors = (
                _gradient_errors(case, case.window)
                if backward
                else _window_errors(case, case.window)
            )
        else:
            return None
        error = max(errors)
    except torch.OutOfMemoryError:
        return None
    eps = torch.finfo(q.dtype).eps if is_float(q) else 0.0
    if not error <= max(TOLERANCE_EPS * eps, FP32_TOLERANCE):
        setting = f"{case.setting}, " if case.setting else ""
        raise ReferenceMismatch(
            f"{setting}first input {list(q.shape)}: relative error {error:.1e} of a row"
        )
    return error


def _whole_errors(case: BenchCase) -> Iterator[float]:
    layer = case.layers[0]
    with torch.no_grad():
        for actual, expected in zip(
            outputs(case.call(*layer)), outputs(case.reference(*_to_double(layer))), strict=True
        ):
            yield _error(actual, expected)


def _window_errors(case: BenchCase, window: Window) -> Iterator[float]:
    layer = case.layers[0]
    queries = case.queries or layer[0].shape[2]
    with torch.no_grad():
        results = [x[-1:] for x in outputs(case.call(*layer))]
        last = _last_sequence(layer)
        for begin, end in _window_ranges(queries):
            first = max(0, begin - case.context)
            exact = outputs(case.reference(*_to_double(window(last, first, end))))
            for actual, expected in zip(results, exact, strict=True):
                row_tokens = 1 if actual.shape[2] == queries else BLOCK
                actual = actual[:, :, begin // row_tokens : -(-end // row_tokens)]
                expected = expected[:, :, (begin - first) // row_tokens :]
                yield _error(
                    actual[..., : expected.shape[-1]] if row_tokens > 1 else actual, expected
                )


def _gradient_errors(case: BenchCase, window: Window) -> Iterator[float]:
    """Yields the errors of the gradients of the first output, whose pass is timed."""
    leaves = [x.detach().requires_grad_() if is_float(x) else x for x in case.layers[0]]
    out = outputs(case.call(*leaves))[0]
    last = [
        x.requires_grad_() if is_float(x) else x for x in _to_double(_last_sequence(case.layers[0]))
    ]
    wanted = [x for x in last if is_float(x)]
    exact = [torch.zeros_like(x) for x in wanted]
    dout, generator = torch.zeros_like(out), torch.Generator(out.device).manual_seed(0)
    for begin, end in _window_ranges(out.shape[2]):
        rows = dout[-1:, :, begin:end].normal_(generator=generator)
        first = max(0, begin - case.context)
        of_window = outputs(case.reference(*window(tuple(last), first, end)))[0][
            :, :, begin - first :
        ]
        for total, part in zip(
            exact, torch.autograd.grad(of_window, wanted, rows.double()), strict=True
        ):
            total += part
    gradients = torch.autograd.grad(out, [x for x in leaves if is_float(x)], dout)
    for actual, expected in zip(gradients, exact, strict=True):
        if actual.ndim == 4:
            yield _error(actual[-1:], expected)
        else:  # the gradient of a weight, where each head is a row
            yield _error(*(x.flatten(1)[None, None] for x in (actual, expected)))


def _window_ranges(queries: int) -> Iterator[tuple[int, int]]:
    """Yields the first row of each window and the end of its rows."""
    for begin in sorted(
        {0, queries // 2 // WINDOW_ROWS * WINDOW_ROWS, (queries - 1) // WINDOW_ROWS * WINDOW_ROWS}
    ):
        yield begin, min(begin + WINDOW_ROWS, queries)


def _last_sequence(layer: Layer) -> Layer:
    """Returns the inputs of the last sequence; shared tensors stay whole."""
    return tuple(x[-1:] if isinstance(x, Tensor) and x.ndim == 4 else x for x in layer)


def _to_double(layer: Layer) -> Layer:
    return tuple(x.detach().double() if is_float(x) else x for x in layer)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest error of a row; infinite for NaN or differing infinities."""
    finite = expected.isfinite()
    if actual.shape != expected.shape or not torch.equal(
        actual[~finite].double(), expected[~finite].double()
    ):
        return float("inf")
    if expected.ndim == 3:  # LSEs
        errors = (actual[finite].double() - expected[finite]).abs()
    else:
        groups = zip(actual.split(WINDOW_ROWS, 2), expected.split(WINDOW_ROWS, 2), strict=True)
        errors = torch.stack([_error_of_rows(*rows) for rows in groups])
    return errors.max().nan_to_num(nan=float("inf")).item()


def _error_of_rows(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns the largest relative error of rows ``[B, H, rows, n]``."""
    norm = expected.norm(dim=3)
    typical = norm.square().mean(2, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return ((actual.double() - expected).norm(dim=3) / norm.maximum(typical)).max()

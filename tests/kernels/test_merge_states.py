"""Tests of `merge_states`: fp64 agreement, strides."""

import pytest
import torch

from msattn.kernels.merge_states import merge_states
from msattn.kernels.testing import assert_within_budget
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (8, torch.float16),
        (80, torch.float32),
        (128, torch.float16),
        pytest.param(80, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(128, torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_agrees_with_fp64(
    dtype: torch.dtype, head_size: int, backend: Backend, device: str, poisoned: None
) -> None:
    """Some parts are empty, and all parts of the last row."""
    outs = torch.randn(5, 2, 3, 37, head_size, device=device).to(dtype)
    lses = torch.randn(5, 2, 3, 37, device=device) * 3
    lses[3] = lses[..., -1] = -torch.inf
    weights, weights64 = (x.softmax(0).nan_to_num(0)[..., None] for x in (lses, lses.double()))
    exact, eager = (outs.double() * weights64).sum(0), (outs * weights.to(dtype)).sum(0)
    outs[3] = float("nan")  # outputs of an empty part are ignored
    got = merge_states(outs, lses, backend=backend)
    assert got.out.dtype == dtype
    assert_within_budget("out", got.out, exact, eager)
    assert_within_budget("lse", got.lse, lses.double().logsumexp(0), lses.logsumexp(0))
    assert (got.out[:, :, -1] == 0).all()

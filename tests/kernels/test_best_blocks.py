"""Tests of `best_blocks` and `block_softmax`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.best_blocks import best_blocks, block_softmax
from msattn.kernels.testing import assert_within_budget
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS

SHAPES = [(1, 2, 5, 5), (2, 3, 4, 70), (1, 1, 3, 1), (2, 1, 2, 300)]


def causal(batch: int, rows: int, cols: int, device: str) -> Tensor:
    """Returns a causal mask ``[B, 1, Tr, Tc]``; the very first row sees nothing."""
    seen = (
        torch.arange(cols)
        <= torch.arange(rows)[:, None] + cols - rows - torch.arange(batch)[:, None, None] * 3
    )
    seen[0, 0] = False
    return seen[:, None].to(device)


def select_by_sorting(scores: Tensor, counts: Tensor, visible: Tensor, always: Tensor) -> Tensor:
    """Sorts the visible blocks of each row by (always, score, position)."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    batch, heads, rows, _ = scores.shape
    for b in range(batch):
        for h in range(heads):
            for r in range(rows):
                b1 = b % visible.shape[0]
                forced = {
                    c for c in visible[b1, 0, r].nonzero()[:, 0].tolist() if always[b1, 0, r, c]
                }
                row = scores[b, h, r].tolist()
                order = sorted(
                    visible[b1, 0, r].nonzero()[:, 0].tolist(),
                    key=lambda c: (c not in forced, -row[c], c),
                )
                chosen = forced | set(order[: int(counts[b % len(counts), 0, r])])
                mask[b, h, r, list(chosen)] = True
    return mask.to(scores.device)


def random_arguments(
    value: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...], device: str
) -> dict[str, Any]:
    """Returns arguments with scores from ``value``; `always` is the diagonal."""
    batch, _, rows, cols = shape
    visible = causal(batch, rows, cols, device)
    always = visible & (torch.arange(cols, device=device) >= visible.sum(-1, keepdim=True) - 1)
    counts = torch.randint(0, cols + 2, (batch, 1, rows, 1), dtype=torch.int32).to(device)
    return {
        "scores": value(shape).to(device),
        "counts": counts,
        "visible": visible,
        "always": always,
    }


SCORES: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "probabilities": lambda shape: (torch.randn(shape) * 20).softmax(-1),
    "few values": lambda shape: torch.randint(-1, 2, shape).float() * 0.5,  # -0 and 0 among them
    "nothing": torch.zeros,
    "extreme": lambda shape: (
        torch.randn(shape).sign() * torch.finfo(torch.float32).max * (torch.rand(shape) < 0.5)
    ),
    "denormal": lambda shape: torch.randint(0, 4, shape) * 2.0**-149,
}


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "shape"), zip(SCORES, itertools.cycle(SHAPES), strict=False))
def test_agrees_with_sorting(
    kind: str, shape, backend: Backend, device: str, poisoned: None
) -> None:
    arguments = random_arguments(SCORES[kind], shape, device)
    got = best_blocks(**arguments, backend=backend)
    assert got.dtype == torch.bool
    assert torch.equal(got, select_by_sorting(**arguments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "threshold", "exponent", "edge", "above"),
    [
        *(
            ("probabilities", 0.9, *x)
            for x in ((-1.0, 0, 0), (-0.7, -0.5, 3.5), (0.5, 0.7, 67), (-1.3, -0.2, 70))
        ),
        *(("few values", threshold, 0, 0, 0) for threshold in (-4.0, 0.5, 0.0)),
    ],
)
def test_the_threshold_depends_on_the_visible_blocks(
    kind: str,
    threshold: float,
    exponent: float,
    edge: float,
    above: float,
    backend: Backend,
    device: str,
) -> None:
    """Blocks at the threshold are added."""
    arguments = random_arguments(SCORES[kind], (2, 3, 4, 70), device)
    limit = {"threshold": threshold, "exponent": exponent, "edge_exponent": edge, "above": above}
    got = best_blocks(**arguments, **limit, backend=backend)
    seen = arguments["visible"].sum(-1, keepdim=True).double()
    least = (
        threshold
        * seen.clamp(min=1) ** exponent
        * (1 - above / seen).nan_to_num(1).clamp(min=0) ** edge
    )
    reach = (seen > above) & (arguments["scores"] >= least) & arguments["visible"]
    assert torch.equal(got, select_by_sorting(**arguments) | reach)


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=40),
    count=st.integers(0, 41),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 9),
)
def test_any_row(device: str, values: list[float], count: int, backend: Backend, seed: int) -> None:
    scores = torch.tensor(values)[None, None, None]
    generator = torch.Generator().manual_seed(seed)
    visible, always = (
        torch.rand(scores.shape, generator=generator) < share for share in (0.8, 0.1)
    )
    arguments = scores, torch.full((1, 1, 1, 1), count, dtype=torch.int32), visible, always
    chosen = best_blocks(*(x.to(device) for x in arguments), backend=backend)
    assert torch.equal(chosen.cpu(), select_by_sorting(*arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_shared_by_sequences(backend: Backend, device: str) -> None:
    arguments = random_arguments(torch.randn, (3, 2, 4, 9), device)
    shared = {name: x[:1] if name != "scores" else x for name, x in arguments.items()}
    spread = {
        name: x if name == "scores" else x.expand(3, -1, -1, -1) for name, x in shared.items()
    }
    assert torch.equal(
        best_blocks(**shared, backend=backend), best_blocks(**spread, backend=backend)
    )
    one_for_all_heads = shared | {"scores": arguments["scores"][:1, :1].expand(3, 2, -1, -1)}
    assert torch.equal(
        best_blocks(**one_for_all_heads, backend=backend), select_by_sorting(**one_for_all_heads)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2**15, 2**16])
def test_long_rows(columns: int, device: str) -> None:
    arguments = random_arguments(
        lambda shape: (torch.randn(shape) * 4).softmax(-1), (1, 2, 40, columns), device
    )
    assert torch.equal(
        best_blocks(**arguments, backend="triton"), best_blocks(**arguments, backend="torch")
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_agrees_with_fp64(shape, backend: Backend, device: str, poisoned: None) -> None:
    logits = (torch.randn(shape) * 30).to(device)
    visible = causal(shape[0], shape[2], shape[3], device)
    got = block_softmax(logits, visible, backend=backend)
    exact = logits.double().masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
    assert_within_budget("probabilities", got, exact, exact.float())
    assert (got.masked_select(~visible) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_softmax(backend: Backend, device: str) -> None:
    logits = torch.randn(2, 2, 4, 9, device=device, requires_grad=True)
    visible = causal(2, 4, 9, device)
    gradient = torch.randn(logits.shape, device=device)
    (got,) = torch.autograd.grad(block_softmax(logits, visible, backend=backend), logits, gradient)
    plain = logits.masked_fill(~visible, -1e30).softmax(-1) * visible
    (expected,) = torch.autograd.grad(plain, logits, gradient)
    torch.testing.assert_close(got, expected)


def test_refuses_rows_longer_than_a_program_holds(device: str) -> None:
    long = random_arguments(torch.zeros, (1, 1, 1, 2**16 + 1), device)
    assert best_blocks(**long, backend="torch").shape[3] == 2**16 + 1
    with pytest.raises(ValueError, match="65537 columns"):
        best_blocks(**long, backend="triton")

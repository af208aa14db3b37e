"""Tests of `gate_scores` against its definition and against fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels import testing
from msattn.kernels.gate_scores import gate_scores
from msattn.kernels.reference.gate_scores import gate_scores as reference_scores
from msattn.kernels.types import Backend
from tests.kernels.gates import CASES, doubled, pooled, random_arguments
from tests.kernels.shared import BACKENDS


def by_definition(arguments: dict[str, Any], b: int) -> Tensor:
    """Computes sequence ``b`` by the definition, block by block.

    Returns ``[Hg, Tr, Tc]``, where blocks are counted from the sequence's first token.
    """
    a = doubled(arguments)
    block, key_block, (gates, hidden, _) = (
        a["block_size"],
        a["key_block_size"],
        a["query_weight"].shape,
    )
    start = 0 if a["kv_start"] is None else int(a["kv_start"][b])
    k, offset = a["k"][b, :, start:], a["k"].shape[2] - a["q"].shape[2]
    first, shift = max(start - offset, 0), max(offset - start, 0)
    q, means = a["q"][b, :, first:], a.get("mean_weight", 0.0)
    q_rope, k_rope = (a["q_rope"][b, :, first:], a["k_rope"][b, :, start:]) if means else (q, k)
    ways = {"avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}

    def vector(weight: Tensor, parts: list[Tensor], names: list[str], position: int) -> Tensor:
        y = weight @ torch.cat([ways[name](part) for part in parts for name in names])
        if a["inv_freq"] is not None:
            angle = (position * a["inv_freq"]).double()
            y1, y2 = y.chunk(2)
            y = torch.cat(
                [y1 * angle.cos() - y2 * angle.sin(), y2 * angle.cos() + y1 * angle.sin()]
            )
        return y

    rows, cols = -(-q.shape[1] // block), -(-k.shape[1] // key_block)
    scores = torch.zeros(gates, rows, cols, dtype=torch.float64)
    shared = q.shape[0] // gates

    def scores_of_head(h: int) -> None:
        kv_head, ours = h * len(k) // gates, slice(h * shared, (h + 1) * shared)
        blocks = [slice(c * key_block, (c + 1) * key_block) for c in range(cols)]
        keys = [
            vector(a["key_weight"][h], [k[kv_head, own]], a["k_pool"], own.start) for own in blocks
        ]
        mean_keys = [k_rope[kv_head, own].mean(0) for own in blocks]

        def row(r: int, own: slice) -> Tensor:
            query = vector(a["query_weight"][h], [*q[ours, own]], a["q_pool"], shift + r * block)
            seen = (min(shift + own.stop, k.shape[1]) - 1) // key_block + 1
            mean_query = q_rope[ours, own].mean((0, 1))
            logits = (
                torch.stack(keys[:seen]) @ query / hidden**0.5
                + means * torch.stack(mean_keys[:seen]) @ mean_query
            )
            return torch.cat(
                [logits.softmax(0).cpu(), torch.zeros(cols - seen, dtype=torch.float64)]
            )

        for r in range(rows):
            scores[h, r] = row(r, slice(r * block, (r + 1) * block))
        for i in range(max(0, q.shape[1] - block), q.shape[1]) if a.get("last_queries") else ():
            scores[h, -1] = scores[h, -1].maximum(row(rows - 1, slice(i, i + 1)))

    for h in range(gates):
        scores_of_head(h)
    return scores


@pytest.mark.parametrize("last_queries", [False, True], ids=["pooled", "last queries"])
@pytest.mark.parametrize("change", [{}, {"inv_freq": None}], ids=["rope", "no rope"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "several tiles"])
def test_reference_agrees_with_the_definition(
    case: str, change: dict[str, Any], last_queries: bool, device: str
) -> None:
    arguments = random_arguments(case, device) | change | {"last_queries": last_queries}
    got = reference_scores(**pooled(doubled(arguments)))
    for b in range(len(got)):
        expected = by_definition(arguments, b)
        padded = torch.zeros(got.shape[1:], dtype=torch.float64)
        padded[:, : expected.shape[1], : expected.shape[2]] = expected
        torch.testing.assert_close(got[b].cpu(), padded, rtol=1e-10, atol=1e-12)


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last_queries", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_fp64(
    case: str, last_queries: bool, backend: Backend, device: str, poisoned: None
) -> None:
    arguments = random_arguments(case, device) | {"last_queries": last_queries}
    exact, arguments = reference_scores(**pooled(doubled(arguments))), pooled(arguments)
    got = gate_scores(**arguments, backend=backend)
    assert exact.amax(-1).min() < 0.9  # not all rows are one-hot
    eager = reference_scores(**arguments)
    # Logits reach about 30 and are rounded before the exponential.
    testing.assert_within_budget("scores", got, exact, eager, term=30.0)
    assert torch.equal(got == 0, exact.float() == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "several tiles"])
def test_least_scores_of_columns(case: str, backend: Backend, device: str, poisoned: None) -> None:
    drawn = random_arguments(case, device)
    plain, arguments = reference_scores(**pooled(doubled(drawn))), pooled(drawn)
    columns = 0.5 * torch.rand(plain.shape[:2] + plain.shape[3:], device=device).square()
    seen = plain > 0  # visible ones have no probability of 0
    expected = plain.maximum(columns.double()[:, :, None]) * seen
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(
        gate_scores(**arguments, columns=columns, backend=backend).double(),
        expected,
        rtol=1e-3,
        atol=1e-6,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["padding", "more keys", "more queries", "fewer keys, padding"])
def test_scores_of_the_last_rows(case: str, backend: Backend, device: str, poisoned: None) -> None:
    """They replace the gate's scores in some rows, and are a lower bound in the others."""
    arguments = pooled(random_arguments(case, device))
    plain = gate_scores(**arguments, backend=backend)
    (batch, gates, rows, cols), count = plain.shape, 2
    last_rows = torch.rand(batch, gates, count, cols, device=device).square()
    whole = torch.tensor([[False, True]], device=device).expand(batch, -1)
    got = gate_scores(**arguments, last_rows=last_rows, whole=whole, backend=backend)
    for b in range(batch):
        exist = int((plain[b, 0] > 0).any(-1).sum())
        expected, base = plain[b].clone(), max(0, exist - count)
        for i in range(min(count, rows - base)):
            seen, row = plain[b, :, base + i] > 0, plain[b, :, base + i]
            larger = last_rows[b, :, i] if i else last_rows[b, :, i].maximum(row)
            expected[:, base + i] = larger * seen
        assert torch.equal(got[b], expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15])
def test_vectors_of_any_magnitude(scale: float, backend: Backend, device: str) -> None:
    """Products of pairs of fp16 numbers neither overflow nor lose digits."""
    arguments = pooled(random_arguments("one gate per key/value head", device))
    wanted = gate_scores(**arguments, backend=backend)
    arguments["query_weight"], arguments["pooled_k"] = (
        arguments["query_weight"] * scale,
        arguments["pooled_k"] / scale,
    )
    arguments["mean_weight"] *= scale
    torch.testing.assert_close(
        gate_scores(**arguments, backend=backend), wanted, rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, backend: Backend, device: str) -> None:
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("interpreted kernels refuse bf16")
    arguments = random_arguments("one gate per query head", device, dtype)
    exact = reference_scores(**pooled(doubled(arguments)))
    torch.testing.assert_close(
        gate_scores(**pooled(arguments), backend=backend).double(), exact, rtol=1e-4, atol=1e-6
    )

"""Tests of `gate_scores` against its definition and against fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels import reference, testing
from msattn.kernels.gate_scores import gate_scores
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.shared import BACKENDS

CASES = {  # query heads, key heads, gate heads, queries, keys, head size, hidden, block, padding, poolings
    "one gate per query head": (4, 2, 4, 70, 70, 16, 16, 16, None, ["avg"], ["max", "min"]),
    "one gate per key/value head": (4, 2, 2, 70, 70, 40, 24, 16, None, ["avg", "max"], ["avg"]),
    "gates between both": (8, 1, 2, 40, 40, 16, 8, 16, None, ["min"], ["max", "min", "avg"]),
    "padding": (2, 2, 2, 70, 70, 16, 16, 16, [0, 37, 69], ["avg"], ["max", "min"]),
    "more keys": (2, 1, 2, 37, 90, 16, 16, 16, [0, 60], ["avg"], ["max", "min"]),
    "more queries": (2, 1, 2, 90, 37, 16, 16, 16, None, ["avg"], ["max", "min"]),
    "several tiles": (1, 1, 1, 2100, 2100, 8, 8, 16, [0, 1000], ["avg"], ["avg"]),
}

WITHOUT_MEANS = ("one gate per query head", "more queries")


def random_arguments(case: str, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns arguments with weights that make rows neither uniform nor one-hot."""
    heads, kv_heads, gates, queries, keys, size, hidden, block, padding, q_pool, k_pool = CASES[case]
    q, k, _ = testing.random_qkv(1 if padding is None else len(padding), heads, kv_heads, queries, keys, size, dtype, device)
    widths = heads // gates * len(q_pool) * size, len(k_pool) * size
    weights = [torch.randn(gates, hidden, width).to(device) * (block**0.25 / width**0.5) for width in widths]
    means = {"q_rope": q.flip(3), "k_rope": k.roll(1, 3), "mean_weight": (block / size) ** 0.5}
    return {
        "q": q, "k": k, "query_weight": weights[0], "key_weight": weights[1],
        "inv_freq": (100.0 ** -(torch.arange(hidden // 2) / (hidden // 2))).to(device),
        "q_pool": q_pool, "k_pool": k_pool, "block_size": block, "kv_start": testing.starts(padding, device),
        **({} if case in WITHOUT_MEANS else means),
    }  # fmt: skip


def doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in fp64; frequencies stay as they are."""
    double = ("q", "k", "query_weight", "key_weight", "q_rope", "k_rope")
    return {name: x.double() if name in double else x for name, x in arguments.items()}


def by_definition(arguments: dict[str, Any], b: int) -> Tensor:
    """Computes sequence ``b`` by the definition, block by block.

    Returns ``[Hg, Tr, Tc]``, where blocks are counted from the sequence's first token.
    """
    a = doubled(arguments)
    block, (gates, hidden, _) = a["block_size"], a["query_weight"].shape
    start = 0 if a["kv_start"] is None else int(a["kv_start"][b])
    k, offset = a["k"][b, :, start:], a["k"].shape[2] - a["q"].shape[2]
    first, shift = max(start - offset, 0), max(offset - start, 0)
    q, means = a["q"][b, :, first:], a.get("mean_weight", 0.0)
    q_rope, k_rope = (a["q_rope"][b, :, first:], a["k_rope"][b, :, start:]) if means else (q, k)
    ways = {"avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}

    def vector(weight: Tensor, tokens: list[Tensor], names: list[str], i: int, position: int) -> Tensor:
        y = weight @ torch.cat([ways[name](t[i * block : (i + 1) * block]) for t in tokens for name in names])
        if a["inv_freq"] is not None:
            angle = (position * a["inv_freq"]).double()
            y1, y2 = y.chunk(2)
            y = torch.cat([y1 * angle.cos() - y2 * angle.sin(), y2 * angle.cos() + y1 * angle.sin()])
        return y

    rows, cols = (-(-x.shape[1] // block) for x in (q, k))
    scores = torch.zeros(gates, rows, cols, dtype=torch.float64)
    shared = q.shape[0] // gates
    for h in range(gates):
        kv_head = h * len(k) // gates
        keys = [vector(a["key_weight"][h], [k[kv_head]], a["k_pool"], c, c * block) for c in range(cols)]
        mean_keys = [k_rope[kv_head, c * block : (c + 1) * block].mean(0) for c in range(cols)]
        for r in range(rows):
            ours = list(q[h * shared : (h + 1) * shared])
            query = vector(a["query_weight"][h], ours, a["q_pool"], r, shift + r * block)
            seen = (min(shift + (r + 1) * block, k.shape[1]) - 1) // block + 1
            mean_query = q_rope[h * shared : (h + 1) * shared, r * block : (r + 1) * block].mean((0, 1))
            logits = torch.stack(keys[:seen]) @ query / hidden**0.5 + means * torch.stack(mean_keys[:seen]) @ mean_query
            scores[h, r, :seen] = logits.softmax(0).cpu()
    return scores


@pytest.mark.parametrize("with_rope", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case != "several tiles"])
def test_reference_agrees_with_the_definition(case: str, with_rope: bool, device: str) -> None:
    arguments = random_arguments(case, device) | ({} if with_rope else {"inv_freq": None})
    got = reference.gate_scores(**doubled(arguments))
    for b in range(len(got)):
        expected = by_definition(arguments, b)
        padded = torch.zeros(got.shape[1:], dtype=torch.float64)
        padded[:, : expected.shape[1], : expected.shape[2]] = expected
        torch.testing.assert_close(got[b].cpu(), padded, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_fp64(case: str, backend: Backend, device: str, poisoned: None) -> None:
    arguments = random_arguments(case, device)
    got, exact = gate_scores(**arguments, backend=backend), reference.gate_scores(**doubled(arguments))
    assert exact.amax(-1).min() < 0.9  # not all rows are one-hot
    eager = reference.gate_scores(**arguments)
    # Logits reach about 30 and are rounded before the exponential.
    testing.assert_within_budget("scores", got, exact, eager, term=30.0)
    assert torch.equal(got == 0, exact.float() == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, backend: Backend, device: str) -> None:
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bf16 incorrectly")
    arguments = random_arguments("one gate per query head", device, dtype)
    exact = reference.gate_scores(**doubled(arguments))
    torch.testing.assert_close(gate_scores(**arguments, backend=backend).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    from msattn.kernels import gate_scores as module

    a = random_arguments("padding", device)
    given = [a[name] for name in ("q", "k", "query_weight", "key_weight", "inv_freq")]
    arguments = (*given, "avg", "max,min", 16, a["kv_start"], a["q_rope"], a["k_rope"], a["mean_weight"], backend)
    shared.assert_operator(module._operator, arguments, gate_scores, **a, backend=backend)
    with pytest.raises(NotImplementedError, match="no gradient"):
        gate_scores(**a | {"key_weight": a["key_weight"].requires_grad_()}, backend=backend).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_pool": ["mean"]}, "q_pool="),
        ({"k_pool": []}, "k_pool="),
        ({"query_weight": torch.zeros(3, 16, 16)}, "query_weight.shape="),
        ({"query_weight": torch.zeros(4, 15, 16)}, "query_weight.shape="),
        ({"query_weight": torch.zeros(4, 16, 16, dtype=torch.float16)}, "query_weight is"),
        ({"key_weight": torch.zeros(4, 32, 16).mT}, "key_weight is"),
        ({"inv_freq": torch.zeros(16)}, "inv_freq is"),
        ({"block_size": 20}, "block_size=20"),
        ({"kv_start": torch.zeros(3, dtype=torch.int32)}, "kv_start is"),
        ({"q_rope": torch.zeros(1, 4, 70, 16)}, "k_rope is None"),
        ({"mean_weight": 0.5}, "mean_weight=0.5"),
        (
            {"q_rope": torch.zeros(1, 4, 70, 16), "k_rope": torch.zeros(1, 2, 70, 16), "mean_weight": float("nan")},
            "mean_weight=nan",
        ),
        ({"q_rope": torch.zeros(1, 4, 70, 8), "k_rope": torch.zeros(1, 2, 70, 16)}, "q_rope is"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate_scores(**random_arguments("one gate per query head", "cpu") | change)

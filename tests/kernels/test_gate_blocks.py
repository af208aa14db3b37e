"""Tests of `gate_blocks` against `gate_scores` and `best_blocks`, and against fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels.best_blocks import best_blocks
from msattn.kernels.common import gate_rows
from msattn.kernels.common.block_bits import pack_blocks, unpack_blocks
from msattn.kernels.gate_blocks import gate_blocks
from msattn.kernels.gate_scores import gate_scores
from msattn.kernels.reference.gate_scores import gate_scores as reference_scores
from msattn.kernels.types import Backend
from tests.kernels.gates import CASES, doubled, pooled, random_arguments
from tests.kernels.shared import BACKENDS, assert_cuda_graph

SINK = 1
# these take 7 to 20 s each when they are interpreted
LARGE = ("three queries a key", "seven queries a key", "several tiles")
# a share of the rows keeps its best blocks, and the threshold adds others
LIMIT = {"threshold": 1.4, "exponent": -1.0, "edge_exponent": -0.5, "above": 2.0}


def geometry(arguments: dict[str, Any], counts: int | None = None) -> dict[str, Tensor]:
    """Returns the visible blocks, those that must be read, and ``counts`` and ``local``.

    A row must read its last visible block; ``counts`` are half of the visible blocks by default.
    """
    visible = reference_scores(**doubled(arguments))[:, :1] > 0  # none has probability 0
    seen = visible.sum(-1, keepdim=True)
    local, cols = (seen - 1).clamp(min=0), torch.arange(visible.shape[3], device=visible.device)
    wanted = seen // 2 if counts is None else torch.full_like(seen, counts)
    always = visible & ((cols < SINK) | (cols >= local))
    return {
        "visible": visible, "always": always, "counts": wanted.int(), "local": local.int(),
    }  # fmt: skip


def given_scores(kind: str, arguments: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Returns what else scores take into account."""
    batch, gates, rows, cols = shape
    if kind == "last rows":
        count = min(2, rows)
        given = {
            "columns": torch.rand(batch, gates, cols),
            "last_rows": torch.rand(batch, gates, count, cols),
            "whole": torch.tensor([[False, True][-count:]]),
        }
        return {name: x.to(arguments["q"].device) for name, x in given.items()}
    return {"last_queries": kind == "last queries"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["pooled", "last queries", "last rows"])
@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow) if x in LARGE else x for x in CASES]
)
def test_selects_the_best_blocks_of_the_scores(
    case: str, kind: str, backend: Backend, device: str, poisoned: None
) -> None:
    """Bit by bit: both operations compute the same probabilities."""
    arguments = pooled(random_arguments(case, device))
    rows = geometry(arguments)
    arguments |= given_scores(kind, arguments, reference_scores(**arguments).shape)
    scores = gate_scores(**arguments, backend=backend)
    wanted = best_blocks(
        scores, rows["counts"], rows["visible"], rows["always"], **LIMIT, backend=backend
    )
    got = gate_blocks(
        **arguments, counts=rows["counts"], local=rows["local"], sink_blocks=SINK, **LIMIT,
        backend=backend,
    )  # fmt: skip
    assert got.dtype == torch.int32
    assert torch.equal(got, pack_blocks(wanted))
    if case == "several tiles":  # the threshold and the counts both add blocks, and not all
        forced = rows["always"].sum(-1, keepdim=True)
        read = wanted.sum(-1, keepdim=True)
        assert (read > rows["counts"].maximum(forced)).any()
        assert (read < rows["visible"].sum(-1, keepdim=True)).any()


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_fp64(case: str, backend: Backend, device: str) -> None:
    """Blocks differ only where their score is within rounding of the threshold."""
    check_agrees_with_fp64(case, torch.float32, backend, device)


def check_agrees_with_fp64(case: str, dtype: torch.dtype, backend: Backend, device: str) -> None:
    drawn = random_arguments(case, device, dtype)
    exact, arguments = pooled(doubled(drawn)), pooled(drawn)
    rows = geometry(arguments, counts=0)
    scores = reference_scores(**exact)
    choice = {"counts": rows["counts"], "local": rows["local"], "sink_blocks": SINK, **LIMIT}
    got, wanted = (
        unpack_blocks(gate_blocks(**given, **choice, backend=where), scores.shape[3])
        for given, where in ((arguments, backend), (exact, "torch"))
    )
    v = rows["visible"].sum(-1, keepdim=True).double()
    edge = (1 - LIMIT["above"] / v).clamp(min=0) ** LIMIT["edge_exponent"]
    threshold = LIMIT["threshold"] * v ** LIMIT["exponent"] * edge
    near = (scores / threshold - 1).abs() < 1e-4  # scores agree as closely, see test_gate_scores
    assert torch.equal(got | near, wanted | near)
    assert near.sum() < 0.01 * near.numel()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_rows_in_slabs(backend: Backend, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pooled(random_arguments("several tiles", device)) | {"last_queries": True}
    rows = geometry(arguments)
    choice = {"counts": rows["counts"], "local": rows["local"], "sink_blocks": SINK, **LIMIT}
    want = gate_blocks(**arguments, **choice, backend=backend)
    monkeypatch.setattr(gate_rows, "SLAB_BYTES", 2 * 4 * 256 * 30)  # 30 of the longest rows
    assert torch.equal(gate_blocks(**arguments, **choice, backend=backend), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for NaN
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_read_nan(value: float, backend: Backend, device: str) -> None:
    """They read as many blocks as they ask for, and the other rows are not affected."""
    arguments = pooled(random_arguments("fewer keys than queries in a block", device))
    rows = geometry(arguments)
    choice = {"counts": rows["counts"], "local": rows["local"], "sink_blocks": SINK, **LIMIT}
    want = gate_blocks(**arguments, **choice, backend=backend)
    arguments["pooled_k"][:, 0, 5] = value  # not seen by the first row of 4 blocks
    got = gate_blocks(**arguments, **choice, backend=backend)
    own, others = got[:, :2], got[:, 2:]  # query heads of the key/value head
    assert torch.equal(others, want[:, 2:])
    assert torch.equal(own[:, :, 0], want[:, :2, 0])
    read = unpack_blocks(own[:, :, 1:], rows["visible"].shape[3])
    wanted = torch.maximum(rows["counts"], rows["always"].sum(-1, keepdim=True))[:, :, 1:, 0]
    assert torch.equal(read.sum(-1), wanted.expand(read.shape[:3]))
    assert not (read & ~rows["visible"][:, :, 1:]).any()


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 70])
def test_bits_hold_a_mask(blocks: int) -> None:
    mask = torch.rand(2, 3, blocks) < 0.5
    mask[0, 0] = True  # with the sign bit
    bits = pack_blocks(mask)
    assert bits.dtype == torch.int32
    assert torch.equal(unpack_blocks(bits, blocks), mask)
    assert not unpack_blocks(bits, bits.shape[-1] * 32)[..., blocks:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str, dtype: torch.dtype) -> None:
    check_agrees_with_fp64(case, dtype, "triton", "cuda")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = pooled(random_arguments("padding", "cuda")) | {"last_queries": True}
    rows = geometry(arguments)
    choice = {"counts": rows["counts"], "local": rows["local"], "sink_blocks": SINK, **LIMIT}

    def change() -> None:
        arguments["q"].mul_(-1)
        arguments["kv_start"].add_(1)

    assert_cuda_graph(lambda: gate_blocks(**arguments, **choice), change)

"""NaN in what an operation reads makes the rows that read it NaN; NaN in what it does not read
makes no difference.
"""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import msattn
from msattn.kernels.operations import DIFFERENTIABLE
from msattn.kernels.testing import block_numbers, pool_over_blocks, starts, visible
from msattn.kernels.types import Backend, Pool
from tests.kernels.block_maps import Operation, each_operation, gradients, zoom_of_tokens
from tests.kernels.cases.every import CASES
from tests.kernels.cases.records import Arguments
from tests.kernels.problems import Case
from tests.kernels.shared import BACKENDS, assert_same

# those of backend="triton" run the compiled kernels where there is a GPU
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
EACH = ("lse", "products")  # results with one number for each row
MAPS = ("pooled", "result")  # results that are 0 where a row sees nothing
READ = {x: cases.read for x, cases in CASES.items() if cases.operators and cases.read}
UNREAD = {x: cases.unread for x, cases in CASES.items() if cases.unread}


def given_to(operation: str, device: str) -> Arguments:
    """Returns the same numbers on every device: which places are read depends on them."""
    return tree_map_only(Tensor, lambda x: x.to(device), CASES[operation].arguments("cpu"))


def results(operation: str, given: Arguments, backend: Backend) -> dict[str, Tensor]:
    """Returns the floating-point results by name."""
    result = CASES[operation].function(**given, backend=backend)
    named = {"result": result} if isinstance(result, Tensor) else result._asdict()
    return {name: x for name, x in named.items() if x.is_floating_point()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for NaN
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", READ)
def test_rows_that_read_nan_are_nan(operation: str, backend: Backend, steady_device: str) -> None:
    """Those are the rows that change with a key; in a map, blocks that a row does not see stay
    0.
    """
    given = given_to(operation, steady_device)
    clean, place = results(operation, given, backend), READ[operation](given)
    before = results(operation, given, "torch")
    place += 3
    moved = results(operation, given, "torch")
    place.fill_(torch.nan)
    for name, got in results(operation, given, backend).items():
        changed = (moved[name] - before[name]).abs() > 1e-5
        if name not in EACH:
            changed = changed.any(-1, keepdim=True) & ((clean[name] != 0) | (name not in MAPS))
        assert changed.any()
        assert torch.equal(got.isnan(), changed), name
        assert_same(got.where(~changed, 0), clean[name].where(~changed, 0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", UNREAD)
def test_nan_that_is_not_read_makes_no_difference(
    operation: str, backend: Backend, steady_device: str
) -> None:
    given = given_to(operation, steady_device)
    clean = results(operation, given, backend)
    UNREAD[operation](given).fill_(torch.nan)
    assert_same(results(operation, given, backend), clean)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", get_args(Pool))
def test_blocks_that_a_nan_row_sees_are_nan(
    pool: Pool, backend: Backend, steady_device: str
) -> None:
    """A query is NaN, or a key."""
    case, kv_start = Case(1, 2, 1, 90, 110, 16, block_size=16), starts((5,), steady_device)
    for place in range(2):
        inputs = case.qkv(steady_device)
        inputs[place][0, 0, 60] = torch.nan
        got = msattn.maxpool_attention(
            *inputs, block_size=16, pool=pool, kv_start=kv_start, backend=backend
        )
        seen = visible(1, 90, 110, True, kv_start, steady_device) & got.lse.isnan()[..., None]
        expected = (
            pool_over_blocks(seen.float(), *block_numbers(1, 90, 110, True, kv_start, 16), (6, 7))
            > 0
        )
        assert expected.any()
        assert torch.equal(got.pooled.isnan(), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", [x for x in DIFFERENTIABLE if x.endswith("attention")])
def test_gradients_of_nan_rows(operation: str, backend: Backend, steady_device: str) -> None:
    """They are NaN; those of padding stay 0."""
    given = given_to(operation, steady_device)
    READ[operation](given).fill_(torch.nan)
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v")]
    result = CASES[operation].function(**given, backend=backend)
    out = result if isinstance(result, Tensor) else result.out
    dq, *others = torch.autograd.grad(out.sum(), leaves)
    rows = out.isnan().all(-1)
    assert rows.any()
    assert dq[rows].isnan().all()
    for gradient in (dq, *others):
        assert (gradient[:, :, :3] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@each_operation
def test_gradients_of_blocks_that_no_nan_row_reads(
    operation: Operation, backend: Backend, steady_device: str
) -> None:
    """A query is NaN, then its incoming gradient, then a key. Gradients of what NaN rows read are
    NaN.
    """
    case = Case(1, 2, 1, 70, 170, 16, block_size=16)
    blocks = operation.draw(1, 2, (5, 11), 0.5, steady_device)
    read = zoom_of_tokens(blocks, case, steady_device)[0] != 0  # [Hq, N, M]
    inputs = dict(zip(("q", "k", "v"), case.qkv(steady_device), strict=True))
    inputs["dout"] = torch.randn(1, 2, 70, 16, device=steady_device)

    def run(name: str = "", place: int = 0) -> Any:
        given = {key: x.detach().clone() for key, x in inputs.items()}
        if name:
            given[name][0, 0, place] = torch.nan
        dout = given.pop("dout")
        leaves = [x.requires_grad_() for x in given.values()]
        got = operation.attend(*leaves, blocks, block_size=16, backend=backend)
        return gradients(got, leaves, dout, torch.zeros_like(dout[..., 0]))

    clean = run()
    own = read[0, 40]
    row_block = read[0, 32:48].any(0).view(-1)
    assert own.any()
    assert not row_block.all()
    for name in ("q", "dout"):
        of_row = run(name, 40)
        for got, want in ((of_row.dk, clean.dk), (of_row.dv, clean.dv)):
            assert got[0, 0, own].isnan().all()
            assert_same(got[0, 0, ~row_block], want[0, 0, ~row_block])
        assert of_row.dq[0, 0, 40].isnan().all()
        assert_same(of_row.dq[0, 0, :32], clean.dq[0, 0, :32])

    of_key = run("k", 50)
    rows = read[:, :, 50]
    reads_block = read[:, :, 48:64].any(2)
    assert rows.any()
    assert not reads_block.all()
    assert of_key.dq[0, rows].isnan().all()
    assert_same(of_key.dq[0, ~reads_block], clean.dq[0, ~reads_block])
    touched = read[reads_block].any(0)
    assert of_key.dk[0, 0, read[rows].any(0)].isnan().all()
    assert_same(of_key.dk[0, 0, ~touched], clean.dk[0, 0, ~touched])


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_blocks_ranks_nan_first(backend: Backend, steady_device: str) -> None:
    given = CASES["best_blocks"].arguments(steady_device) | {"backend": backend}
    given["scores"][:, :, :, 2] = torch.nan
    given["scores"][:, :, 1, 1] = -torch.nan
    assert torch.equal(
        msattn.best_blocks(**given), msattn.best_blocks(**given | {"backend": "torch"})
    )
    mask = msattn.best_blocks(**given | {"threshold": torch.inf})
    wanted = torch.maximum(given["counts"][..., 0], given["always"].sum(-1)).minimum(
        given["visible"].sum(-1)
    )
    assert torch.equal(mask.sum(-1), wanted.expand(mask.shape[:3]).long())
    enough = given["counts"][..., 0] > given["always"].sum(-1) + 1
    assert (mask[..., 2] | ~enough).all()


def test_a_nan_query_among_the_last_is_seen_in_the_last_row(device: str) -> None:
    given = CASES["gate_scores"].arguments(device) | {"last_queries": True, "kv_start": None}
    given["q"][:, :, 57] = torch.nan  # of the last 16, in the row block before the last
    found, wanted = (
        msattn.gate_scores(**given, backend=backend) for backend in ("triton", "torch")
    )
    assert wanted[:, :, -1].isnan().any()
    assert torch.equal(found.isnan(), wanted.isnan())

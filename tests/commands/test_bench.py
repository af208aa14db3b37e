"""``msattn bench`` on a CPU: cases and rows of the benchmark, and the command."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels import bench, block_sparse_attention
from msattn.kernels.bench import candidate_tiles as tiles
from msattn.kernels.bench import cases, decode_cases, peers, prefill_cases
from msattn.kernels.bench.rows import PeakRates, Work, throughput
from msattn.kernels.operations import IN_FP8, OPERATIONS, SOFT_CAPPED
from tests.commands.conftest import Refused, Run
from tests.kernels.problems import SMALL

OPTIONS = bench.Options(lengths=[130], queries=[1, 3], kernels=[(6, 11), (1, 3)])
TINY = [
    "bench",
    "bench.lengths=[96,192]",
    "bench.heads=[2,1]",
    "bench.head_size=16",
    "bench.sparsities=[0.5]",
]
TINY += ["device=cpu", "tracker=none"]
pytestmark = pytest.mark.usefixtures("round_figures")


@pytest.fixture(autouse=True)
def _wide(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_bench_has_cases_for_every_operation() -> None:
    assert list(bench.CASES) == list(OPERATIONS)
    assert {*tiles.FORWARD_KERNELS, *tiles.BACKWARD_KERNELS} <= set(OPERATIONS)
    assert {
        kernel
        for kernels in (*tiles.FORWARD_KERNELS.values(), *tiles.BACKWARD_KERNELS.values())
        for kernel in kernels
    } == set(tiles.CANDIDATES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in OPERATIONS),
        *((name, {"softcap": 2.0}) for name in SOFT_CAPPED),
        *((name, {"fp8": True}) for name in IN_FP8),
    ],
)
def test_eager_form_equals_reference(name: str, options: dict[str, Any]) -> None:
    """The eager form sets the tolerance of a kernel: if it computed something else, a wrong kernel
    would pass.
    """
    found = list(bench.CASES[name](SMALL, replace(OPTIONS, **options)))
    assert found
    assert any("FP8 pages" in case.setting for case in found) == ("fp8" in options)
    for case in found:
        layer = tuple(
            x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in case.layers[0]
        )
        expected = cases._results(case.reference, layer, OPERATIONS[name].differentiable)
        for key, x in cases._results(case.eager, layer, OPERATIONS[name].differentiable).items():
            torch.testing.assert_close(x, expected[key], rtol=1e-9, atol=1e-9)
        cases.check(case, OPERATIONS[name].differentiable)


def test_keys_differ_from_queries() -> None:
    """With equal queries and keys each query would attend to itself alone."""
    shape = replace(SMALL, q_heads=2, length=40)
    q, k, v = shape.qkv()
    assert not torch.isclose(q, k).any()
    (q, k, v), *_ = shape.cache(2, 40)
    assert not torch.isclose(q, k).any()
    assert not torch.isclose(k, v).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_timed_with_its_peers(name: str) -> None:
    rows = list(
        bench.measure(
            name, SMALL, replace(OPTIONS, peers=("flash", "eager", "product", "block_sparse"))
        )
    )
    own = [row for row in rows if row.variant == "msattn"]
    assert len({(row.setting, row.queries) for row in own}) == len(own) > 0
    for row in rows:
        assert row.ms is not None, row.note
        assert 0 < (row.q1 or 0) <= row.ms <= (row.q3 or 0)
        assert row.share == pytest.approx(max((row.tflops or 0) / 2, (row.tb_s or 0) / 0.5))
        assert row.memory_gb is None, "PyTorch does not track memory on a CPU"
        assert 0 <= row.sparsity < 1
    assert all("eager" in row.times for row in own)
    assert {
        "maxpool_attention": "flash",
        "bucket_mass": "product",
        "multiscale_attention": "block_sparse",
    }.get(name, "eager") in own[0].times


def test_speedups_are_over_the_peer_of_the_same_setting() -> None:
    rows = list(bench.measure("flash_decode", SMALL, replace(OPTIONS, peers=("flash",))))
    for row in (row for row in rows if row.variant == "msattn"):
        (peer,) = (peer for peer in rows if peer.variant == "flash" and peer.queries == row.queries)
        assert row.times == {"flash": (peer.ms or 0) / (row.ms or 1)}
    assert len(rows) == 2 * 3, "a peer is timed once for both variants"


@pytest.mark.slow
def test_backward_pass_has_speedups_over_peers() -> None:
    options = replace(OPTIONS, backward=True, sparsities=[0.5], peers=("flash", "eager"))
    rows = list(bench.measure("block_sparse_attention", SMALL, options))
    assert {row.direction for row in rows} == {"backward"}
    own = rows[-1]
    assert set(own.times) == {"flash", "eager"}


def test_throughput_is_bound_by_compute_or_memory() -> None:
    compute = throughput(Work(flops=4e12, bytes=1e9), ms=1000, ceiling=PeakRates(tflops=8, tb_s=4))
    assert compute == {"tflops": 4.0, "tb_s": 0.001, "share": 0.5, "bound": "compute"}
    memory = throughput(Work(flops=1e9, bytes=3e12), ms=1000, ceiling=PeakRates(tflops=8, tb_s=4))
    assert memory == {"tflops": 0.001, "tb_s": 3.0, "share": 0.75, "bound": "memory"}


def test_work_counts_the_scores_that_are_read() -> None:
    shape = replace(SMALL, length=200)
    for keys, cols in ((64, 4), (16, 13)):
        mask = torch.rand(1, 6, 4, cols) < 0.4
        tokens = mask.repeat_interleave(64, 2).repeat_interleave(keys, 3)[:, :, :200, :200].tril()
        flops = 4 * shape.head_size * int(tokens.sum()) * shape.batch
        assert prefill_cases._work(shape, mask, False, keys)[0].flops == flops
    dense = peers.dense_work(shape, backward=False)
    assert dense.flops == 4 * 16 * 2 * 6 * 200 * 201 / 2
    assert dense.bytes == 4 * 2 * 200 * (2 * 6 * 16 + 2 * 2 * 16 + 6)
    assert peers.dense_work(shape, backward=True).flops == 2.5 * dense.flops
    assert decode_cases._work(shape, 3, 200).flops == 4 * 16 * 2 * 6 * 3 * 200


def test_coarsened_mask_reads_as_many_keys() -> None:
    mask = (torch.rand(1, 3, 65, 65) < 0.2).tril()
    mask.diagonal(dim1=2, dim2=3).fill_(True)
    coarse = peers.coarsen(mask)
    assert coarse.shape == (1, 3, 33, 33)
    assert torch.equal(coarse, coarse.tril())
    assert coarse.diagonal(dim1=2, dim2=3).all()
    assert 4 * coarse.sum() == pytest.approx(int(mask.sum()), rel=0.03)
    assert torch.equal(
        peers.coarsen(torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())[0, 0],
        torch.ones(4, 4).tril().bool(),
    )


@pytest.mark.gpu  # on a CPU its compilation takes long
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_flex_reads_the_same_blocks(softcap: float | None, device: str) -> None:
    shape = replace(SMALL, head_size=64, dtype=torch.float16, device=device)
    case = next(prefill_cases.block_sparse_attention(shape, replace(OPTIONS, softcap=softcap)))
    (flex,) = (peer for peer in case.peers if peer.name == "flex")
    actual = flex.prepare()(*flex.layers[0])
    # A few roundings to float16 of values up to 4.
    torch.testing.assert_close(actual, case.reference(*case.layers[0]).out, rtol=0, atol=5e-3)


def test_peers_that_cannot_run_have_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_free_bytes", lambda device: 10**5)
    options = replace(OPTIONS, peers=("cudnn", "eager"))
    cudnn_row, eager_row, own = bench.measure("maxpool_attention", SMALL, options)
    assert (cudnn_row.ms, cudnn_row.note) == (None, "not timed: PyTorch supports it on GPUs only")
    assert eager_row.note == "not timed: its scores need 0 GB, 0 GB are free"
    assert own.ms is not None
    assert own.times == {}


def test_command_writes_a_table_and_a_figure(msattn: Run, tmp_path: Path) -> None:
    code, out, err = msattn(*TINY, "bench.peers=[flash,cudnn,eager]")
    assert (code, err) == (0, "")
    assert "CPU times say nothing about GPUs" in out
    assert "cudnn at 96 keys, not timed: PyTorch supports it on GPUs only" in out
    folder = tmp_path / "outputs/bench/block_sparse_attention"
    assert (folder / "forward-cpu.png").stat().st_size > 10_000
    rows = read(folder / "forward-cpu.csv")
    assert {row["length"] for row in rows} == {"96", "192"}
    assert {row["variant"] for row in rows} == {"flash", "cudnn", "eager", "msattn"}
    own = [row for row in rows if row["variant"] == "msattn"]
    assert {row["setting"] for row in own} == {
        "50% sparse",
        "50% sparse, group masks",
        "50% sparse, 16 keys",
    }
    assert all(
        float(row["times_flash"]) > 0 and row["device"].startswith("CPU") and row["torch"]
        for row in own
    )
    assert not list(folder.glob(".writing-*"))
    (run,) = (folder / "runs").glob("bench-*")
    assert (run / ".hydra/config.yaml").exists()
    (line,) = (folder / "runs/forward-cpu/metrics.jsonl").read_text().splitlines()
    summary = json.loads(line)["summary"]
    assert summary["96/msattn, 50% sparse/ms"] == pytest.approx(float(own[0]["ms"]))
    assert not any("cudnn" in key for key in summary)


@pytest.mark.slow
def test_interrupted_run_keeps_its_rows_and_earlier_results(
    msattn: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert msattn(*TINY, "bench.peers=[]")[0] == 0
    folder = tmp_path / "outputs/bench/block_sparse_attention"
    before = (folder / "forward-cpu.csv").read_bytes()
    measure = bench.measure

    def interrupted(
        operation: str, shape: bench.Shape, options: bench.Options
    ) -> Iterator[bench.BenchRow]:
        yield next(measure(operation, shape, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    code, _, err = msattn(*TINY, "bench.peers=[]")
    table = "outputs/bench/block_sparse_attention/forward-cpu.partial.csv"
    assert (code, err) == (130, f"msattn: interrupted: 1 rows are in {table}\n")
    assert len(read(tmp_path / table)) == 1
    assert (folder / "forward-cpu.csv").read_bytes() == before


@pytest.mark.slow
def test_wrong_kernel_is_not_timed(
    msattn: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = block_sparse_attention.block_sparse_attention

    def wrong(*arguments: Tensor, softcap: None) -> tuple[Tensor, Tensor]:
        out, lse = correct(*arguments)
        return out * 1.001, lse

    monkeypatch.setattr(block_sparse_attention, "block_sparse_attention", wrong)
    code, out, err = msattn(*TINY)
    assert code == 1
    assert "block_sparse_attention disagrees with its reference, nothing was timed" in err
    assert err.count("\n") == 1
    assert "msattn," not in out
    assert not list((tmp_path / "outputs/bench/block_sparse_attention").glob("forward.*"))


def test_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = block_sparse_attention.block_sparse_attention

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: None
    ) -> tuple[Tensor, Tensor]:
        return correct(q, k, v * 1.001 - v.detach() * 0.001, mask)

    monkeypatch.setattr(block_sparse_attention, "block_sparse_attention", wrong)
    with pytest.raises(bench.ReferenceMismatch, match="gradient 2: error"):
        next(bench.measure("block_sparse_attention", SMALL, replace(OPTIONS, backward=True)))


@pytest.mark.slow
def test_a_sweep_needs_a_gpu(refused: Refused) -> None:
    refused("bench.sweep=true: needs a GPU", "bench", "device=cpu", "bench.sweep=true")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_on_gpu(name: str) -> None:
    """Both directions, CUDA graphs, memory, and every peer that supports a GPU."""
    shape = bench.Shape(1024, dtype=torch.bfloat16, device="cuda")
    for backward in (False, True) if OPERATIONS[name].differentiable else (False,):
        options = bench.Options(lengths=[1024], sparsities=[0.8], queries=[1, 4], backward=backward)
        rows = list(bench.measure(name, shape, options))
        assert any(row.variant == "msattn" for row in rows)
        for row in rows:
            if row.variant != "cudnn":  # some versions of cuDNN do not support some shapes
                assert row.ms is not None, f"{row.variant}: {row.note}"
                assert row.memory_gb is not None

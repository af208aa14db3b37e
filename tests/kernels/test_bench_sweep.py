"""Sweeps of ``msattn bench`` over tiles: candidates, failing tiles, choice of the fastest."""

import importlib
from dataclasses import replace

import pytest
import torch

from msattn.kernels import bench, tuned
from msattn.kernels.bench import candidate_tiles as tiles
from msattn.kernels.bench import cases
from msattn.kernels.bench.timing import compile_seconds
from msattn.kernels.tuned import Tile
from tests.kernels.problems import SMALL

OPTIONS = bench.Options(lengths=[130], sparsities=[0.5])
pytestmark = pytest.mark.usefixtures("round_figures")


@pytest.mark.parametrize("kernel", tiles.CANDIDATES)
def test_override_tile_is_temporary(kernel: str) -> None:
    tile = Tile(16, 128, 2, 7)
    module = (
        tuned
        if kernel in tuned.FULL_PRECISION
        else importlib.import_module(tiles.SHAPE_DEPENDENT[kernel])
    )
    shipped = getattr(module, "pick" if module is tuned else "default_tile")
    other = tuned.pick("maxpool_attention", 128, torch.float16, 90)
    with tiles.override_tile(kernel, tile):
        if module is tuned:
            assert tuned.pick(kernel, 128, torch.float16, 90) == tile
            assert (
                kernel == "maxpool_attention"
                or tuned.pick("maxpool_attention", 128, torch.float16, 90) == other
            )
        else:
            assert vars(module)["default_tile"](1, 2, 3) == tile
    assert getattr(module, "pick" if module is tuned else "default_tile") is shipped


def test_compile_seconds_are_those_that_triton_reports() -> None:
    from triton import knobs

    before = knobs.compilation.listener, knobs.compilation.always_compile
    with compile_seconds() as seconds:
        assert knobs.compilation.always_compile
        assert knobs.compilation.listener
        times = knobs.CompileTimes(
            ir_initialization=0, lowering_stages=[("ttir", 2_000_000)], store_results=500_000
        )
        knobs.compilation.listener(
            src=None, metadata={}, metadata_group={}, times=times, cache_hit=False
        )
    assert seconds == [2.5]
    assert (knobs.compilation.listener, knobs.compilation.always_compile) == before


@pytest.mark.slow
def test_sweep_ignores_the_users_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tiles = {("block_sparse_attention", 256): Tile(16, 16, 2, 1)}
    monkeypatch.setattr(tuned, "user_tiles", lambda: user_tiles)
    assert tuned.pick("block_sparse_attention", 128, torch.float16, 90) == Tile(16, 16, 2, 1)
    used: list[Tile] = []

    def record(case: cases.BenchCase, backward: bool) -> None:
        used.append(tuned.pick("block_sparse_attention", 128, torch.float16, 90))

    monkeypatch.setattr("msattn.kernels.bench.run.check", record)
    list(bench.sweep("block_sparse_attention", SMALL, OPTIONS))
    assert used[0] == tuned.TILES["block_sparse_attention", 256, 90]
    assert Tile(16, 16, 2, 1) not in used
    assert tuned.user_tiles() is user_tiles


def test_faster_tiles_need_a_mean_speedup_over_all_problems() -> None:
    (first, second), other = (
        tiles.CANDIDATES["nearest_centroid"][:2],
        tiles.CANDIDATES["bucket_sums"][0],
    )
    (blank,) = bench.measure("merge_states", SMALL, replace(OPTIONS, peers=()))

    def rows(name: str, *times: float | None) -> list[bench.BenchRow]:
        return [
            replace(blank, variant=name, length=length, ms=ms) for length, ms in enumerate(times)
        ]

    shipped = rows("shipped", 4.0, 1.0)
    swept = rows(tiles.variant_name("nearest_centroid", first), 2.0, 1.9) + rows(
        tiles.variant_name("nearest_centroid", second), 1, 1
    )
    faster, speedup = tiles.faster_tiles("nearest_centroid", False, shipped + swept)[
        "nearest_centroid"
    ]
    assert (faster, speedup) == (second, pytest.approx(2.0))
    for slow in ((4.0, 0.99), (1.0, None), (1.0,)):
        assert (
            tiles.faster_tiles(
                "nearest_centroid",
                False,
                shipped + rows(tiles.variant_name("bucket_sums", other), *slow),
            )
            == {}
        )
    assert tiles.faster_tiles("nearest_centroid", False, []) == {}


def test_sweep_continues_after_a_tile_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = tiles.list_candidates("block_sparse_attention", backward=True)
    assert {kernel for kernel, _ in candidates} == {
        "block_sparse_attention_dq",
        "block_sparse_attention_dkv",
    }
    shipped = tuned.pick

    def fail(case: cases.BenchCase, backward: bool) -> None:
        if tuned.pick is not shipped:
            raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr("msattn.kernels.bench.run.check", fail)
    rows = list(bench.sweep("block_sparse_attention", SMALL, replace(OPTIONS, backward=True)))
    assert {(row.variant, row.direction) for row in rows if row.ms} == {("shipped", "backward")}
    failed = [row for row in rows if not row.ms]
    assert len(failed) == len(candidates)
    assert failed[0].variant == "block_sparse_attention_dq 64-64-4-1-1"
    assert failed[0].note == "not timed: out of resource: shared memory"


def test_sweep_stops_if_the_shipped_tiles_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def disagree(case: cases.BenchCase, backward: bool) -> None:
        raise cases.ReferenceMismatch("wrong")

    monkeypatch.setattr("msattn.kernels.bench.run.check", disagree)
    with pytest.raises(cases.ReferenceMismatch, match="wrong"):
        list(bench.sweep("block_sparse_attention", SMALL, OPTIONS))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["block_sparse_attention", "bucket_decode"])
def test_sweep_on_gpu(name: str) -> None:
    shape = bench.Shape(1000, dtype=torch.bfloat16, device="cuda")
    rows = list(
        bench.sweep(name, shape, bench.Options(lengths=[1000], sparsities=[0.8], queries=[1]))
    )
    assert rows[0].variant == "shipped"
    assert sum(row.ms is not None for row in rows) > len(rows) / 2

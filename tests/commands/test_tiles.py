"""Tiles of a user's own: kept for one GPU and version of Triton, read before the shipped ones, and never in the way."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.kernels import bench, tuned
from msattn.kernels.tuned import Tile
from msattn.trainer.commands import bench as command
from msattn.trainer.commands import tiles
from msattn.trainer.commands.bench import bench as run
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError
from msattn.trainer.models.break_even import BREAK_EVEN, break_even

GPU = "NVIDIA H200"
FAST, OTHER = Tile(32, 64, 4, 2), Tile(16, 32, 8, 5, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has one, as far as tiles are concerned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))
    tuned._own_tiles_of.cache_clear()
    yield
    tuned._own_tiles_of.cache_clear()


def test_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.own_path(GPU) == folder / "cache/tiles/nvidia-h200.json"
    monkeypatch.delenv("MSATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert tuned.own_path(GPU) == Path("/caches/msattn/tiles/nvidia-h200.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned.own_path(GPU) == Path.home() / ".cache/msattn/tiles/nvidia-h200.json"


def test_own_tiles_come_first(gpu: None) -> None:
    shipped = tuned.pick("maxpool_attention", 128, torch.bfloat16, 90)
    assert shipped == tuned.TILES["maxpool_attention", 256, 90]
    tiles.keep(GPU, 256, {"maxpool_attention"}, {"maxpool_attention": (FAST, 1.1)})
    assert tuned.pick("maxpool_attention", 128, torch.bfloat16, 90) == shipped, "read once a process"
    tuned._own_tiles_of.cache_clear()
    assert tuned.pick("maxpool_attention", 128, torch.bfloat16, 90) == FAST
    assert tuned.pick("maxpool_attention", 256, torch.bfloat16, 90) == tuned.TILES["maxpool_attention", 512, 90]
    assert tuned.pick("maxpool_attention", 128, torch.float32, 90) == tuned.FULL_PRECISION["maxpool_attention"]
    assert tuned.pick("bucket_sums", 128, torch.bfloat16, 90) == tuned.TILES["bucket_sums", 256, 90]


def test_what_was_not_tried_stays() -> None:
    tiles.keep(GPU, 256, {"a", "b"}, {"a": (FAST, 1.1), "b": (OTHER, 1.2)})
    tiles.keep(GPU, 512, {"a"}, {"a": (OTHER, 1.3)}, commit="abc")
    path = tiles.keep(GPU, 256, {"b"}, {})
    assert tuned.read_own(GPU) == {("a", 256): FAST, ("a", 512): OTHER}
    document = json.loads(path.read_text())
    assert document["format"] == tuned.FORMAT
    assert document["gpu"] == GPU
    assert document["tiles"][1] | {"kernel": "a", "faster": 1.3, "commit": "abc"} == document["tiles"][1]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"triton": "0.1"}, "made with triton=0.1, here"),
        ({"format": 0}, "made with format=0, here 1"),
        ({"gpu": "another"}, "made with gpu=another"),
        ({"tiles": [{"kernel": "a", "head_bytes": 256}]}, "rows"),
        ({"tiles": None}, "not iterable"),
    ],
)
def test_a_file_of_something_else_is_left_aside(change: dict[str, Any], says: str) -> None:
    path = tiles.keep(GPU, 256, {"a"}, {"a": (FAST, 1.1)})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(UserWarning, match=says):
        assert tuned.read_own(GPU) == {}
    with pytest.warns(UserWarning, match="shipped tiles serve"):
        tiles.keep(GPU, 256, {"a"}, {"a": (OTHER, 1.1)})
    assert tuned.read_own(GPU) == {("a", 256): OTHER}


def test_a_damaged_file_and_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tiles.keep(GPU, 256, {"a"}, {})
    path.write_text("{")
    with pytest.warns(UserWarning, match="is not read"):
        assert tuned.read_own(GPU) == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MSATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="MSATTN_CACHE names another folder"), pytest.warns(UserWarning, match="is not read"):
        tiles.keep(GPU, 256, {"a"}, {})


def test_a_write_that_fails_leaves_the_old_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tiles.keep(GPU, 256, {"a"}, {"a": (FAST, 1.1)})
    monkeypatch.setattr(tiles.os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        tiles.keep(GPU, 256, {"a"}, {"a": (OTHER, 1.1)})
    assert tuned.read_own(GPU) == {("a", 256): FAST}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_break_even(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msattn.trainer.models.break_even.BREAK_EVEN", {90: {0.5: 9000, 0.9: 3000}})
    device = torch.device("cuda")
    assert [break_even(sparsity, device) for sparsity in (0.5, 0.8, 0.9, 0.99)] == [9000, 9000, 3000, 3000]
    assert break_even(0.4, device) > 2**31, "at no length"
    assert break_even(0.9, torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (10, 0))
    assert break_even(0.9, device) == 3000
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (8, 0))
    assert break_even(0.9, device) == 0


def test_the_shipped_lengths_fall_as_sparsity_rises() -> None:
    for measured in BREAK_EVEN.values():
        lengths = [measured[sparsity] for sparsity in sorted(measured)]
        assert lengths == sorted(lengths, reverse=True)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Path]:
    """``bench.tune`` on a machine with a GPU whose sweep is made up: one tile is twice as fast."""
    (blank,) = bench.measure(
        "merge_states",
        bench.Shape(96, q_heads=2, kv_heads=1, head_size=16, dtype=torch.float32, device="cpu"),
        bench.Options([96], peers=()),
    )

    def sweep(operation: str, shape: bench.Shape, options: bench.Options) -> Iterator[bench.BenchRow]:
        yield replace(blank, variant="shipped", ms=2.0, device=GPU)
        for kernel, tile in bench.to_try(operation, options.backward):
            fast = (kernel, tile) == ("block_sparse_attention_dq", Tile(32, 64, 4, 2))
            yield replace(blank, variant=f"{kernel} {'-'.join(map(str, tile))}", ms=1.0 if fast else 2.0, compile_s=1.5)

    monkeypatch.setattr(bench, "sweep", sweep)
    problem = command._problem

    def on_gpu(cfg: Any) -> Any:
        shape, options = problem(cfg)
        return replace(shape, device="cuda"), options

    monkeypatch.setattr(command, "_problem", on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: GPU)

    def tune(*overrides: str) -> Path:
        cfg = compose("bench", [f"outputs='{folder}'", "device=cpu", "bench.tune=true", *overrides])
        cfg.folder.mkdir(parents=True)  # where Hydra has made it
        return run(cfg)

    return tune


def test_the_command_keeps_what_is_faster(swept: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    results = swept("op=block_sparse_attention", "bench.direction=backward", "bench.dtype=bfloat16")
    assert "compile_s" in (results / "backward-sweep-nvidia-h200.csv").read_text()
    assert tuned.read_own(GPU) == {("block_sparse_attention_dq", 256): Tile(32, 64, 4, 2)}
    shown = capsys.readouterr().out
    assert "block_sparse_attention_dq: 32-64-4-2-1, 2.000 x the speed of the shipped tile" in shown
    assert "block_sparse_attention_dkv: the shipped tile stays" in shown
    assert "nvidia-h200.json" in shown.replace("\n", "")


def test_nothing_is_kept_where_the_shipped_tiles_have_no_time(
    swept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(operation: str, shape: bench.Shape, options: bench.Options) -> Iterator[bench.BenchRow]:
        for row in whole(operation, shape, options):
            yield replace(row, ms=None, note="absent: out of memory") if row.variant == "shipped" else row

    tiles.keep(GPU, 256, set(), {"block_sparse_attention_dq": (OTHER, 1.1)})
    whole = bench.sweep
    monkeypatch.setattr(bench, "sweep", sweep)
    with pytest.raises(UserError, match="no tile is kept; the shipped ones at 96 keys, absent: out of memory"):
        swept("op=block_sparse_attention", "bench.direction=backward", "bench.dtype=bfloat16")
    assert tuned.read_own(GPU) == {("block_sparse_attention_dq", 256): OTHER}, "what was tuned before stays"


def test_what_cannot_be_tuned(swept: Callable[..., Path]) -> None:
    for overrides, says in (
        (["op=flash_decode", "bench.dtype=bfloat16"], "chooses its tiles by shape"),
        (["op=merge_states", "bench.dtype=bfloat16"], "has no tiles to try"),
        (["op=maxpool_attention", "bench.dtype=float32"], "bench.dtype is bfloat16 or float16"),
    ):
        with pytest.raises(UserError, match=says):
            swept(*overrides)

"""The user's tile file: saved for one GPU and Triton version, used before the shipped tiles,
ignored if damaged.
"""

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
from msattn.trainer.commands.bench import bench as run
from msattn.trainer.commands.bench import save_tiles
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError
from msattn.trainer.models.break_even import prefill_break_even

GPU = "NVIDIA H200"
FAST, OTHER = Tile(32, 64, 4, 2), Tile(16, 32, 8, 5, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes PyTorch report an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))
    tuned._user_tiles_of.cache_clear()
    yield
    tuned._user_tiles_of.cache_clear()


def test_path_of_the_tile_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.user_tiles_path(GPU) == folder / "cache/tiles/nvidia-h200.json"
    monkeypatch.delenv("MSATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert tuned.user_tiles_path(GPU) == Path("/caches/msattn/tiles/nvidia-h200.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned.user_tiles_path(GPU) == Path.home() / ".cache/msattn/tiles/nvidia-h200.json"


def test_user_tiles_come_before_shipped_ones(gpu: None) -> None:
    shipped = tuned.pick("maxpool_attention", 128, torch.bfloat16, 90)
    assert shipped == tuned.TILES["maxpool_attention", 256, 90]
    save_tiles(GPU, 256, {"maxpool_attention"}, {"maxpool_attention": (FAST, 1.1)})
    assert tuned.pick("maxpool_attention", 128, torch.bfloat16, 90) == shipped, (
        "read once per process"
    )
    tuned._user_tiles_of.cache_clear()
    assert tuned.pick("maxpool_attention", 128, torch.bfloat16, 90) == FAST
    assert (
        tuned.pick("maxpool_attention", 256, torch.bfloat16, 90)
        == tuned.TILES["maxpool_attention", 512, 90]
    )
    assert (
        tuned.pick("maxpool_attention", 128, torch.float32, 90)
        == tuned.FULL_PRECISION["maxpool_attention"]
    )
    assert tuned.pick("bucket_sums", 128, torch.bfloat16, 90) == tuned.TILES["bucket_sums", 256, 90]


def test_entries_of_other_kernels_and_head_sizes_remain() -> None:
    save_tiles(GPU, 256, {"a", "b"}, {"a": (FAST, 1.1), "b": (OTHER, 1.2)})
    save_tiles(GPU, 512, {"a"}, {"a": (OTHER, 1.3)}, commit="abc")
    path = save_tiles(GPU, 256, {"b"}, {})
    assert tuned.read_user_tiles(GPU) == {("a", 256): FAST, ("a", 512): OTHER}
    document = json.loads(path.read_text())
    assert document["format"] == tuned.FORMAT
    assert document["gpu"] == GPU
    assert (
        document["tiles"][1] | {"kernel": "a", "faster": 1.3, "commit": "abc"}
        == document["tiles"][1]
    )
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triton": "0.1"}, "written for triton=0.1, this is triton"),
        ({"format": 0}, f"written for format=0, this is format={tuned.FORMAT}"),
        ({"tiles": [{"kernel": "a", "head_bytes": 256}]}, "rows"),
        (None, "is ignored"),
    ],
)
def test_file_with_another_header_or_content_is_ignored(
    change: dict[str, Any] | None, message: str
) -> None:
    path = save_tiles(GPU, 256, {"a"}, {"a": (FAST, 1.1)})
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(UserWarning, match=message):
        assert tuned.read_user_tiles(GPU) == {}
    with pytest.warns(UserWarning, match="the shipped tiles are used"):
        save_tiles(GPU, 256, {"a"}, {"a": (OTHER, 1.1)})
    assert tuned.read_user_tiles(GPU) == {("a", 256): OTHER}


def test_an_unwritable_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MSATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set MSATTN_CACHE to another folder"):
        save_tiles(GPU, 256, {"a"}, {})


def test_break_even_length_by_sparsity_and_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msattn.trainer.models.break_even.BREAK_EVEN", {90: {0.5: 9000, 0.9: 3000}})
    device = torch.device("cuda")
    assert [prefill_break_even(sparsity, device) for sparsity in (0.5, 0.8, 0.9, 0.99)] == [
        9000,
        9000,
        3000,
        3000,
    ]
    assert prefill_break_even(0.4, device) > 2**31, "never at this sparsity"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (10, 0))
    assert prefill_break_even(0.9, device) == 3000
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (8, 0))
    assert prefill_break_even(0.9, device) == 0


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Path]:
    """Runs ``bench.tune`` as on a GPU, with a fake sweep in which one tile is twice as fast."""
    (blank,) = bench.measure(
        "merge_states",
        bench.Shape(96, q_heads=2, kv_heads=1, head_size=16, dtype=torch.float32, device="cpu"),
        bench.Options([96], peers=()),
    )

    def sweep(
        operation: str, shape: bench.Shape, options: bench.Options
    ) -> Iterator[bench.BenchRow]:
        yield replace(blank, variant="shipped", ms=2.0, device=GPU)
        for kernel, tile in bench.list_candidates(operation, options.backward):
            fast = (kernel, tile) == ("block_sparse_attention_dq", Tile(32, 64, 4, 2))
            yield replace(
                blank,
                variant=f"{kernel} {'-'.join(map(str, tile))}",
                ms=1.0 if fast else 2.0,
                compile_s=1.5,
            )

    monkeypatch.setattr(bench, "sweep", sweep)
    problem = command._problem

    def on_gpu(cfg: Any) -> Any:
        shape, options = problem(cfg)
        return replace(shape, device="cuda"), options

    monkeypatch.setattr(command, "_problem", on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: GPU)

    def tune(*overrides: str) -> Path:
        cfg = compose(
            "bench",
            [f"outputs='{folder}'", "device=cpu", "tracker=none", "bench.tune=true", *overrides],
        )
        cfg.folder.mkdir(parents=True)  # Hydra makes the folder in a real run
        return run(cfg)

    return tune


@pytest.mark.slow
def test_command_saves_the_faster_tiles(
    swept: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    results = swept("op=block_sparse_attention", "bench.direction=backward", "bench.dtype=bfloat16")
    assert "compile_s" in (results / "backward-sweep-nvidia-h200.csv").read_text()
    assert tuned.read_user_tiles(GPU) == {("block_sparse_attention_dq", 256): Tile(32, 64, 4, 2)}
    shown = capsys.readouterr().out
    assert "block_sparse_attention_dq: 32-64-4-2-1, 2.000 x the speed of the shipped tile" in shown
    assert "block_sparse_attention_dkv: shipped tile kept" in shown
    assert "nvidia-h200.json" in shown.replace("\n", "")


def test_no_tile_is_saved_if_the_shipped_ones_have_no_time(
    swept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(
        operation: str, shape: bench.Shape, options: bench.Options
    ) -> Iterator[bench.BenchRow]:
        for row in whole(operation, shape, options):
            yield (
                replace(row, ms=None, note="not timed: out of memory")
                if row.variant == "shipped"
                else row
            )

    save_tiles(GPU, 256, set(), {"block_sparse_attention_dq": (OTHER, 1.1)})
    whole = bench.sweep
    monkeypatch.setattr(bench, "sweep", sweep)
    with pytest.raises(
        UserError, match="no tile is saved; the shipped tiles at 96 keys: not timed: out of memory"
    ):
        swept("op=block_sparse_attention", "bench.direction=backward", "bench.dtype=bfloat16")
    assert tuned.read_user_tiles(GPU) == {("block_sparse_attention_dq", 256): OTHER}, (
        "earlier tiles remain"
    )


def test_operations_that_cannot_be_tuned(swept: Callable[..., Path]) -> None:
    for overrides, message in (
        (["op=flash_decode", "bench.dtype=bfloat16"], "chooses its tiles by shape"),
        (["op=merge_states", "bench.dtype=bfloat16"], "has no candidate tiles"),
        (
            ["op=maxpool_attention", "bench.dtype=float32"],
            "bench.dtype must be bfloat16 or float16",
        ),
    ):
        with pytest.raises(UserError, match=message):
            swept(*overrides)

"""``msattn bench``: times a kernel and its peers; writes a table and a figure."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from msattn.kernels import bench as kernels
from msattn.kernels import tuned
from msattn.kernels.bench import SHIPPED, BenchRow, Options, ReferenceMismatch, Shape
from msattn.kernels.tuned import Tile
from msattn.trainer.commands import bench_report
from msattn.trainer.config import BenchRunConfig
from msattn.trainer.errors import CheckFailed, UserError, write_error
from msattn.trainer.evaluate.report.context import CPU_NOTE, context
from msattn.trainer.models.devices import resolve_device, resolve_dtype
from msattn.trainer.progress import duration, report
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_file, written_rows
from msattn.trainer.training.tracker import Tracker

DEFAULT_SIZES = {  # lengths; query heads, key/value heads
    "cuda": ([8192, 32768, 131072], [32, 8]),
    "cpu": ([512, 1024], [8, 2]),
}


def bench(cfg: BenchRunConfig) -> Path:
    """Measures ``cfg.op`` on this device, writes the results to ``outputs/bench/<op>`` and returns
    that folder.

    The files are ``<direction>-<device>.csv`` and ``.png``, or ``<direction>-sweep-<device>`` for a
    sweep over tiles. They replace earlier results of the same name. With ``bench.tune``, tiles that
    are faster than the shipped ones are saved for this user and GPU. Rows are first written to
    ``<name>.partial.csv``, which remains if the run is interrupted. Raises CheckFailed, without
    results, if the operation disagrees with its reference, at a small size or at a timed size.
    """
    shape, options = _problem(cfg)
    sweep = cfg.bench.sweep or cfg.bench.tune
    if sweep:
        _check_sweep(cfg, shape, options)
    console = Console()
    notes = [CPU_NOTE] if shape.device == "cpu" else []
    about = context(f"{cfg.op} on this machine", asdict(cfg), {}, notes, torch.device(shape.device))
    name = "-".join(
        [cfg.bench.direction, *(["sweep"] if sweep else []), _device_name(shape.device)]
    )
    partial = cfg.folder / f"{name}.partial.csv"
    with locked(cfg.folder / name):
        rows = _measure(cfg, shape, options, partial, about.commit, console)
        _publish(partial, cfg.folder / name, rows, notes)
    bench_report.print_report(rows, notes, console)
    console.print(
        f"Results: [bold]{cfg.folder / name}.csv[/bold], [bold].png[/bold]", soft_wrap=True
    )
    _track(cfg, name, rows)
    if cfg.bench.tune:
        _save_faster_tiles(rows, cfg.op, shape, options, about.commit, console)
    return cfg.folder


def _track(cfg: BenchRunConfig, name: str, rows: list[BenchRow]) -> None:
    """Records the times in ``runs/<name>``, and the table and the figure with them."""
    work, run_name = cfg.folder / "runs" / name, f"{cfg.op}-{name}"
    with Tracker.of_job(cfg, "bench", folder=work, run_name=run_name, after_work=True) as tracker:
        tracker.image("times", cfg.folder / f"{name}.png")
        tracker.table("results", [row.record() for row in rows])
        tracker.summary(
            {
                f"{row.length}/{bench_report.label(row)}/ms": row.ms
                for row in rows
                if row.ms is not None
            }
        )


def _measure(
    cfg: BenchRunConfig,
    shape: Shape,
    options: Options,
    partial: Path,
    commit: str | None,
    console: Console,
) -> list[BenchRow]:
    """Returns all rows; after each one, ``partial`` is rewritten with the rows so far."""
    rows: list[BenchRow] = []
    state = f"{cfg.op}: comparing it with its reference"
    began = time.monotonic()

    def describe() -> str:
        return (
            "" if console.is_terminal else f"{state}, {duration(time.monotonic() - began)} so far"
        )

    measured = (kernels.sweep if cfg.bench.sweep or cfg.bench.tune else kernels.measure)(
        cfg.op, shape, options
    )
    try:
        with console.status(state) as status, report(describe):
            for row in written_rows(
                measured, partial, lambda row: row.record() | {"commit": commit or ""}
            ):
                rows.append(row)
                state = f"{cfg.op}: {row.length:,} keys, {bench_report.label(row)}: done"
                status.update(state)
    except ReferenceMismatch as error:
        kept = f"{len(rows)} rows measured before are in {partial}" if rows else "nothing was timed"
        raise CheckFailed(f"{cfg.op} disagrees with its reference, {kept}: {error}") from error
    return rows


def _check_sweep(cfg: BenchRunConfig, shape: Shape, options: Options) -> None:
    """Raises UserError if the operation has no tiles to sweep or to tune here."""
    key = "bench.tune=true" if cfg.bench.tune else "bench.sweep=true"
    if shape.device == "cpu":
        raise UserError(f"{key}: needs a GPU, since only Triton kernels have tiles")
    swept = {kernel for kernel, _ in kernels.list_candidates(cfg.op, options.backward)}
    if not swept:
        raise UserError(f"{key}: {cfg.op} has no candidate tiles")
    if cfg.bench.tune and not swept <= set(tuned.FULL_PRECISION):
        raise UserError(
            f"{key}: {cfg.op} chooses its tiles by shape; bench.sweep=true shows their times"
        )
    if cfg.bench.tune and shape.dtype.itemsize != 2:
        raise UserError(
            f"{key}: bench.dtype must be bfloat16 or float16; tiles of float32 cannot be chosen"
        )


def _save_faster_tiles(
    rows: list[BenchRow],
    operation: str,
    shape: Shape,
    options: Options,
    commit: str | None,
    console: Console,
) -> None:
    """Saves the tiles that were faster than the shipped ones, which must have a time at each
    length, and prints them.
    """
    from msattn.kernels.common.primitives import padded_head  # imports Triton

    for row in rows:
        if row.variant == SHIPPED and row.ms is None:
            raise UserError(
                f"bench.tune=true: no tile is saved; the shipped tiles at {row.length:,} keys: "
                f"{row.note}"
            )
    faster = kernels.faster_tiles(operation, options.backward, rows)
    swept = {kernel for kernel, _ in kernels.list_candidates(operation, options.backward)}
    size = tuned.head_bytes(padded_head(shape.head_size), shape.dtype)
    path = save_tiles(rows[0].device, size, swept, faster, commit)
    for kernel in sorted(swept):
        tile, speedup = faster.get(kernel, (None, 1.0))
        chosen = (
            f"{'-'.join(map(str, tile))}, {speedup:.3f} x the speed of the shipped tile"
            if tile
            else "shipped tile kept"
        )
        console.print(f"{kernel}: {chosen}", markup=False, soft_wrap=True)
    console.print(f"Tiles: [bold]{path}[/bold]", soft_wrap=True)


def save_tiles(
    gpu: str,
    head_bytes: int,
    swept: set[str],
    faster: Mapping[str, tuple[Tile, float]],
    commit: str | None = None,
) -> Path:
    """Replaces the entries of the swept kernels in the user's file for ``gpu``, and returns the
    file.

    ``faster`` is ``{kernel: (tile, speedup over the shipped tile)}``; swept kernels that are not in
    it return to their shipped tile. Entries of other kernels and head sizes (``tuned.head_bytes``)
    remain, unless they are of another version of Triton.
    """
    path = tuned.user_tiles_path(gpu)
    new = [
        {
            "kernel": kernel,
            "head_bytes": head_bytes,
            **tile._asdict(),
            "faster": round(speedup, 3),
            "commit": commit,
        }
        for kernel, (tile, speedup) in faster.items()
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            earlier = (
                json.loads(path.read_text(encoding="utf-8"))["tiles"]
                if tuned.read_user_tiles(gpu)
                else []
            )
            kept = [
                row
                for row in earlier
                if not (row["kernel"] in swept and row["head_bytes"] == head_bytes)
            ]
            document = (
                json.dumps({**tuned.user_tiles_header(gpu), "tiles": kept + new}, indent=1) + "\n"
            )
            with replace_file(path) as temporary:
                temporary.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); set MSATTN_CACHE to another folder"
        ) from error
    return path


def _problem(cfg: BenchRunConfig) -> tuple[Shape, Options]:
    """Returns the shape of the problem and the measurements to make; sizes that are null depend on
    the device.
    """
    device, chosen = resolve_device(cfg.device), cfg.bench
    lengths, heads = DEFAULT_SIZES[device.type]
    q_heads, kv_heads = chosen.heads or heads
    shape = Shape(
        length=0,
        batch=chosen.batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=chosen.head_size,
        dtype=resolve_dtype(chosen.dtype, device),
        device=device.type,
        seed=cfg.seed,
    )
    options = Options(
        lengths=chosen.lengths or lengths,
        sparsities=chosen.sparsities,
        queries=chosen.queries,
        kernels=[tuple(map(int, kernel.split("x"))) for kernel in chosen.kernels],
        backward=chosen.direction == "backward",
        softcap=chosen.softcap,
        fp8=chosen.fp8,
        peers=chosen.peers,
    )
    return shape, options


def _device_name(device: str) -> str:
    """Returns the device as a part of a file name: ``cpu``, ``nvidia-h200``."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _publish(partial: Path, results: Path, rows: list[BenchRow], notes: list[str]) -> None:
    """Writes the figure and renames the complete table; ``results`` has no suffix."""
    figure = bench_report.figure(rows, notes)
    try:
        with replace_file(results.with_name(f"{results.name}.png")) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        partial.replace(results.with_name(f"{results.name}.csv"))
    except OSError as error:
        raise write_error(
            results, error, kept=f"the rows are in {partial}", resumes=False
        ) from error

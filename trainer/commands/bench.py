"""``msattn bench``: one kernel beside its peers on this machine, as a table, a CSV file and a figure."""

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import BenchConfig, BenchRunConfig
from msattn.trainer.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from msattn.kernels.bench import BenchRow, Options, Shape

SIZES = {  # lengths; query heads, key/value heads
    "cuda": ([8192, 32768, 131072], [32, 8]),
    "cpu": ([512, 1024], [8, 2]),
}
SPARE = ("memory", "quartiles", "x eager", "compile", "error", "rate")  # a narrow terminal goes without, in this order
COLORS = {  # Okabe and Ito's, which stay apart for colour-blind eyes
    "msattn": "#D55E00",
    "flash": "#0072B2",
    "cudnn": "#009E73",
    "flex": "#CC79A7",
    "eager": "#7A7A7A",
    "efficient": "#56B4E9",
    "math": "#E69F00",
    "block_sparse": "#8C564B",
    "product": "#333333",
}
SHIPPED = "shipped"  # what a sweep calls the package's own tiles
OURS = ("msattn", SHIPPED)  # drawn stronger
MARKERS = "os^vDPX*<>"


def bench(cfg: BenchRunConfig) -> Path:
    """Measure ``cfg.op`` and write ``<direction>-<device>.csv`` and ``.png``; of a sweep over tiles ``<direction>-sweep-...``.

    With ``bench.tune`` the tiles that a sweep finds clearly faster are kept for this user and GPU. Rows go to
    ``....partial.csv`` as they come, where those of an interrupted run stay.

    Returns
    -------
    Path
        ``outputs/bench/<op>``, which holds the latest results of each device; earlier ones of the same name are replaced.

    Raises
    ------
    UserError
        No GPU for ``device=cuda``, a sweep without a GPU or over an operation without tiles to try, tuning of one that chooses
        tiles by shape or whose shipped tiles could not be timed, or a folder that cannot be written.
    CheckFailed
        If the operation disagrees with its reference, at a small size or at one that was timed: then there are no results.
    """
    from rich.console import Console

    from msattn.kernels import bench as kernels
    from msattn.trainer.evaluate.report.context import CPU_NOTE, context

    shape, options = _problem(cfg)
    sweep = cfg.bench.sweep or cfg.bench.tune
    if sweep:
        _check_sweep(cfg, shape, options)
    console = Console()
    notes = [CPU_NOTE] if shape.device == "cpu" else []
    about = context(f"{cfg.op} on this machine", asdict(cfg), {}, notes, _torch_device(shape.device))
    name = "-".join([cfg.bench.direction, *(["sweep"] if sweep else []), _device_name(shape.device)])
    partial = cfg.folder / f"{name}.partial.csv"
    rows: list[BenchRow] = []
    try:
        with console.status(f"{cfg.op}: checking it against its reference") as status:
            for row in (kernels.sweep if sweep else kernels.measure)(cfg.op, shape, options):
                rows.append(row)
                _write(partial, [row.record() | {"commit": about.commit or ""} for row in rows])
                status.update(f"{cfg.op}: {row.length:,} keys, {_label(row)}: done")
    except kernels.Disagreement as error:
        kept = f"{len(rows)} rows from before are in {partial}" if rows else "nothing was timed"
        raise CheckFailed(f"{cfg.op} disagrees with its reference, {kept}: {error}") from error
    except KeyboardInterrupt as stop:
        raise type(stop)(*([f"{len(rows)} rows are in {partial}"] if rows else [])) from stop
    _publish(partial, cfg.folder / name, figure(rows, notes))
    _show(rows, notes, console)
    console.print(f"Figures: [bold]{cfg.folder / name}.csv[/bold], [bold].png[/bold]", soft_wrap=True)
    if cfg.bench.tune:
        _keep(rows, cfg.op, shape, options, about.commit, console)
    return cfg.folder


def _check_sweep(cfg: BenchRunConfig, shape: "Shape", options: "Options") -> None:
    """Refuse what has no tiles to try, or to keep."""
    from msattn.kernels import bench as kernels
    from msattn.kernels import tuned

    key = "bench.tune=true" if cfg.bench.tune else "bench.sweep=true"
    if shape.device == "cpu":
        raise UserError(f"{key}: needs a GPU, whose kernels have tiles")
    tried = {kernel for kernel, _ in kernels.to_try(cfg.op, options.backward)}
    if not tried:
        raise UserError(f"{key}: {cfg.op} has no tiles to try")
    if cfg.bench.tune and not tried <= set(tuned.FULL_PRECISION):
        raise UserError(f"{key}: {cfg.op} chooses its tiles by shape; bench.sweep=true shows their times")
    if cfg.bench.tune and shape.dtype.itemsize != 2:
        raise UserError(f"{key}: bench.dtype is bfloat16 or float16, whose tiles can be chosen")


def _keep(
    rows: "Sequence[BenchRow]", operation: str, shape: "Shape", options: "Options", commit: str | None, console: "Console"
) -> None:
    """Keep the tiles that were clearly faster, and say which.

    Raises
    ------
    UserError : the shipped tiles have no time at a length, so that there is nothing to be faster than.
    """
    from msattn.kernels import bench as kernels
    from msattn.kernels import tuned
    from msattn.kernels.common.primitives import padded_head
    from msattn.trainer.commands import tiles

    for row in rows:
        if row.variant == SHIPPED and row.ms is None:
            raise UserError(f"bench.tune=true: no tile is kept; the shipped ones at {row.length:,} keys, {row.note}")
    found = kernels.fastest(operation, options.backward, rows)
    tried = {kernel for kernel, _ in kernels.to_try(operation, options.backward)}
    size = tuned.head_bytes(padded_head(shape.head_size), shape.dtype)
    path = tiles.keep(rows[0].device, size, tried, found, commit)
    for kernel in sorted(tried):
        tile, gain = found.get(kernel, (None, 1.0))
        said = f"{'-'.join(map(str, tile))}, {gain:.3f} x the speed of the shipped tile" if tile else "the shipped tile stays"
        console.print(f"{kernel}: {said}", markup=False, soft_wrap=True)
    console.print(f"Tiles: [bold]{path}[/bold]", soft_wrap=True)


def _problem(cfg: BenchRunConfig) -> "tuple[Shape, Options]":
    from msattn.kernels.bench import Shape
    from msattn.trainer.models.devices import resolve_device, resolve_dtype

    device, asked = resolve_device(cfg.device), cfg.bench
    lengths, heads = SIZES[device.type]
    q_heads, kv_heads = asked.heads or heads
    shape = Shape(
        length=0,
        batch=asked.batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=asked.head_size,
        dtype=resolve_dtype(asked.dtype, device),
        device=device.type,
        seed=cfg.seed,
    )
    return shape, _options(asked, asked.lengths or lengths)


def _options(asked: BenchConfig, lengths: Sequence[int]) -> "Options":
    from msattn.kernels.bench import Options

    kernels = [tuple(map(int, kernel.split("x"))) for kernel in asked.kernels]
    return Options(lengths, asked.sparsities, asked.queries, kernels, asked.direction == "backward", asked.peers)


def _torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _device_name(device: str) -> str:
    """The device as a part of a file's name: ``cpu``, ``nvidia-h200``."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else device
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _write(table: Path, records: list[dict[str, Any]]) -> None:
    """Write beside, then rename, whole each time: later rows may have columns of their own."""
    try:
        with TemporaryDirectory(dir=table.parent, prefix=".bench-") as scratch:
            beside = Path(scratch, table.name)
            with beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
                writer.writeheader()
                writer.writerows(records)
            os.replace(beside, table)
    except OSError as error:
        raise UserError(f"outputs={table.parent}: cannot be written ({error.strerror})") from error


def _publish(partial: Path, results: Path, drawn: "Figure") -> None:
    """Give the complete table its name, and the figure beside it: readers see the old results or the new, never a part."""
    folder = results.parent
    try:
        with TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
            image = Path(scratch, f"{results.name}.png")
            drawn.savefig(image, dpi=150)
            os.replace(image, folder / image.name)
        os.replace(partial, folder / f"{results.name}.csv")
    except OSError as error:
        raise UserError(f"outputs={folder}: cannot be written ({error.strerror})") from error


def figure(rows: "Sequence[BenchRow]", notes: Sequence[str] = ()) -> "Figure":
    """Time against length, both logarithmic, and the share of this machine's ceiling; a line a variant and setting."""
    from msattn.trainer.evaluate.report.plots import subplots

    timed = [row for row in rows if row.ms is not None]
    labels = list(dict.fromkeys(map(_label, timed)))
    drawn, (time, share) = subplots(1, 2, (11.5, max(4.3, 0.5 + 0.22 * len(labels))))
    for label in labels:
        points = sorted((row for row in timed if _label(row) == label), key=lambda row: row.length)
        style = _style(points[0], labels)
        lengths = [row.length for row in points]
        time.plot(lengths, [row.ms or 0 for row in points], label=label, **style)
        share.plot(lengths, [100 * (row.share or 0) for row in points], **style)
    ticks = sorted({row.length for row in timed})
    for axes in (time, share):
        axes.set(xscale="log", xlabel="keys")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    time.set(yscale="log", ylabel="time of one run (ms)")
    share.set(ylabel="share of the measured ceiling (%)", ylim=(0, None))
    if rows:
        drawn.suptitle(_title(rows[0]) + "".join(f"\n{note}" for note in notes), fontsize=10)
    drawn.legend(*time.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return drawn


def _style(row: "BenchRow", labels: Sequence[str]) -> dict[str, Any]:
    """A colour for a variant; a marker for a setting of it."""
    same = [label for label in labels if label.split(",")[0] == row.variant]
    return {
        "color": COLORS.get(row.variant, f"C{labels.index(_label(row)) % 10}"),
        "marker": MARKERS[same.index(_label(row)) % len(MARKERS)],
        "linestyle": "-" if row.variant in OURS else "--",
        "linewidth": 2.0 if row.variant in OURS else 1.2,
        "markersize": 5,
    }


def _title(row: "BenchRow") -> str:
    heads = f"{row.q_heads} query heads, {row.kv_heads} key/value heads of {row.head_size}"
    return f"{row.op}, {row.direction}: {row.dtype}, batch {row.batch}, {heads}; {row.device}"


def _label(row: "BenchRow") -> str:
    return f"{row.variant}, {row.setting}" if row.setting else row.variant


def _show(rows: "Sequence[BenchRow]", notes: Sequence[str], console: "Console") -> None:
    """The table, then what one has to know: the machine, and who is absent."""
    console.print(_table(rows, console.width))
    said = [f"{row.variant} at {row.length:,} keys, {row.note}" for row in rows if row.note]
    for note in (*notes, *dict.fromkeys(said)):
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def _ms(ms: float | None) -> str:
    assert ms is not None
    return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"


def _rate(row: "BenchRow") -> str:
    tera, unit = (row.tflops, "FLOP/s") if row.bound == "compute" else (row.tb_s, "B/s")
    assert tera is not None
    return f"{tera:.3g} T{unit}" if tera >= 1 else f"{1000 * tera:.3g} G{unit}"


def _table(rows: "Sequence[BenchRow]", width: int) -> "Table":
    from rich import box
    from rich.table import Table

    timed = [row for row in rows if row.ms is not None]
    columns = {
        "keys": [f"{row.length:,}" for row in timed],
        "variant": [_label(row) for row in timed],
        "ms": [_ms(row.ms) for row in timed],
        "quartiles": [f"{_ms(row.q1)} – {_ms(row.q3)}" for row in timed],
        "rate": [_rate(row) for row in timed],
        "share": [f"{row.share:.1%}" for row in timed],
        "error": [f"{row.error:.1e}" if row.error is not None else "" for row in timed],
        "memory": [f"{row.memory_gb:.3g} GB" if row.memory_gb is not None else "" for row in timed],
        "compile": [f"{row.compile_s:.1f} s" if row.compile_s is not None else "" for row in timed],
    }
    for peer in dict.fromkeys(peer for row in timed for peer in row.times):
        columns[f"x {peer}"] = [f"{row.times[peer]:.3g}" if peer in row.times else "" for row in timed]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    for name in SPARE:
        if sum(3 + max(map(len, [header, *cells])) for header, cells in columns.items()) > width:
            columns.pop(name, None)
    title = (
        f"{_title(rows[0])}\nshare: of what this machine was measured to do; error: of a row, over its size; x: times faster"
        if rows
        else ""
    )
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        shown.add_column(name, justify="left" if name == "variant" else "right", no_wrap=name != "variant")
    before = 0
    for row, (keys, *cells) in zip(timed, zip(*columns.values(), strict=True), strict=True):
        if before and row.length != before:
            shown.add_section()
        shown.add_row("" if row.length == before else keys, *cells, style="bold" if row.variant in OURS else None)
        before = row.length
    return shown

"""Terminal table and figure of benchmark rows."""

from collections.abc import Callable, Sequence
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from msattn.kernels.bench import SHIPPED, BenchRow
from msattn.trainer.evaluate.report.tables import filled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = ("msattn", SHIPPED)  # emphasized in the table and in the figure
COLORS = {  # Okabe and Ito's palette, distinguishable with color vision deficiency, and two more
    "msattn": "#D55E00",
    SHIPPED: "#A63603",
    "flash": "#0072B2",
    "cudnn": "#009E73",
    "flex": "#CC79A7",
    "eager": "#7A7A7A",
    "efficient": "#56B4E9",
    "math": "#E69F00",
    "block_sparse": "#8C564B",
    "product": "#333333",
}
MARKERS = "os^vDPX*<>"


def label(row: BenchRow) -> str:
    return f"{row.variant}, {row.setting}" if row.setting else row.variant


def title(row: BenchRow) -> str:
    heads = f"{row.q_heads} query heads, {row.kv_heads} key/value heads of {row.head_size}"
    return f"{row.op}, {row.direction}: {row.dtype}, batch {row.batch}, {heads}; {row.device}"


def print_report(rows: Sequence[BenchRow], notes: Sequence[str], console: Console) -> None:
    console.print(table(rows))
    row_notes = [f"{row.variant} at {row.length:,} keys, {row.note}" for row in rows if row.note]
    for note in (*notes, *dict.fromkeys(row_notes)):
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def _milliseconds(ms: float | None) -> str:
    assert ms is not None
    return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"


def _rate(row: BenchRow) -> str:
    tera, unit = (row.tflops, "FLOP/s") if row.bound == "compute" else (row.tb_s, "B/s")
    assert tera is not None
    return f"{tera:.3g} T{unit}" if tera >= 1 else f"{1000 * tera:.3g} G{unit}"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


COLUMNS: dict[str, Callable[[BenchRow], str]] = {
    "keys": lambda row: f"{row.length:,}",
    "variant": label,
    "ms": lambda row: _milliseconds(row.ms),
    "rate": _rate,
    "share": lambda row: f"{row.share:.1%}",
    "error": lambda row: _optional(row.error, "{:.1e}"),
}
TEXT_COLUMNS = ("variant",)
LEGEND = (
    "share: of this machine's measured peak; error: relative error of a row; x: speedup over a peer"
)


def table(rows: Sequence[BenchRow]) -> Table:
    """Returns the rows that have a time as a table with a section for each length."""
    timed = [row for row in rows if row.ms is not None]
    columns = {header: [cell(row) for row in timed] for header, cell in COLUMNS.items()}
    for peer in dict.fromkeys(peer for row in timed for peer in row.times):
        columns[f"x {peer}"] = [_optional(row.times.get(peer), "{:.3g}") for row in timed]
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    heading = f"{title(rows[0])}\n{LEGEND}" if rows else ""
    ours = [row.variant in OURS for row in timed]
    return filled(
        heading, columns, TEXT_COLUMNS, [row.length for row in timed], ours, sections=True
    )


def figure(rows: Sequence[BenchRow], notes: Sequence[str]) -> "Figure":
    """Plots time and share of peak by length, one line per variant and setting."""
    from msattn.trainer.evaluate.report.style import log_ticks, subplots

    timed = [row for row in rows if row.ms is not None]
    lines: dict[str, list[BenchRow]] = {}
    for row in sorted(timed, key=lambda row: row.length):
        lines.setdefault(label(row), []).append(row)
    styles = line_styles(timed)
    drawn, (time, share) = subplots(1, 2, (11.5, max(4.3, 0.5 + 0.22 * len(styles))))
    for name, style in styles.items():
        lengths = [row.length for row in lines[name]]
        time.plot(lengths, [row.ms or 0 for row in lines[name]], label=name, **style)
        share.plot(lengths, [100 * (row.share or 0) for row in lines[name]], **style)
    for axes in (time, share):
        log_ticks(axes, sorted({row.length for row in timed}), "{:,}".format, xlabel="keys")
    time.set(yscale="log", ylabel="time of one run (ms)")
    share.set(ylabel="share of the measured peak (%)", ylim=(0, None))
    if rows:
        drawn.suptitle("\n".join([title(rows[0]), *notes]), fontsize=10)
    drawn.legend(
        *time.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8
    )
    return drawn


def line_styles(rows: Sequence[BenchRow]) -> dict[str, dict[str, Any]]:
    """Returns the style of each line: its own color, and one marker per setting.

    The first line of a variant in :data:`COLORS` has that color. The other lines have evenly
    spaced hues.
    """
    settings = list(dict.fromkeys(row.setting for row in rows))
    lines = {label(row): row for row in rows}
    first = {row.variant: name for name, row in reversed(lines.items())}
    others = [
        name
        for name, row in lines.items()
        if row.variant not in COLORS or first[row.variant] != name
    ]
    styles = {}
    for name, row in lines.items():
        number, ours = settings.index(row.setting), row.variant in OURS
        position = others.index(name) / len(others) if name in others else None
        styles[name] = {
            "color": COLORS[row.variant] if position is None else hsv_to_rgb(position, 0.85, 0.75),
            "marker": MARKERS[number] if number < len(MARKERS) else f"${number}$",
            "linestyle": "-" if ours else "--",
            "linewidth": 2.0 if ours else 1.2,
            "markersize": 5,
        }
    return styles

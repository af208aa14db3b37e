"""Rows to files: ``results.json``, ``results.csv``, figures, and one HTML page that holds them all."""

import csv
import json
import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.evaluate import plots
from msattn.trainer.evaluate.page import page
from msattn.trainer.evaluate.row import Row

if TYPE_CHECKING:
    import torch

PACKAGES = ("msattn", "torch", "triton", "transformers", "numpy")
KEPT = ("path", "kind", "content_hash", "created", "seed")  # of an artifact's manifest


@dataclass(frozen=True)
class Context:
    """What every file says besides its rows: where, with what and from what the figures come.

    Attributes
    ----------
    title : of the page.
    machine, versions : facts by name.
    commit : of the checkout that ran; None outside one.
    config : the resolved configuration, seeds included.
    artifacts : path, hash and age of what was measured, by kind.
    notes : what a reader has to know first.
    created : when, UTC.
    """

    title: str
    machine: dict[str, str]
    versions: dict[str, str]
    commit: str | None
    config: dict[str, Any]
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def context(
    title: str, config: dict[str, Any], manifests: dict[str, dict[str, Any]], notes: list[str], device: "torch.device"
) -> Context:
    """Look at the machine, the versions and the checkout."""
    from importlib.metadata import distributions, version

    installed = {distribution.metadata["Name"] for distribution in distributions()}
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if name in installed}
    artifacts = {kind: {key: manifest[key] for key in KEPT if key in manifest} for kind, manifest in manifests.items()}
    return Context(title, _machine(device), versions, _commit(), config, artifacts, notes)


def _machine(device: "torch.device") -> dict[str, str]:
    import torch

    system = f"{platform.system()} {platform.machine()}"
    facts = {"system": system, "threads": str(torch.get_num_threads()), "device": device.type}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return facts


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def write(folder: Path, rows: Sequence[Row], about: Context) -> dict[str, Path]:
    """Write everything into ``folder``; return the figures by name."""
    rows = list(rows)
    figures = plots.draw(rows, folder)
    document = finite({**asdict(about), "rows": [asdict(row) for row in rows]})
    (folder / "results.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _write_csv(folder / "results.csv", rows)
    (folder / "report.html").write_text(page(rows, asdict(about), figures), encoding="utf-8")
    return figures


def finite(value: Any) -> Any:
    """``value`` for JSON, which has no infinity: null in its place."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_csv(path: Path, rows: list[Row]) -> None:
    """One line a row: its fields, the interval as two columns, and of ``extra`` what is one number or word."""
    lines = []
    for row in rows:
        line = asdict(row)
        extra = line.pop("extra")
        line["interval_low"], line["interval_high"] = line.pop("interval") or (None, None)
        lines.append(line | {key: value for key, value in extra.items() if isinstance(value, int | float | str)})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)))
        writer.writeheader()
        writer.writerows(lines)

"""The tiles that a user's GPU runs fastest, kept where the kernels look for them (:mod:`msattn.kernels.tuned`)."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from msattn.kernels import tuned
from msattn.kernels.tuned import Tile
from msattn.trainer.errors import UserError


@dataclass(frozen=True)
class Tuned:
    """One kernel's choice in the user's file; ``faster`` is how many times faster than shipped, ``commit`` what was timed."""

    kernel: str
    head_bytes: int
    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    faster: float
    commit: str | None


def keep(
    gpu: str, head_bytes: int, tried: set[str], found: Mapping[str, tuple[Tile, float]], commit: str | None = None
) -> Path:
    """Replace what the user's file for ``gpu`` says of the kernels that were ``tried``.

    Parameters
    ----------
    head_bytes : which heads the tiles are for, as ``tuned.head_bytes`` counts.
    found : of the kernels with a tile clearly faster than the shipped one, that tile and how many times; the others go back
        to shipped tiles.

    Returns
    -------
    Path
        The file. What other sizes and kernels have there stays, unless it was made with another version of Triton.

    Raises
    ------
    UserError : it cannot be written.
    """
    path = tuned.own_path(gpu)
    new = [
        asdict(Tuned(kernel, head_bytes, *tile, faster=round(gain, 3), commit=commit)) for kernel, (tile, gain) in found.items()
    ]
    try:
        rows = [row for row in _rows(gpu, path) if not (row["kernel"] in tried and row["head_bytes"] == head_bytes)]
        document = json.dumps({**tuned.own_key(gpu), "tiles": rows + new}, indent=1) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".tiles-") as scratch:
            beside = Path(scratch, path.name)
            beside.write_text(document, encoding="utf-8")
            os.replace(beside, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); MSATTN_CACHE names another folder") from error
    return path


def _rows(gpu: str, path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text(encoding="utf-8"))["tiles"] if tuned.read_own(gpu) else []

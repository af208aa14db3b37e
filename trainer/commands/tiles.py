"""Writes the user's tile file, which :mod:`msattn.kernels.tuned` reads."""

import json
from collections.abc import Mapping
from pathlib import Path

from msattn.kernels import tuned
from msattn.kernels.tuned import Tile
from msattn.trainer.errors import UserError
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_file


def save_tiles(
    gpu: str, head_bytes: int, swept: set[str], faster: Mapping[str, tuple[Tile, float]], commit: str | None = None
) -> Path:
    """Replaces the entries of the swept kernels in the user's file for ``gpu``, and returns the file.

    ``faster`` is ``{kernel: (tile, speedup over the shipped tile)}``; swept kernels that are not in it return to their shipped
    tile. Entries of other kernels and head sizes (``tuned.head_bytes``) remain, unless they are of another version of Triton.
    """
    path = tuned.user_tiles_path(gpu)
    new = [
        {"kernel": kernel, "head_bytes": head_bytes, **tile._asdict(), "faster": round(speedup, 3), "commit": commit}
        for kernel, (tile, speedup) in faster.items()
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            found = json.loads(path.read_text(encoding="utf-8"))["tiles"] if tuned.read_user_tiles(gpu) else []
            kept = [row for row in found if not (row["kernel"] in swept and row["head_bytes"] == head_bytes)]
            document = json.dumps({**tuned.user_tiles_header(gpu), "tiles": kept + new}, indent=1) + "\n"
            with replace_file(path) as temporary:
                temporary.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); set MSATTN_CACHE to another folder") from error
    return path

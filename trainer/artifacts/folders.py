"""Folders of artifacts: their places under ``outputs``, and the resolution of paths and Hub ids."""

import os
import re
from pathlib import Path

from msattn.trainer.artifacts.hub import download
from msattn.trainer.artifacts.kinds import KINDS
from msattn.trainer.artifacts.manifest import MANIFEST
from msattn.trainer.config import RunConfig
from msattn.trainer.config.values import UNPRINTABLE, require, shown
from msattn.trainer.errors import UserError
from msattn.trainer.storage.replace import current_folder

# the artifacts of the embedded model, a folder of each kind
SHIPPED = Path(__file__).parents[1] / "embedded" / "artifacts"


def default_artifact(cfg: RunConfig, kind: str) -> Path | None:
    """Returns the artifact of the configured model and name, or None if there is none.

    The embedded model falls back on the artifacts that ship with the package, unless a ``name`` is
    given.
    """
    own = cfg.folder / kind
    if os.path.exists(current_folder(own)):
        return own
    shipped = cfg.model.is_embedded and cfg.name == RunConfig.name and os.path.isdir(SHIPPED / kind)
    return SHIPPED / kind if shipped else None


def find(path: str | Path, *kinds: str) -> Path:
    """Returns the local folder of an artifact of one of ``kinds``, in order of precedence where
    there are several.

    ``path`` is the folder of an artifact or of a run (``outputs/<model>/<name>``), the id of a Hub
    repository with the same files, or ``embedded`` (the shipped artifacts). Raises UserError if
    there is none, or only of other kinds.
    """
    folder = _local_folder(path)
    if os.path.isfile(folder / MANIFEST):
        return folder
    present = artifacts_of_run(folder)
    accepted = [kind for kind in kinds if kind in present]
    if present and not accepted:
        choice = (
            f"expected {' or '.join(kinds)}"
            if kinds
            else f"name one, e.g. {folder / next(iter(present))}"
        )
        raise UserError(f"artifact {path}: the folder holds {', '.join(present)}; {choice}")
    return present[accepted[0]] if accepted else folder


def artifacts_of_run(folder: Path) -> dict[str, Path]:
    """Returns the folders of the artifacts of a run, by kind."""
    of_kind = {kind: current_folder(folder / kind) for kind in KINDS}
    return {kind: path for kind, path in of_kind.items() if os.path.isfile(path / MANIFEST)}


def _local_folder(path: str | Path) -> Path:
    require(
        isinstance(path, str | Path),
        "artifact",
        repr(path),
        "expected a folder or the id of a Hub repository",
    )
    require(
        not UNPRINTABLE.search(str(path)),
        "artifact",
        path,
        "expected a path without control characters, in UTF-8",
    )
    if path == "embedded":
        return SHIPPED
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # unlike Path.is_dir, also False for a name that is too long
        return folder
    if not is_hub_id(path):
        if os.path.isdir(current_folder(folder)):
            return current_folder(folder)
        raise UserError(f"artifact {shown(path)}: no such folder")
    return download(str(path))


def is_hub_id(path: str | Path) -> bool:
    """Returns True for the id of a Hub repository, False for a path that exists or text that looks
    like a path.
    """
    if isinstance(path, Path) or os.path.exists(os.path.expanduser(path)):
        return False
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None

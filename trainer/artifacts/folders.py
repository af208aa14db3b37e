"""Folders of artifacts: their places under ``outputs``, and what a path or a Hub id stands for."""

import os
import re
from pathlib import Path

from msattn.trainer.artifacts.manifest import CARD, CONFIG, KINDS, MANIFEST, WEIGHTS
from msattn.trainer.config import RunConfig
from msattn.trainer.config.values import UNPRINTABLE, require, shown
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.storage.replace import current_folder

SHIPPED = Path(__file__).parents[1] / "embedded" / "artifacts"  # the artifacts of the embedded model, a folder of each kind


def artifact_folder(outputs: str | Path, model_name: str, name: str, kind: str) -> Path:
    """Returns the path ``outputs/<model_name>/<name>/<kind>``."""
    return Path(outputs) / model_name / name / kind


def default_artifact(cfg: RunConfig, kind: str) -> Path | None:
    """Returns the artifact of the configured model and name, or None if there is none.

    The embedded model falls back on the artifacts that ship with the package, unless a ``name`` is given.
    """
    own = artifact_folder(cfg.outputs, cfg.model.name, cfg.name, kind)
    if os.path.exists(current_folder(own)):
        return own
    shipped = cfg.model.is_embedded and cfg.name == RunConfig.name and os.path.isdir(SHIPPED / kind)
    return SHIPPED / kind if shipped else None


def find(path: str | Path, *kinds: str) -> Path:
    """Returns the local folder of an artifact.

    Parameters
    ----------
    path : folder of an artifact, folder of a run (``outputs/<model>/<name>``), id of a Hub repository with the same files, or
        ``embedded`` (the artifacts that ship with the package).
    kinds : accepted kinds, in order of precedence, where ``path`` holds an artifact of each kind.

    Raises
    ------
    UserError : there is no such folder, or it holds only artifacts of other kinds.
    """
    folder = _local_folder(path)
    if os.path.isfile(folder / MANIFEST):
        return folder
    of_kind = {kind: current_folder(folder / kind) for kind in KINDS}
    held = [kind for kind in KINDS if os.path.isfile(of_kind[kind] / MANIFEST)]
    accepted = [kind for kind in kinds if kind in held]
    if held and not accepted:
        choice = f"accepted is {' or '.join(kinds)}" if kinds else f"name one, e.g. {folder / held[0]}"
        raise UserError(f"artifact {path}: the folder holds {', '.join(held)}; {choice}")
    return of_kind[accepted[0]] if accepted else folder


def _local_folder(path: str | Path) -> Path:
    require(isinstance(path, str | Path), "artifact", repr(path), "accepted is a folder or the id of a Hub repository")
    require(not UNPRINTABLE.search(str(path)), "artifact", path, "accepted is a path without control characters, in UTF-8")
    if path == "embedded":
        return SHIPPED
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # unlike Path.is_dir, also False for a name that is too long
        return folder
    if isinstance(path, Path) or os.path.exists(folder) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        if os.path.isdir(current_folder(folder)):
            return current_folder(folder)
        raise UserError(f"artifact {shown(path)}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        files = (WEIGHTS, CONFIG, MANIFEST, CARD)
        return Path(snapshot_download(path, allow_patterns=[*files, *(f"{kind}/{name}" for kind in KINDS for name in files)]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"artifact {path}: not a local folder, and loading it from the Hugging Face Hub failed ({first_line(error)})"
        ) from error

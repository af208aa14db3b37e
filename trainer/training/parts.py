"""Finished parts of a long job on disk, so that an interrupted job continues where it stopped."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.errors import UserError, write_error

SETTINGS = "settings.json"


class FinishedParts:
    """A folder with one safetensors file for each finished part of a job.

    Ranks that share the folder must all open it before any of them saves, rank 0 first.

    Parameters
    ----------
    folder : Path
    settings : dict
        Everything that the parts depend on, as JSON values. Parts that were made with other settings are removed, or refused
        if ``resume`` is set.

    Raises
    ------
    UserError : ``resume`` is set and the settings differ, or the disk is full.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder
        text = json.dumps(settings, sort_keys=True, indent=1)
        existing = folder / SETTINGS
        if existing.exists() and existing.read_text() != text:
            if resume:
                before, now = json.loads(existing.read_text()), json.loads(text)
                changed = ", ".join(sorted(key for key in before | now if before.get(key) != now.get(key)))
                raise UserError(f"resume=true: {folder} was made with other settings ({changed}); resume=false starts again")
            self.remove()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.partial"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        if not existing.exists():
            partial = folder / f"settings.{os.getpid()}.partial"
            try:
                partial.write_text(text)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise write_error(existing, error) from error
            partial.rename(existing)

    def __contains__(self, name: str) -> bool:
        """Returns True if the part ``name`` is finished."""
        return self._path(name).exists()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, Tensor], note: object = None) -> None:
        """Saves ``tensors`` and ``note`` (any JSON value) as the part ``name``, atomically.

        Raises
        ------
        UserError : the disk is full.
        """
        partial = self.folder / f"{name}.{os.getpid()}.partial"
        try:
            save_file(tensors, partial, metadata={"note": json.dumps(note)})
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise write_error(self._path(name), error) from error
        partial.rename(self._path(name))

    def load(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Returns the tensors (memory-mapped) and the note of the part ``name``."""
        with safe_open(self._path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["note"])  # noqa: SIM118

    def remove(self) -> None:
        """Deletes the folder and all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


def layer_part(layer: int) -> str:
    """Returns the name of the part that holds the result of one layer."""
    return f"layer_{layer:03d}"

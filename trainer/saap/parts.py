"""Finished parts of a long job, kept so that an interrupted one goes on where it stopped."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.errors import UserError, write_error


class FinishedParts:
    """A folder of parts, a safetensors file each. Processes that share it open it before any of them saves, one ahead of all.

    Parameters
    ----------
    folder : Path
    settings : dict
        All that the parts depend on. Parts made with other settings are refused with ``resume`` (UserError), else removed.

    Raises
    ------
    UserError : the disk has no room.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder
        described = json.dumps(settings, sort_keys=True, indent=1)
        note = folder / "settings.json"
        if note.exists() and note.read_text() != described:
            if resume:
                before, now = json.loads(note.read_text()), json.loads(described)
                changed = ", ".join(sorted(key for key in before | now if before.get(key) != now.get(key)))
                raise UserError(f"resume=true: {folder} was made with other settings ({changed}); resume=false starts again")
            self.remove()
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.partial"):  # by a process that was killed
            left.unlink(missing_ok=True)
        if not note.exists():
            partial = folder / f"settings.{os.getpid()}.partial"
            try:
                partial.write_text(described)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise write_error(note, error) from error
            partial.rename(note)

    def path(self, name: str) -> Path:
        """Where the part ``name`` is, or will be."""
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, Tensor], note: object = None) -> None:
        """Keeps ``tensors`` and ``note`` (anything JSON) as the part ``name``; a file is there whole or not at all.

        UserError: the disk has no room for it.
        """
        partial = self.folder / f"{name}.{os.getpid()}.partial"
        try:
            save_file(tensors, partial, metadata={"note": json.dumps(note)})
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise write_error(self.path(name), error) from error
        partial.rename(self.path(name))

    def load(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Tensors, mapped into memory rather than read, and note of the part ``name``."""
        with safe_open(self.path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["note"])  # noqa: SIM118

    def remove(self) -> None:
        """Deletes all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

"""Finished parts of a long job on disk, so that an interrupted job continues where it stopped."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.artifacts import content_hash
from msattn.trainer.errors import UserError, first_line, print_once, write_error
from msattn.trainer.storage.documents import read_json
from msattn.trainer.storage.replace import sync_file, sync_folder

SETTINGS = "settings.json"
MAX_SETTINGS_BYTES = 8_000_000


class FinishedParts:
    """A folder with one safetensors file for each finished part of a job.

    A part records its name and the hash of its tensors, its note and the settings. A damaged part, or one under the name of
    another, counts as missing, so that the job makes it again. Ranks that share the folder must all open it before any of them
    saves, rank 0 first.

    Parameters
    ----------
    folder : Path
    settings : dict
        Everything that the parts depend on, as JSON values. Parts that were made with other settings are removed, or refused
        if ``resume`` is set.

    Raises
    ------
    UserError : ``resume`` is set and the settings differ or cannot be read, or the disk is full.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self._settings = json.dumps(settings, sort_keys=True, indent=1)
        self._intact: set[str] = set()  # parts whose hash was compared
        path = folder / SETTINGS
        if folder.exists() and not self._has_same_settings(path, refuse=resume):
            self.remove()
        partial = folder / f"settings.{os.getpid()}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*.partial"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            if not path.exists():
                partial.write_text(self._settings)
                sync_file(partial)
                partial.rename(path)
                sync_folder(folder)
        except OSError as error:
            with suppress(OSError):  # of the same disk; the next run removes it
                partial.unlink()
            raise write_error(path, error) from error

    def _has_same_settings(self, path: Path, *, refuse: bool) -> bool:
        if not path.exists():
            return not any(self.folder.glob("*.safetensors"))
        try:
            before = read_json(path, str(path), MAX_SETTINGS_BYTES)
        except UserError as error:
            if refuse:
                raise UserError(f"resume=true: {error}; resume=false starts again") from error
            print_once(f"warning: {error}; its parts are made again")
            return False
        now = json.loads(self._settings)
        changed = ", ".join(sorted(key for key in before | now if before.get(key) != now.get(key)))
        if changed and refuse:
            raise UserError(f"resume=true: {self.folder} was made with other settings ({changed}); resume=false starts again")
        return not changed

    def __contains__(self, name: str) -> bool:
        """Returns True if the part ``name`` is finished and as it was written."""
        if name not in self._intact and self._path(name).exists() and self._check(name):
            self._intact.add(name)
        return name in self._intact

    def _check(self, name: str) -> bool:
        """Compares the hash of a part; names a damaged one on stderr."""
        try:
            tensors, metadata = self._read(name)
            fault = "" if metadata.get("hash") == self._hash(name, tensors, metadata.get("note", "")) else "its hash differs"
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            fault = first_line(error)
        if fault:
            print_once(f"warning: {self._path(name)} is damaged ({fault}); it is made again")
        return not fault

    def _hash(self, name: str, tensors: dict[str, Tensor], note: str) -> str:
        return hashlib.sha256("\n".join([name, content_hash(tensors), note, self._settings]).encode()).hexdigest()

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        with safe_open(self._path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, Tensor], note: object = None) -> None:
        """Saves ``tensors`` and ``note`` (any JSON value) as the part ``name``, atomically.

        Raises
        ------
        UserError : the disk is full.
        """
        partial = self.folder / f"{name}.{os.getpid()}.partial"
        text = json.dumps(note)
        try:
            save_file(tensors, partial, metadata={"note": text, "hash": self._hash(name, tensors, text)})
            sync_file(partial)
            partial.rename(self._path(name))
            sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink()
            raise write_error(self._path(name), error) from error
        self._intact.add(name)

    def load(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Returns the tensors (memory-mapped) and the note of the part ``name``.

        Raises
        ------
        UserError : the part is damaged.
        """
        if name not in self:
            raise UserError(f"{self._path(name)}: the file is missing or damaged; run the command again, which makes it again")
        tensors, metadata = self._read(name)
        return tensors, json.loads(metadata["note"])

    def remove(self) -> None:
        """Deletes the folder and all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._intact.clear()


def layer_part(layer: int) -> str:
    """Returns the name of the part that holds the result of one layer."""
    return f"layer_{layer:03d}"

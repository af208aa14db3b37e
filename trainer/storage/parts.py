"""Finished parts of a long job on disk, so that an interrupted job continues where it stopped."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from msattn.trainer.errors import UserError, print_once, write_error
from msattn.trainer.storage.documents import read_json
from msattn.trainer.storage.hashes import DamagedFile, read_hashed, write_hashed
from msattn.trainer.storage.replace import replace_file
from msattn.trainer.storage.settings import START_AGAIN, check_settings

SETTINGS = "settings.json"
MAX_SETTINGS_BYTES = 8_000_000


class FinishedParts:
    """A folder with one safetensors file for each finished part of a job.

    A part records its name, and the hash of its tensors, its note and the settings (everything that
    parts depend on, as JSON values). Parts with other settings are refused, or removed with
    ``replace``. A damaged or misnamed part counts as missing, so that the job creates it again.
    Ranks that share the folder must all open it, rank 0 first, before any of them saves.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        replace: bool,
        start_again: str = START_AGAIN,
    ) -> None:
        self.folder = folder
        self._settings = json.dumps(settings, sort_keys=True, indent=1)
        self._intact: set[str] = set()  # parts whose hash was compared
        path = folder / SETTINGS
        try:
            check_parts(folder, settings, partly=False, start_again=start_again)
        except UserError:
            if not replace:
                raise
            print_once(f"{folder}, made with other settings, is removed")
            self.remove()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*.new"):  # left by a killed process
                leftover.unlink(missing_ok=True)
            if not path.exists() or path.read_bytes() != self._settings.encode():
                with replace_file(path) as new:
                    new.write_text(self._settings)
        except OSError as error:
            raise write_error(path, error) from error

    def __contains__(self, name: str) -> bool:
        """Returns True if the part ``name`` is finished and intact; warns on stderr about a damaged
        one.
        """
        if name not in self._intact:
            try:
                read_hashed(self._path(name), name, self._settings)
            except FileNotFoundError:
                return False
            except DamagedFile as error:
                print_once(
                    f"warning: {self._path(name)} is damaged ({error}); it will be created again"
                )
                return False
            self._intact.add(name)
        return True

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the parts that are finished and intact, in the order in which they
        were saved.
        """
        paths = sorted(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        return (path.stem for path in paths if path.stem in self)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: Mapping[str, Tensor], note: object = None) -> None:
        """Saves ``tensors`` and ``note`` (any JSON value) as the part ``name``, atomically."""
        try:
            write_hashed(self._path(name), tensors, name, self._settings, note=json.dumps(note))
        except (OSError, SafetensorError) as error:
            raise write_error(self._path(name), error) from error
        self._intact.add(name)

    def load(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Returns the tensors (memory-mapped) and the note of the part ``name``; raises UserError
        if it is damaged.
        """
        if name not in self:
            raise UserError(
                f"{self._path(name)}: the file is missing or damaged; run the command again to "
                f"create it"
            )
        tensors, note = read_hashed(self._path(name))  # it is intact, see __contains__
        return tensors, json.loads(note)

    def remove(self) -> None:
        """Deletes the folder and all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._intact.clear()


def check_parts(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    partly: bool = True,
    start_again: str = START_AGAIN,
) -> None:
    """Raises UserError if ``folder`` holds finished parts with other settings; see
    :func:`check_settings`.
    """
    path = folder / SETTINGS
    if not path.exists() or not any(folder.glob("*.safetensors")):
        return  # no part has the hash of these settings
    try:
        before = read_json(path, str(path), MAX_SETTINGS_BYTES)
    except UserError as error:
        raise UserError(f"{error}; {start_again} starts again") from error
    check_settings(str(folder), before, settings, partly=partly, start_again=start_again)


def layer_part(layer: int) -> str:
    """Returns the name of the part that holds the result of one layer."""
    return f"layer_{layer:03d}"

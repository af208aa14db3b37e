"""The files of a model in a local folder or on the Hub, read as untrusted text or JSON."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msattn.trainer.errors import UserError, first_line, only_errors
from msattn.trainer.storage.documents import (
    check_contained,
    check_regular,
    read_json,
    read_text,
    root_of_links,
)

SAFETENSORS, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
# in the order of preference
WEIGHT_FILES = (SAFETENSORS, f"{SAFETENSORS}{INDEX}", PICKLE, f"{PICKLE}{INDEX}")
GGUF = ".gguf"  # suffix of files that hold configuration, tokenizer and weights
MAX_BYTES = 100_000_000  # limit for files other than weights: tokenizers take up to 35 MB


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model. ``name`` is the argument that names it, such as
    ``model.path=Qwen/Qwen3-8B``, for messages.

    ``source`` is a local folder, a GGUF file, which stands for a folder without other files, or a
    Hub id.
    """

    name: str
    source: Path | str
    revision: str | None = None

    @property
    def folder(self) -> Path | None:
        """The local folder, or the GGUF file; None of a Hub model."""
        return self.source if isinstance(self.source, Path) else None

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that holds configuration, tokenizer and weights; None of other models."""
        return self.folder if self.folder is not None and _is_gguf(self.folder) else None

    @property
    def kind(self) -> str:
        return "Hub model" if self.folder is None else "folder"

    def at_one_commit(self) -> "ModelFiles":
        """Returns these files at the revision's current commit, so that all come from the same
        commit.
        """
        snapshot = None if self.folder is not None else self._download("config.json", False)
        return self if snapshot is None else replace(self, revision=snapshot.parent.name)

    def locate(self, file: str) -> Path | None:
        """Returns the path of a file of any type, which is downloaded if necessary; None if there
        is none.
        """
        if self.folder is None:
            return self._download(file, False)
        try:
            os.lstat(self.folder / file)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise UserError(f"{self.name}: {file} cannot be read ({error.strerror})") from error
        return self.folder / file

    def download(self, files: Sequence[str]) -> None:
        """Downloads files of a Hub model in parallel; raises UserError if one is missing."""
        from transformers.utils.hub import cached_files

        if self.folder is not None:
            return
        try:
            # it warns of each retry; the final error is raised
            with only_errors("huggingface_hub"):
                cached_files(str(self.source), list(files), revision=self.revision)
        except (OSError, ValueError) as error:
            raise self.error(error) from error

    def find(self, file: str, required: bool = False) -> Path | None:
        """Returns the path of a file; None if there is none.

        Raises UserError if it is not a regular file, is a link that leaves the folder, or is
        ``required`` and missing.
        """
        path = self._download(file, True) if self.folder is None and required else self.locate(file)
        if path is None and required:
            raise UserError(
                f"{self.name}: the {self.kind} has no {file}, so it is not a Hugging Face model"
            )
        if path is not None:
            check_regular(path, f"{self.name}: {file}")
            check_contained(
                path,
                root_of_links(path.parents[len(Path(file).parts) - 1]),
                f"{self.name}: {file}",
            )
        return path

    def check(self, file: str) -> None:
        """Raises UserError like :meth:`find`, or if a file that libraries will read is larger than
        :data:`MAX_BYTES`.
        """
        path = self.find(file)
        if path is not None and path.stat().st_size > MAX_BYTES:
            raise UserError(f"{self.name}: {file} is larger than {MAX_BYTES / 1e6:g} MB")

    def text(self, file: str) -> str | None:
        """Returns the text of a file, or None. Raises errors like
        :func:`msattn.trainer.storage.documents.read_text`.
        """
        path = self.find(file)
        return None if path is None else read_text(path, f"{self.name}: {file}", MAX_BYTES)

    def json(self, file: str, required: bool = False) -> dict[str, Any] | None:
        """Returns the object in a JSON file, or None. Raises errors like :meth:`find` and
        ``read_json``.
        """
        path = self.find(file, required)
        return None if path is None else read_json(path, f"{self.name}: {file}", MAX_BYTES)

    def config(self) -> dict[str, Any]:
        """Returns ``config.json``; raises UserError if it is missing or damaged."""
        config = self.json("config.json", required=True)
        assert config is not None
        return config

    def error(self, error: BaseException) -> UserError:
        """Returns the UserError for a model whose files raise ``error``."""
        if "custom code" in str(error):
            return self.brings_code()
        if self.folder is not None:
            return UserError(f"{self.name}: the files there cannot be loaded ({first_line(error)})")
        return UserError(
            f"{self.name}: not a local folder, and loading it from the Hugging Face Hub failed "
            f"({first_line(error)}); model.init=random builds the architecture of a packaged model "
            "without a download"
        )

    def brings_code(self) -> UserError:
        """Returns the UserError for a model whose files refer to their own Python code."""
        return UserError(
            f"{self.name}: its files bring Python code of their own (auto_map), which is not run; "
            "model.trust_remote_code=true allows it, if you trust them"
        )

    def _download(self, file: str, required: bool) -> Path | None:
        from transformers.utils import cached_file

        try:
            # it warns of each retry; the final error is raised
            with only_errors("huggingface_hub"):
                options = {
                    "revision": self.revision,
                    "_raise_exceptions_for_missing_entries": required,
                }
                cached = cached_file(str(self.source), file, **options)
        except (OSError, ValueError) as error:
            raise self.error(error) from error
        return None if cached is None else Path(cached)


def local_folder(path: str) -> Path | None:
    """Returns the folder that ``path`` names; None if there is none."""
    folder = os.path.expanduser(path)  # like os.path.isdir, it raises no error, whatever the text
    return Path(folder) if os.path.isdir(folder) else None


def local_model(path: str, name: str) -> Path | None:
    """Returns the folder or GGUF file of a local model, or None. For a folder without other weights
    this is its GGUF file.

    Raises UserError, beginning with ``name``, if the folder has several GGUF files.
    """
    if _is_gguf(file := Path(os.path.expanduser(path))):
        return file
    folder = local_folder(path)
    if folder is None or any(os.path.lexists(folder / weights) for weights in WEIGHT_FILES):
        return folder
    files = (
        sorted(entry for entry in folder.iterdir() if _is_gguf(entry))
        if os.access(folder, os.R_OK | os.X_OK)
        else []
    )
    if len(files) > 1:
        raise UserError(
            f"{name}: several GGUF files: {', '.join(entry.name for entry in files)}; give the "
            f"path of one"
        )
    return files[0] if files else folder


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF and os.path.isfile(path)

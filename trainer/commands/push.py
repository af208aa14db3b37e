"""``msattn push``: uploads an artifact, or those of a run, to the Hugging Face Hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msattn.trainer.artifacts import Artifact


def push(folder: str, repository: str, *, private: bool = False) -> str:
    """Uploads in one commit, prints the commit's URL, and returns it.

    Parameters
    ----------
    folder : folder of an artifact, such as ``outputs/llama3/base/gate``, or of a run that has several.
    repository, private : see :func:`msattn.trainer.artifacts.push`.

    Raises
    ------
    UserError : there is no such folder, it has no artifact, or one is damaged; or as :func:`msattn.trainer.artifacts.push`.
    """
    from msattn.trainer import artifacts

    url = artifacts.push(repository, _held(Path(folder).expanduser()), private=private)
    print(url, flush=True)
    return url


def _held(folder: Path) -> "dict[str, Artifact]":
    """Returns the artifacts of a folder, checked, by their folders in the repository."""
    from msattn.trainer import artifacts
    from msattn.trainer.artifacts.manifest import MANIFEST

    found = artifacts.artifacts_of_run(folder)
    if os.path.isfile(folder / MANIFEST) or not found:
        return {"": artifacts.read(folder)}
    return {kind: artifacts.read(path, kind) for kind, path in found.items()}

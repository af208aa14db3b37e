"""The base class of modules that are saved as artifacts."""

from pathlib import Path
from typing import Self

from torch import nn

from msattn.trainer.artifacts.folders import is_hub_id
from msattn.trainer.artifacts.hub import download, push
from msattn.trainer.artifacts.manifest import Artifact
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError
from msattn.trainer.storage.hashes import content_hash


class ArtifactModule(nn.Module):
    """A module that is saved as an artifact, in a folder or on the Hub; ``artifact`` is None for a
    newly built module.
    """

    artifact: Artifact | None = None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Loads an artifact from a folder or a Hub id, see
        :func:`msattn.trainer.artifacts.find`.
        """
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, path: str | Path, *, revision: str | None = None) -> Self:
        """Loads an artifact like :meth:`load`.

        Parameters
        ----------
        path : folder of an artifact or of a run, id of a Hub repository, or ``embedded``.
        revision : branch, tag or commit of a Hub repository; None: the default branch.

        Raises
        ------
        UserError : see :meth:`load`; or there is no such revision, or ``path`` is not a Hub id.
        """
        if revision is None:
            return cls.load(path)
        if not isinstance(revision, str) or not is_hub_id(path):
            raise UserError(
                f"revision={shown(str(revision))}: only Hub ids have revisions; artifact "
                f"{shown(str(path))} is none"
            )
        return cls.load(download(str(path), revision))

    def push_to_hub(
        self, repository: str, *, private: bool = False, token: str | None = None
    ) -> str:
        """Uploads the artifact that this was loaded from, in one commit, and returns the commit's
        URL.

        Parameters
        ----------
        repository, private, token : see :func:`msattn.trainer.artifacts.push`.

        Raises
        ------
        UserError : see :func:`msattn.trainer.artifacts.push`; or the module was not loaded from an
            artifact, or was changed.
        """
        name = type(self).__name__
        if self.artifact is None:
            raise UserError(
                f"push_to_hub: this {name} is not an artifact yet; load it from the folder where "
                f"it was saved"
            )
        if content_hash(dict(self.state_dict())) != self.artifact.manifest["content_hash"]:
            raise UserError(
                f"push_to_hub: the weights of this {name} differ from those of artifact "
                f"{self.artifact.path}"
            )
        return push(repository, {"": self.artifact}, private=private, token=token)

"""Artifacts on the Hugging Face Hub: download of a revision, and upload in one commit."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.artifacts.card import PLACEHOLDER, artifact_card, evaluation_section, run_card
from msattn.trainer.artifacts.kinds import KINDS
from msattn.trainer.artifacts.manifest import CARD, CONFIG, MANIFEST, WEIGHTS
from msattn.trainer.artifacts.model_config import KEY, OWN, as_file, settings_of, with_settings
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, first_line, only_errors
from msattn.trainer.progress import activity
from msattn.trainer.storage.documents import check_contained, read_json, read_text, root_of_links
from msattn.trainer.version import __version__

if TYPE_CHECKING:
    from msattn.trainer.artifacts.manifest import Artifact

MODEL_CONFIG = "config.json"  # in the repository of a model
FILES = (WEIGHTS, CONFIG, MANIFEST, CARD)
# in a repository: an artifact, or one of each kind
PATHS = (*FILES, *(f"{kind}/{name}" for kind in KINDS for name in FILES))
MAX_CARD_BYTES = 1_000_000
REFUSALS = {
    401: "the Hub rejected the token; set another one with `hf auth login` or HF_TOKEN",
    403: "the token has no permission to write to it",
    404: "there is no such repository, or the token has no access to it",
}


def download(repository: str, revision: str | None = None) -> Path:
    """Returns the local folder with the artifacts of a Hub repository, which are downloaded if they
    are not in the cache.

    Raises UserError if there is no such repository or ``revision``, or no connection and nothing in
    the cache.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(PATHS)))
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision={shown(revision)}"
        raise UserError(
            f"artifact {repository}: not a local folder, and loading it{at} from the Hugging Face "
            f"Hub failed ({first_line(error)})"
        ) from error


def push(
    repository: str,
    artifacts: "Mapping[str, Artifact]",
    *,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Replaces the artifacts of a Hub repository by ``artifacts``, in one commit.

    The repository is created if it does not exist. Files of other artifacts are removed but stay in
    its history. Files that belong to no artifact are kept, except ``README.md``, the model card. In
    the repository of a model all of the model's files are kept: artifacts go to folders named after
    their kinds, and ``config.json`` refers to them. An interrupted upload changes nothing.

    Parameters
    ----------
    repository : ``owner/name``.
    artifacts : by their folder in the repository: one, in ``""``, or one of each kind, in a folder
        of its name.
    private : create a private repository.
    token : None is the token of ``hf auth login`` or ``HF_TOKEN``. No message contains it.

    Returns
    -------
    The URL of the commit.

    Raises
    ------
    UserError : an invalid name, no token, no permission, no connection, or ``private`` and a public
        repository.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    _check_name(repository)
    api = HfApi(token=_checked_token(token), library_name="msattn", library_version=__version__)
    files = _files(repository, artifacts)
    with activity(f"pushing to {repository}"), _refusals(repository, str(api.token)), _quiet():
        api.create_repo(repository, private=private or None, exist_ok=True)
        info = api.model_info(repository)
        if private and not info.private:
            raise UserError(
                f"push {repository}: the repository exists and is public; push without --private, "
                f"or elsewhere"
            )
        present, ours = {sibling.rfilename for sibling in info.siblings or []}, {*PATHS}
        if MODEL_CONFIG in present:
            artifacts = {artifact.kind: artifact for artifact in artifacts.values()}
            ours = {path for path in PATHS if "/" in path}
            files = {
                path: content
                for path, content in _files(repository, artifacts).items()
                if path in ours
            }
            files[MODEL_CONFIG] = _model_config(
                Path(api.hf_hub_download(repository, MODEL_CONFIG)), repository, artifacts
            )
        added = [CommitOperationAdd(path, content) for path, content in files.items()]
        removed = [
            CommitOperationDelete(path, is_folder=False)
            for path in sorted(present & ours - {*files})
        ]
        message = (
            f"msattn {__version__}: {', '.join(artifact.kind for artifact in artifacts.values())}"
        )
        return api.create_commit(repository, [*added, *removed], commit_message=message).commit_url


def _model_config(path: Path, repository: str, kinds: Collection[str]) -> bytes:
    """Returns the ``config.json`` of a model, changed to use the artifacts in its own
    repository.
    """
    config = read_json(path, f"push {repository}: {MODEL_CONFIG}", MAX_CARD_BYTES)
    roles = {"gate": {"gate"} & {*kinds}, "qmodel": {*kinds} - {"gate"}}
    kept = {
        name: value
        for name, value in (settings_of(config.get(KEY)) or {}).items()
        if name not in roles
    }
    return as_file(
        with_settings(config, kept | {role: OWN for role, of_role in roles.items() if of_role})
    )


def _files(repository: str, artifacts: "Mapping[str, Artifact]") -> dict[str, Path | bytes]:
    """Returns the files of a repository by path: weights, configurations and manifests as they are,
    and model cards.
    """
    files: dict[str, Path | bytes] = {}
    cards = {
        folder: _card(artifact).replace(PLACEHOLDER, repository)
        for folder, artifact in artifacts.items()
    }
    for folder, artifact in artifacts.items():
        at = f"{folder}/" if folder else ""
        files |= {f"{at}{name}": artifact.path / name for name in FILES if name != CARD}
        files[f"{at}{CARD}"] = (cards[folder] + _evaluation([artifact])).encode()
    if "" not in artifacts:
        files[CARD] = (run_card(cards, repository) + _evaluation([*artifacts.values()])).encode()
    return files


def _card(artifact: "Artifact") -> str:
    """Returns the card of an artifact, which the user may have edited."""
    path, where = artifact.path / CARD, f"artifact {artifact.path}: {CARD}"
    if not os.path.lexists(path):
        return artifact_card(artifact.manifest)
    check_contained(path, root_of_links(artifact.path), where)
    return read_text(path, where, MAX_CARD_BYTES)


def _evaluation(artifacts: "list[Artifact]") -> str:
    """Returns the section about the evaluation of these artifacts, from the folder of their run."""
    hashes = {artifact.kind: artifact.manifest["content_hash"] for artifact in artifacts}
    runs = {artifact.path.parent for artifact in artifacts}
    return evaluation_section(runs.pop(), hashes) if len(runs) == 1 else ""


def _check_name(repository: Any) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    accepted = "expected owner/name, of letters, digits, -, _ and ."
    if not isinstance(repository, str) or not re.fullmatch(
        r"[\w.-]+/[\w.-]+", repository, re.ASCII
    ):
        raise UserError(f"push {shown(str(repository))}: {accepted}")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"push {repository}: {accepted} ({first_line(error)})") from error


def _checked_token(token: str | None) -> str:
    """Returns the token to use; refuses a malformed token, because libraries would show it in their
    messages.
    """
    from huggingface_hub import get_token

    given = get_token() if token is None else token
    if not given:
        raise UserError(
            "push: there is no token for the Hugging Face Hub; run `hf auth login` or set HF_TOKEN"
        )
    if not isinstance(given, str) or not re.fullmatch(r"[!-~]+", given):
        raise UserError("push: the token for the Hugging Face Hub has invalid characters")
    return given


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings of retries and, where stderr is no terminal, bars: there :func:`activity`
    reports in lines.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    change = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if change:
        disable_progress_bars()
    try:
        with only_errors("huggingface_hub"):
            yield
    finally:
        if change:
            enable_progress_bars()


@contextmanager
def _refusals(repository: str, token: str) -> Iterator[None]:
    """Raises UserError, without the token, for refusals by the Hub and failed connections."""
    from huggingface_hub.errors import HfHubHTTPError

    # of httpx or httpx2, by version; includes failed connections
    http_error, os_error = HfHubHTTPError.__bases__
    try:
        yield
    except UserError:
        raise
    except (http_error, os_error, ValueError, RuntimeError) as error:
        # from one of several uploads
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        reason = REFUSALS.get(status, first_line(cause)) if status else first_line(cause)
        if isinstance(cause, http_error) and status is None:
            reason = f"the Hugging Face Hub cannot be reached ({reason})"
        raise UserError(
            f"push {repository}: {reason}; nothing was committed".replace(token, "<token>")
        ) from error

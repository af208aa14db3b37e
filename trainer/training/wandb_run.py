"""A Weights & Biases run whose failures never stop the work that it records: results are on disk
before they are sent.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import UserError, first_line, print_once

TOKEN = re.compile(r"[\w-]{32,}")  # matches API keys in messages, and also hashes
# characters that a wandb artifact's name cannot contain
NOT_NAMED = re.compile(r"[^\w.-]+", re.ASCII)
UPLOAD_SECONDS = 1800  # seconds that a run waits for its upload
ALIAS_LENGTH = 16  # characters of a content hash
SETTINGS = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT")
RUN_ID = "wandb-run-id"  # file beside the checkpoints
LONG_KEYS = ("tensors", "details")  # keys of a manifest that are left to the uploaded file


class WandbRun:
    """The wandb run of a tracker, offline without an API key; with ``resume``, the run whose id is
    in ``folder``, if any.

    ``job`` is the command, wandb's ``job_type``. ``tags`` say what it worked on, e.g. model and
    name; they also name its artifacts. Raises UserError if wandb is not installed, or its server
    cannot be reached.

    Each method sends one thing. If wandb refuses it or cannot be reached, one line on stderr says
    so and the work continues.
    """

    def __init__(
        self,
        cfg: TrackerConfig,
        folder: Path,
        run_name: str,
        config: dict[str, Any],
        job: str,
        tags: Sequence[str],
        *,
        resume: bool,
    ) -> None:
        self._upload, self._name = cfg.upload, "-".join(tags)
        self._says_upload = cfg.kind == "wandb" or is_set_up()
        self._failed: set[str] = set()
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError(
                "tracker=wandb: wandb is not installed; run pip install wandb, or use tracker=none"
            ) from error
        try:
            # Online mode without a key would prompt or fail, so the mode is chosen first.
            mode = os.environ.get("WANDB_MODE") or (
                "online" if wandb.login(prompt=False) else "offline"
            )
            run_id = _run_id(folder) if resume else None
            with _without_arguments():
                self._run: Any = wandb.init(
                    id=run_id,
                    resume="allow" if run_id else None,
                    project=cfg.project,
                    name=run_name,
                    group=cfg.group,
                    job_type=job or None,
                    tags=[tag[:64] for tag in tags if tag],  # wandb refuses longer and empty tags
                    # wandb's service may have another working directory
                    dir=str(folder.absolute()),
                    config=config,
                    mode=mode,  # pyrefly: ignore[bad-argument-type]
                    settings=wandb.Settings(silent=True, console="off"),
                )
            (folder / RUN_ID).write_text(self._run.id)
        except (
            wandb.Error,
            ValueError,
            OSError,
        ) as error:  # from settings in the environment, and from its service
            raise UserError(
                f"tracker=wandb: {_reason(error)}; WANDB_MODE=offline keeps the run here, "
                f"tracker=none disables wandb"
            ) from error

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Logs numbers at ``step``, by default the latest."""
        self._send("metrics", lambda: self._run.log(dict(values), step=step))

    def image(self, name: str, path: Path | str, step: int | None) -> None:
        import wandb

        self._send(name, lambda: self._run.log({name: wandb.Image(str(path))}, step=step))

    def html(self, name: str, path: Path) -> None:
        import wandb

        self._send(name, lambda: self._run.log({name: wandb.Html(path)}))

    def table(self, name: str, rows: Sequence[Mapping[Any, Any]]) -> None:
        """Logs a table with a column for each key of ``rows``."""
        import wandb

        columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
        cells: list[Iterable[Any]] = [[row.get(column) for column in columns] for row in rows]
        # A column may hold numbers in one task's rows and text in another's.
        self._send(
            name, lambda: self._run.log({name: wandb.Table(columns, cells, allow_mixed_types=True)})
        )

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Adds ``figures`` to the summary of the run."""
        self._send("the summary", lambda: self._run.summary.update(dict(figures)))

    def log_artifact(
        self, folder: Path, record: Mapping[str, Any], manifest: Mapping[str, Any] | None
    ) -> None:
        """Records a folder that the run wrote: as a reference, or an artifact with its files if
        ``tracker.upload``.
        """
        import wandb

        def log_artifact() -> None:
            metadata = {
                key: value for key, value in (manifest or {}).items() if key not in LONG_KEYS
            } | dict(record)
            logged = wandb.Artifact(
                _artifact_name(self._name, folder.name), type=folder.name, metadata=metadata
            )
            if manifest is None or not self._upload:
                logged.add_reference(folder.absolute().as_uri(), checksum=False)
                self._run.log_artifact(logged)
                return
            for path in sorted(folder.iterdir()):  # add_dir prints lines of its own
                logged.add_file(str(path))
            sent = self._run.log_artifact(
                logged, aliases=["latest", record["content_hash"][:ALIAS_LENGTH]]
            )
            if not self._run.offline:
                sent.wait(UPLOAD_SECONDS)  # otherwise a failed upload would go unnoticed

        self.summary({f"artifact/{key}": value for key, value in record.items()})
        self._send(f"artifact {folder}", log_artifact)

    def use_artifact(self, record: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Records an artifact that the run read, as an input of the run if it was uploaded and the
        run is online.
        """
        kind, content_hash = record["kind"], record["content_hash"]
        self.summary({f"read/{kind}": content_hash})
        uploaded = uploaded_as(kind, config)
        if uploaded is not None and not self._run.offline:
            name = f"{uploaded}:{content_hash[:ALIAS_LENGTH]}"
            self._send(f"the use of {name}", lambda: self._run.use_artifact(name, type=kind))

    def finish(self) -> None:
        """Ends the run; prints the upload command of an offline run to users of wandb."""
        offline, folder = self._run.offline, Path(self._run.dir).parent
        self._send("the end of the run", self._run.finish)
        if offline and self._says_upload:
            print(f"wandb sync {folder}")

    def _send(self, what: str, call: Callable[[], Any]) -> None:
        """Calls ``call``; prints one line for the first failure of each ``what``."""
        try:
            call()
        except (
            Exception
        ) as error:  # wandb and its transports raise exceptions of many unrelated classes
            if what not in self._failed:
                print_once(
                    f"warning: tracker=wandb: sending {what} failed ({_reason(error)}); the files "
                    f"here are complete"
                )
            self._failed.add(what)


def _run_id(folder: Path) -> str | None:
    """Returns the id of the wandb run that was started in ``folder``, or None."""
    path = folder / RUN_ID
    text = path.read_text(errors="replace") if path.is_file() else ""
    return text if re.fullmatch(r"[\w-]{1,64}", text) else None


def is_set_up() -> bool:
    """Returns True if the environment or wandb's settings show that this user uses wandb."""
    settings = Path(
        os.environ.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser(), "settings"
    )
    return settings.is_file() or any(os.environ.get(name) for name in SETTINGS)


@contextmanager
def _without_arguments() -> Iterator[None]:
    """Hides the command line from wandb, as it may hold a prompt or a server's key. The
    configuration has the settings.
    """
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def uploaded_as(kind: str, config: Mapping[str, Any]) -> str | None:
    """Returns ``project/name`` of the wandb artifact that a command with this ``config`` uploaded,
    or None.
    """
    tracker, model = config.get("tracker"), config.get("model")
    if not isinstance(tracker, Mapping) or not isinstance(model, Mapping):
        return None
    if tracker.get("kind") not in ("wandb", "auto") or tracker.get("upload") is not True:
        return None
    name = f"{model.get('name')}-{config.get('name')}"
    return f"{tracker.get('project')}/{_artifact_name(name, kind)}"


def _artifact_name(name: str, kind: str) -> str:
    return f"{NOT_NAMED.sub('-', name)[:100]}-{kind}"


def _reason(error: BaseException) -> str:
    """Returns the first line of an exception's message without anything that looks like a key."""
    return TOKEN.sub("***", first_line(error))

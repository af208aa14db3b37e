"""Where a run's figures go: always ``metrics.jsonl`` in the work folder, and Weights & Biases when asked for."""

import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import UserError


class Tracker:
    """Writes metrics of one run; use as ``with Tracker.start(...) as tracker``.

    Only the first process of a ``torchrun`` writes. A resumed run appends: of lines with the same step the later counts. Lines
    for which the disk has no room are left out whole, and said once: a run does not end for them.

    Attributes
    ----------
    offset : steps of earlier stages of the same run; added to every logged step.
    step : the optimizer step that the run is at; the training loop keeps it.
    """

    def __init__(self, folder: Path, run: Any | None, *, writes: bool) -> None:
        self.offset = self.step = 0
        self._run = run
        self._started = time.time()
        self._file = (folder / "metrics.jsonl").open("ab", buffering=0) if writes else None
        self._complained = False

    @classmethod
    def start(cls, cfg: TrackerConfig, *, folder: Path | str, run_name: str, config: dict[str, Any]) -> "Tracker":
        """Open ``folder/metrics.jsonl`` and, with ``cfg.kind="wandb"``, a run (offline when there is no key).

        Raises
        ------
        UserError : wandb is asked for and not installed, or its server cannot be reached with the key that there is.
        """
        folder = Path(folder)
        writes = os.environ.get("RANK", "0") == "0"
        run = None
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            if cfg.kind == "wandb":
                run = _start_wandb(cfg, folder, run_name, config)
        return cls(folder, run, writes=writes)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record ``metrics`` (name -> number) at optimizer step ``step``."""
        step += self.offset
        # JSON knows no NaN and no infinity.
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write({"step": step, "seconds": round(time.time() - self._started, 3), **numbers})
        if self._run is not None:
            self._run.log(metrics, step=step)

    def image(self, name: str, path: Path | str, step: int | None = None) -> None:
        """Show the picture file ``path`` beside the run's figures, those of ``step`` or the latest."""
        if self._run is not None:
            import wandb

            self._run.log({name: wandb.Image(str(path))}, step=None if step is None else step + self.offset)

    def summary(self, figures: dict[str, Any]) -> None:
        """Record ``figures`` as the run's outcome."""
        self._write({"summary": figures})
        if self._run is not None:
            self._run.summary.update(figures)

    def artifact(self, folder: Path) -> None:
        """Link what the run made, an artifact's or a model's ``folder``: its kind, place and content hash."""
        if self._file is None:
            return
        made = {"kind": folder.name, "folder": str(folder.absolute()), "content_hash": _content_hash(folder)}
        self._write({"artifact": made})
        if self._run is not None:
            import wandb

            self._run.summary.update({f"artifact/{key}": value for key, value in made.items()})
            linked = wandb.Artifact(f"{self._run.name}-{folder.name}", type=folder.name, metadata=made)
            linked.add_reference(folder.absolute().as_uri(), checksum=False)
            self._run.log_artifact(linked)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = (json.dumps(record) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        reason = None
        try:
            if self._file.write(line) < len(line):
                reason = "No space left on device"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            self._file.truncate(end)
            if not self._complained:
                print(f"{self._file.name}: {reason}; figures are left out of it", file=sys.stderr, flush=True)
            self._complained = True

    def close(self) -> None:
        """Finish the run; an offline one says how to upload it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            run, self._run = self._run, None
            offline, folder = run.offline, Path(run.dir).parent
            run.finish()
            if offline:
                print(f"wandb sync {folder}")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _content_hash(folder: Path) -> str:
    """The one that an artifact's manifest has; of a model's folder, SHA-256 over its weights."""
    manifest = folder / "manifest.json"
    if manifest.exists():
        return json.loads(manifest.read_text("utf-8"))["content_hash"]
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _start_wandb(cfg: TrackerConfig, folder: Path, run_name: str, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError("tracker=wandb: wandb is not installed; pip install wandb, or tracker=none") from error
    try:
        # Online without a key would prompt or fail, so the mode is chosen first.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        return wandb.init(
            project=cfg.project,
            name=run_name,
            dir=str(folder),
            config=config,
            mode=mode,  # pyright: ignore[reportArgumentType]
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise UserError(f"tracker=wandb: {error}; WANDB_MODE=offline keeps the run here, or tracker=none") from error

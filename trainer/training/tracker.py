"""Logging of a run's metrics to ``metrics.jsonl`` in the work folder and, optionally, to Weights & Biases."""

import hashlib
import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import UserError, print_once


class Tracker:
    """Writes the metrics of one run; use as ``with Tracker.start(...) as tracker``.

    Only rank 0 writes. A resumed run appends to the file; of several lines with the same step the last one is valid. On a full
    disk lines are dropped as a whole with one message, and the run continues.

    Attributes
    ----------
    offset : steps of earlier stages of the run, added to every logged step.
    step : current optimizer step, updated by the training loop.
    """

    def __init__(self, folder: Path, run: Any | None, *, writes: bool) -> None:
        self.offset = self.step = 0
        self._run = run
        self._started = time.time()
        self._file = (folder / "metrics.jsonl").open("ab", buffering=0) if writes else None
        self._warned = False

    @classmethod
    def start(cls, cfg: TrackerConfig, *, folder: Path | str, run_name: str, config: dict[str, Any]) -> "Tracker":
        """Opens ``folder/metrics.jsonl`` and, with ``cfg.kind="wandb"``, a wandb run (offline without an API key).

        Raises
        ------
        UserError : wandb is requested but not installed, or its server cannot be reached.
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
        """Records ``metrics`` (name -> number) at optimizer step ``step``."""
        step += self.offset
        # JSON has neither NaN nor infinity.
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write({"step": step, "seconds": round(time.time() - self._started, 3), **numbers})
        if self._run is not None:
            self._run.log(metrics, step=step)

    def image(self, name: str, path: Path | str, step: int | None = None) -> None:
        """Uploads the picture file ``path`` to wandb at ``step``, by default the latest."""
        if self._run is not None:
            import wandb

            self._run.log({name: wandb.Image(str(path))}, step=None if step is None else step + self.offset)

    def summary(self, figures: dict[str, Any]) -> None:
        """Records ``figures`` as the summary of the run."""
        self._write({"summary": figures})
        if self._run is not None:
            self._run.summary.update(figures)

    def artifact(self, folder: Path) -> None:
        """Records the ``folder`` of an artifact or model that the run wrote, with its kind and content hash."""
        if self._file is None:
            return
        record = {"kind": folder.name, "folder": str(folder.absolute()), "content_hash": _content_hash(folder)}
        self._write({"artifact": record})
        if self._run is not None:
            import wandb

            self._run.summary.update({f"artifact/{key}": value for key, value in record.items()})
            linked = wandb.Artifact(f"{self._run.name}-{folder.name}", type=folder.name, metadata=record)
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
            if not self._warned:
                print_once(f"warning: {self._file.name}: {reason}; metrics are dropped")
            self._warned = True

    def close(self) -> None:
        """Closes the file and the wandb run; prints the upload command of an offline run."""
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
    """Returns the content hash of an artifact's manifest, or the SHA-256 of the weight files of a model folder."""
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
        raise UserError("tracker=wandb: wandb is not installed; run pip install wandb, or use tracker=none") from error
    try:
        # Online mode without a key would prompt or fail, so the mode is chosen first.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        return wandb.init(
            project=cfg.project,
            name=run_name,
            dir=str(folder),
            config=config,
            mode=mode,  # pyrefly: ignore[bad-argument-type]
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise UserError(
            f"tracker=wandb: {error}; WANDB_MODE=offline keeps the run here, tracker=none disables wandb"
        ) from error

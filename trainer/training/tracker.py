"""Logging of a run's metrics to ``metrics.jsonl`` in the work folder and, optionally, to Weights &
Biases.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from msattn.trainer.artifacts import Artifact
from msattn.trainer.config import JobConfig, TrackerConfig
from msattn.trainer.errors import UserError, print_once
from msattn.trainer.ranks import is_main_rank
from msattn.trainer.storage.documents import finite
from msattn.trainer.storage.hashes import file_hash
from msattn.trainer.training.wandb_run import WandbRun


class Tracker:
    """Writes the metrics of one run; use as ``with Tracker.of_job(...) as tracker``.

    Opens ``folder/metrics.jsonl`` and, unless ``cfg.kind="none"``, a wandb run (offline without an
    API key); only rank 0 writes. With ``resume``, it appends to the file, see :meth:`cut`, and to
    the previous wandb run in this folder, if there is one. On a full disk whole lines are dropped
    with one message, and the run continues. ``step`` is the optimizer step, updated by the training
    loop; ``offset``, the steps of earlier stages of the run, is added to every logged step. Raises
    UserError if wandb is not installed, or its server cannot be reached.
    """

    def __init__(
        self,
        cfg: TrackerConfig,
        *,
        folder: Path | str,
        run_name: str,
        config: dict[str, Any],
        job: str = "",
        tags: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        folder = Path(folder)
        self._run = self._file = None
        if is_main_rank():
            folder.mkdir(parents=True, exist_ok=True)
            if cfg.kind != "none":
                self._run = WandbRun(cfg, folder, run_name, config, job, tags, resume=resume)
            self._file = (folder / "metrics.jsonl").open("ab", buffering=0)
        self.offset = self.step = 0
        self._started, self._warned = time.time(), False

    @classmethod
    def of_job(
        cls, cfg: JobConfig, job: str, *, folder: Path, run_name: str, after_work: bool = False
    ) -> "Tracker":
        """Returns the tracker that ``cfg`` configures for the command ``job``.

        ``after_work``: the results are already written. If wandb fails to start, a warning says so
        and the file is kept.
        """
        config, resume = asdict(cfg), not after_work and getattr(cfg, "resume", False)
        try:
            return cls(
                cfg.tracker,
                folder=folder,
                run_name=run_name,
                config=config,
                job=job,
                tags=cfg.tags,
                resume=resume,
            )
        except UserError as error:
            if not after_work:
                raise
            print_once(f"warning: {error}; {folder / 'metrics.jsonl'} has the figures")
            return cls(TrackerConfig("none"), folder=folder, run_name=run_name, config={})

    def cut(self, steps: int) -> None:
        """Removes what an earlier run in this folder logged after optimizer step ``steps``, from
        which this run continues.
        """
        if self._file is None:
            return
        kept = 0
        with open(self._file.name, "rb") as file:
            for line in file:
                if not _is_until(line, self.offset + steps):
                    break
                kept += len(line)
        self._file.truncate(kept)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Records ``metrics`` (name -> number) at optimizer step ``step``."""
        step += self.offset
        numbers = {name: float(value) for name, value in metrics.items()}
        self._write({"step": step, "seconds": round(time.time() - self._started, 3), **numbers})
        if self._run is not None:
            self._run.log(metrics, step)

    def image(self, name: str, path: Path | str, step: int | None = None) -> None:
        """Uploads the picture file ``path`` to wandb at ``step``, by default the latest."""
        if self._run is not None:
            self._run.image(name, path, None if step is None else step + self.offset)

    def html(self, name: str, path: Path) -> None:
        if self._run is not None:
            self._run.html(name, path)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._run is not None:
            self._run.table(name, rows)

    def summary(self, figures: dict[str, Any]) -> None:
        """Records ``figures`` as the summary of the run."""
        self._write({"summary": figures})
        if self._run is not None:
            self._run.summary(figures)

    def log_artifact(self, folder: Path) -> None:
        """Records the ``folder`` of an artifact or model that the run wrote, with its kind and
        content hash.
        """
        if self._file is None:
            return
        manifest = folder / "manifest.json"
        content = json.loads(manifest.read_text("utf-8")) if manifest.exists() else None
        content_hash = content["content_hash"] if content else _weights_hash(folder)
        record = {
            "kind": folder.name,
            "folder": str(folder.absolute()),
            "content_hash": content_hash,
        }
        self._write({"artifact": record})
        if self._run is not None:
            self._run.log_artifact(folder, record, content)

    def use_artifact(self, artifact: Artifact) -> None:
        """Records an artifact that the run read, with its kind and content hash."""
        content_hash = artifact.manifest["content_hash"]
        record = {
            "kind": artifact.kind,
            "folder": str(artifact.path.absolute()),
            "content_hash": content_hash,
        }
        self._write({"read": record})
        if self._run is not None:
            self._run.use_artifact(record, artifact.config)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
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
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_until(line: bytes, step: int) -> bool:
    """Returns True if a line, which may be damaged, was logged at or before ``step``; a run's
    results follow its steps.
    """
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _weights_hash(folder: Path) -> str:
    """Returns the SHA-256 of the weight files of a model folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(bytes.fromhex(file_hash(path)))
    return digest.hexdigest()

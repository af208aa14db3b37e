"""Where a run's figures go: always ``metrics.jsonl`` in the work folder, and Weights & Biases when asked for."""

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import UserError


class Tracker:
    """Writes metrics of one run; use as ``with Tracker.start(...) as tracker``.

    Only the first process of a ``torchrun`` writes. A resumed run appends: of lines with the same step the later counts.

    Attributes
    ----------
    offset : steps of earlier stages of the same run; added to every logged step.
    """

    def __init__(self, folder: Path, run: Any | None, *, writes: bool) -> None:
        self.offset = 0
        self._run = run
        self._started = time.time()
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8") if writes else None

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
        if self._file is not None:
            # JSON knows no NaN and no infinity.
            numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
            line = {"step": step, "seconds": round(time.time() - self._started, 3), **numbers}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._run is not None:
            self._run.log(metrics, step=step)

    def image(self, name: str, path: Path | str) -> None:
        """Show the picture file ``path`` beside the run's figures."""
        if self._run is not None:
            import wandb

            self._run.log({name: wandb.Image(str(path))})

    def summary(self, figures: dict[str, Any]) -> None:
        """Record ``figures`` as the run's outcome."""
        if self._file is not None:
            self._file.write(json.dumps({"summary": figures}) + "\n")
            self._file.flush()
        if self._run is not None:
            self._run.summary.update(figures)

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

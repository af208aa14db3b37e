"""``msattn train-mta``: trains a small model on block retrieval, with multi-token or plain
attention.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from msattn.trainer import artifacts
from msattn.trainer.config import TrainMtaConfig, typed
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.devices import resolve_device
from msattn.trainer.mta.block_retrieval import Problems, Solver, accuracy, build
from msattn.trainer.ranks import num_ranks
from msattn.trainer.storage.documents import read_json
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_folder
from msattn.trainer.training.checkpoints import check_start, resume_settings
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

WEIGHTS = "model.safetensors"
RESULT = "result.json"  # configuration, metrics, versions
MAX_RESULT_BYTES = 1_000_000


def train_mta(cfg: TrainMtaConfig) -> Path:
    """Trains a model on block retrieval and writes it; the job of ``msattn train-mta``.

    Runs with the same seed have the same initial weights, problems and order of problems, whatever
    their attention. Returns ``outputs/mta/<name>/solver``: weights, and ``result.json`` with
    configuration and metrics. Checkpoints and metrics over time are in the sibling folder
    ``runs/solver``. Raises UserError before training if a result exists or the device is missing.
    Raises TrainingDiverged if a loss is not finite; the last complete checkpoint is kept.
    """
    folder = cfg.folder / "solver"
    artifacts.check_writable(folder, cfg.overwrite, marker=RESULT)
    work, settings = cfg.folder / "runs" / "solver", {"mta": asdict(cfg.mta)}
    check_start(
        work / "checkpoints",
        resume_settings(cfg.train, cfg.seed, "adamw", num_ranks(), settings),
        resume=cfg.resume,
        overwrite=cfg.overwrite,
    )
    solver = build(cfg.mta, cfg.seed).to(resolve_device(cfg.device))
    with Tracker.of_job(cfg, "train-mta", folder=work, run_name=f"mta-{cfg.name}") as tracker:
        metrics = _train(cfg, solver, work, tracker, settings)
        tracker.summary(metrics)
        if PartialState().is_main_process:  # all ranks hold the same weights
            facts = {"config": asdict(cfg), "metrics": metrics, "versions": artifacts.versions()}
            with locked(folder), replace_folder(folder) as new:  # an error leaves no partial folder
                save_model(solver.model, str(new / WEIGHTS))
                (new / RESULT).write_text(json.dumps(facts, indent=2) + "\n")
            tracker.log_artifact(folder)
    if PartialState().is_main_process:
        artifacts.print_summary(folder, metrics)
    return folder


def load(folder: Path | str) -> Solver:
    """Returns the trained solver in ``folder``, in fp32 on the CPU; raises UserError if it is
    missing or damaged.
    """
    from omegaconf import OmegaConf

    folder = Path(folder)
    result = read_json(folder / RESULT, f"{folder}: {RESULT}", MAX_RESULT_BYTES)
    cfg = typed(OmegaConf.create(result.get("config", {})), TrainMtaConfig)
    solver = build(cfg.mta, cfg.seed)
    try:
        load_model(solver.model, folder / WEIGHTS)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder}: {WEIGHTS} cannot be loaded ({first_line(error)})") from error
    return solver


def _train(
    cfg: TrainMtaConfig, solver: Solver, work: Path, tracker: Tracker, settings: dict[str, Any]
) -> dict[str, Any]:
    """Trains ``solver`` and returns its metrics: the last losses, accuracy on unseen problems,
    steps, seconds.
    """
    problems = Problems(cfg.mta, cfg.train.steps * cfg.train.batch_size, seed=(cfg.seed, 0))
    unseen = Problems(cfg.mta, cfg.mta.test_problems, seed=(cfg.seed, 1))
    result = fit(
        solver,
        problems,
        train=cfg.train,
        folder=work,
        tracker=tracker,
        device=solver.model.device,
        seed=cfg.seed,
        resume=cfg.resume,
        extra_settings=settings,
        evaluate=partial(accuracy, solver, unseen, cfg.train.batch_size),
    )
    return result.losses | result.metrics | {"steps": result.steps, "seconds": result.seconds}

"""``msattn train-gate``: trains the gates of one model and writes them as an artifact."""

import sys
from dataclasses import asdict
from pathlib import Path

from accelerate import PartialState

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import TrainGateConfig
from msattn.trainer.seer.calibrate import CALIBRATION_CHUNKS, calibrate
from msattn.trainer.seer.distillation import HEALTH_SPARSITIES, GateDistiller, health
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.maps import BlockMaps
from msattn.trainer.training.checkpoints import flatten_settings
from msattn.trainer.training.distributed import rank_shard
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

HEALTH_CHUNKS = 2
MAP_TITLES = ("attention's map", "gate's scores", f"read at {HEALTH_SPARSITIES[-1]:.0%} sparsity")


def train_gate(cfg: TrainGateConfig) -> Path:
    """Train the gates of one model and write them as an artifact: the job behind ``msattn train-gate``.

    Returns
    -------
    Path
        ``outputs/<model.name>/<name>/gate``. Checkpoints, metrics and pictures of block maps are in
        ``runs/gate`` beside it.

    Raises
    ------
    UserError
        Before any work: an artifact that stands there, a model that is not supported, chunks longer than its positions.
    TrainingDiverged
        When a loss is not finite; it names the layer, and the last good checkpoint stays.
    """
    folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "gate")
    artifacts.check_writable(folder, cfg.overwrite)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(loaded.model.config, cfg.data.seq_len)
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed)
    heldout = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, num_chunks=HEALTH_CHUNKS)
    gate = Gate.build(loaded.model.config, cfg.gate).to(loaded.model.device)
    work = folder.parent / "runs" / "gate"
    config = asdict(cfg)
    identity = {field: loaded.fingerprint[field] for field in artifacts.IDENTITY_FIELDS}
    job = flatten_settings(gate=config["gate"], model=identity) | {"dtype": cfg.dtype, "data": chunks.fingerprint}

    def check_health() -> dict[str, float]:
        maps = BlockMaps(len(gate.layers), models.num_heads(loaded.model.config))
        figures = health(gate, loaded.model, rank_shard(heldout, len(heldout)), maps)
        if PartialState().is_main_process:
            picture = work / "maps" / f"step-{tracker.step:06d}.png"
            try:
                maps.save(picture, MAP_TITLES)
                tracker.image("block maps", picture, tracker.step)
            except OSError as error:  # no reason to end a run
                print(f"{picture}: {error.strerror}; the picture is left out", file=sys.stderr, flush=True)
        return figures

    with Tracker.start(cfg.tracker, folder=work, run_name=f"{cfg.model.name}-gate-{cfg.name}", config=config) as tracker:
        summary = fit(
            GateDistiller(gate, loaded.model),
            chunks,
            train=cfg.train,
            folder=work,
            tracker=tracker,
            device=loaded.model.device,
            seed=cfg.seed,
            resume=cfg.resume,
            job=job,
            evaluate=check_health,
        )
        metrics = summary.metrics
        if not metrics:  # train.eval_every=0: only now
            tracker.step = summary.steps
            metrics = check_health()
            tracker.log(metrics, summary.steps)
        figures = {name: value for name, value in {**summary.losses, **metrics}.items() if "layer" not in name}
        figures |= {"steps": summary.steps, "seconds": summary.seconds}
        tracker.summary(figures)
        gate.thresholds = calibrate(gate, loaded.model, rank_shard(chunks, CALIBRATION_CHUNKS))
        if PartialState().is_main_process:  # under torchrun all processes hold the same gates, and one writes them
            artifacts.write(
                folder,
                kind="gate",
                tensors=gate.tensors(),
                config=config,
                model=loaded.fingerprint,
                details=gate.details(),
                data=chunks.fingerprint,
                seed=cfg.seed,
                metrics=figures,
                overwrite=cfg.overwrite,
            )
            tracker.artifact(folder)
    if PartialState().is_main_process:
        artifacts.print_summary(folder, figures)
    return folder

"""``msattn train-gate``: trains the gates of a model and writes them as an artifact."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FinetuneConfig, TrainGateConfig
from msattn.trainer.errors import print_once
from msattn.trainer.methods.buckets import decode_defaults, decode_window
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS, Gate
from msattn.trainer.methods.gate.choices import (
    TARGETS,
    WEIGHTS,
    can_choose,
    choose_mean_weight,
    choose_target,
    num_passes,
)
from msattn.trainer.methods.gate.decode_distillation import DecodeGateDistiller, decode_gate_recall
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.gate.distillation import RECALL_SPARSITIES, GateDistiller, gate_recall
from msattn.trainer.methods.gate.maps import BlockMaps
from msattn.trainer.methods.key_thresholds import calibrate_keys
from msattn.trainer.methods.thresholds import (
    CALIBRATION_CHUNKS,
    BlockThresholds,
    calibrate_blocks,
)
from msattn.trainer.models.timing import seconds_of_pass
from msattn.trainer.progress import estimate
from msattn.trainer.ranks import num_ranks
from msattn.trainer.training.checkpoints import (
    check_start,
    describe_last_checkpoint,
    resume_settings,
)
from msattn.trainer.training.distributed import init_process_state, rank_shard
from msattn.trainer.training.loop import fit
from msattn.trainer.training.pictures import save_maps
from msattn.trainer.training.tracker import Tracker

HELDOUT_CHUNKS = 2
PHASES: dict[str, Any] = {  # the gates, their training and their measurement
    "prefill": (Gate, GateDistiller, gate_recall),
    "decode": (DecodeGate, DecodeGateDistiller, decode_gate_recall),
}
MAP_TITLES = (
    "true block map",
    "gate scores",
    f"blocks read at {RECALL_SPARSITIES[-1]:.0%} sparsity",
)


def train_gate(cfg: TrainGateConfig) -> Path:
    """Trains the gates of a model and writes them as an artifact; the job of ``msattn train-gate``.

    Returns ``outputs/<model.name>/<name>/gate``, or ``decode_gate`` with ``gate.phase=decode``.
    Checkpoints, metrics and pictures of block maps are in the folder of this name below the sibling
    ``runs``. Raises UserError before training if the artifact exists, the model is not supported or
    chunks are longer than its positions, and TrainingDiverged, with the last complete checkpoint
    kept, if a loss is not finite.
    """
    folder = cfg.folder / cfg.gate.kind
    artifacts.check_writable(folder, cfg.overwrite)
    described = models.describe(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(described.config, cfg.data.seq_len)
    gate = PHASES[cfg.gate.phase][0].build(described.config, cfg.gate)
    init_process_state(models.resolve_device(cfg.device))
    chunks, heldout = data.training_chunks(
        cfg.data, described.tokenizer, seed=cfg.seed, num_heldout=HELDOUT_CHUNKS
    )
    chunks, calibration = chunks.split_off(CALIBRATION_CHUNKS)
    data.warn_of_repeats(cfg.data, chunks, cfg.train.steps * cfg.train.batch_size)
    work = cfg.folder / "runs" / folder.name
    chooses_target = _check_start(cfg, gate, described.fingerprint, chunks, work)
    loaded = described.load()
    gate.to(loaded.model.device)
    run_name = f"{cfg.model.name}-{folder.name}-{cfg.name}"
    with Tracker.of_job(cfg, "train-gate", folder=work, run_name=run_name) as tracker:
        _print_estimate(cfg, gate, loaded.model, len(heldout), chooses_target)
        if isinstance(gate, Gate) and chooses_target:
            choose_target(
                gate, loaded.model, rank_shard(calibration, CALIBRATION_CHUNKS, each_rank=True)
            )
        metrics = _train(cfg, gate, loaded, chunks, heldout, work, tracker)
        before = gate.cfg
        try:
            _calibrate(cfg, gate, loaded, calibration)
            if gate.cfg != before:  # the recalls in training were those of another weight
                metrics |= artifacts.without_layers(
                    _evaluate(gate, loaded, heldout, work / "maps", tracker)
                )
        except KeyboardInterrupt as stop:
            raise type(stop)(
                f"stopped after training; resume=true continues; "
                f"{describe_last_checkpoint(work / 'checkpoints')}"
            ) from stop
        tracker.summary(metrics)
        if PartialState().is_main_process:  # all ranks hold the same gates
            write_gate(folder, gate, cfg, loaded, chunks, metrics)
            tracker.log_artifact(folder)
    if PartialState().is_main_process:
        artifacts.print_summary(folder, metrics)
    return folder


def _check_start(
    cfg: TrainGateConfig,
    gate: Gate | DecodeGate,
    fingerprint: dict[str, Any],
    chunks: data.Chunks,
    work: Path,
) -> bool:
    """Refuses earlier checkpoints that do not fit, and gives ``gate`` the target of those that the
    job resumes; returns True if a target has yet to be chosen.
    """
    chooses_target = isinstance(gate, Gate) and _chooses(cfg, gate, "target")
    known = resume_settings(
        cfg.train, cfg.seed, "adamw", num_ranks(), _settings(cfg, gate, fingerprint, chunks)
    )
    if chooses_target:
        del known["gate.target"]
    found = check_start(work / "checkpoints", known, resume=cfg.resume, overwrite=cfg.overwrite)
    if chooses_target and found:
        gate.cfg = replace(gate.cfg, target=found["gate.target"])
    return chooses_target and not found


def _chooses(cfg: TrainGateConfig, gate: Gate, key: str) -> bool:
    """Returns True if a setting is not given, and chosen by what it does to predictions."""
    return getattr(cfg.gate, key) is None and can_choose(cfg.data.seq_len, gate)


def _print_estimate(
    cfg: TrainGateConfig,
    gate: Gate | DecodeGate,
    model: PreTrainedModel,
    num_heldout: int,
    chooses_target: bool,
) -> None:
    """Prints how long the whole job takes on a CPU, from a dense pass and one of training."""
    _, distiller, _ = PHASES[cfg.gate.phase]
    dense = seconds_of_pass(model, cfg.data.seq_len)
    trained = seconds_of_pass(
        model, cfg.data.seq_len, lambda model, ids: distiller(gate, model)(ids)
    )
    if dense is None or trained is None:
        return
    train, ranks = cfg.train, PartialState().num_processes
    parts = {f"{train.steps} steps": train.steps * train.batch_size / ranks * trained}
    if chooses_target:
        maps = CALIBRATION_CHUNKS * len(TARGETS) * (trained - dense)
        parts["choosing gate.target"] = num_passes(len(TARGETS)) * dense + maps
    if isinstance(gate, Gate) and _chooses(cfg, gate, "mean_weight"):
        parts["choosing gate.mean_weight"] = num_passes(len(WEIGHTS)) * dense
    evaluations = 1 + (train.steps // train.eval_every if train.eval_every else 0)
    parts["calibration"] = CALIBRATION_CHUNKS * dense
    parts["evaluation"] = num_heldout * evaluations * trained
    if PartialState().is_main_process:
        estimate("train-gate", parts)


def _calibrate(
    cfg: TrainGateConfig, gate: Gate | DecodeGate, loaded: models.Loaded, chunks: data.Chunks
) -> None:
    """Measures the thresholds of trained gates on ``chunks``; before, unless it is given, chooses
    the weight of means.
    """
    items = [*rank_shard(chunks, CALIBRATION_CHUNKS, each_rank=True)]
    if isinstance(gate, DecodeGate):
        gate.thresholds = calibrate_keys(
            gate, loaded.model, items, **decode_window(cfg.model.presets)
        )
        return
    if _chooses(cfg, gate, "mean_weight"):
        choose_mean_weight(gate, loaded.model, items)
    gate.thresholds = gate_thresholds(gate, loaded.model, items)


def gate_thresholds(
    gate: Gate, teacher: PreTrainedModel, chunks: Iterable[dict[str, Any]]
) -> dict[str, BlockThresholds]:
    """Returns the thresholds of the scores of a gate for prefill, by name, from
    :func:`calibrate_blocks`.
    """
    scorers = {name: scorer(gate) for name, scorer in GATE_SCORERS.items()}
    return calibrate_blocks(scorers, teacher, chunks, always=gate.always)


def _train(
    cfg: TrainGateConfig,
    gate: Gate | DecodeGate,
    loaded: models.Loaded,
    chunks: data.Chunks,
    heldout: data.Chunks,
    work: Path,
    tracker: Tracker,
) -> dict[str, Any]:
    """Trains ``gate`` and returns the metrics of the artifact: losses and recalls over all layers,
    steps, seconds.
    """
    _, distiller, _ = PHASES[cfg.gate.phase]
    result = fit(
        distiller(gate, loaded.model),
        chunks,
        train=cfg.train,
        folder=work,
        tracker=tracker,
        device=loaded.model.device,
        seed=cfg.seed,
        resume=cfg.resume,
        extra_settings=_settings(cfg, gate, loaded.fingerprint, chunks),
        evaluate=partial(_evaluate, gate, loaded, heldout, work / "maps", tracker),
    )
    return artifacts.without_layers(result.losses | result.metrics) | {
        "steps": result.steps,
        "seconds": result.seconds,
    }


def _settings(
    cfg: TrainGateConfig,
    gate: Gate | DecodeGate,
    fingerprint: dict[str, Any],
    chunks: data.Chunks,
) -> dict[str, Any]:
    """Returns the settings other than ``train`` that must be the same when training resumes."""
    return {
        "gate": asdict(gate.cfg),
        "model": artifacts.identity(fingerprint),
        "dtype": cfg.dtype,
        "data": chunks.fingerprint,
    }


def _evaluate(
    gate: Gate | DecodeGate,
    loaded: models.Loaded,
    heldout: data.Chunks,
    folder: Path,
    tracker: Tracker,
) -> dict[str, float]:
    """Measures the recall of ``gate`` on held-out chunks and writes a picture of block maps into
    ``folder``.
    """
    maps = BlockMaps(
        models.served_layers(loaded.model.config), models.num_heads(loaded.model.config)
    )
    *_, recall = PHASES[gate.phase]
    recalls = recall(gate, loaded.model, rank_shard(heldout, len(heldout)), maps)
    if PartialState().is_main_process:
        picture = folder / f"step-{tracker.step:06d}.png"
        try:
            save_maps(picture, maps.maps, MAP_TITLES)
            tracker.image("block maps", picture, tracker.step)
        except OSError as error:  # training continues without a picture
            print_once(f"warning: {picture}: {error.strerror}; the picture is left out")
    return recalls


def write_gate(
    folder: Path,
    gate: Gate | DecodeGate,
    cfg: TrainGateConfig | FinetuneConfig,
    loaded: models.Loaded,
    chunks: data.Chunks,
    metrics: dict[str, Any],
) -> None:
    """Writes the gates of the model ``loaded`` as an artifact; ``cfg`` is the job that trained them
    on ``chunks``.
    """
    served = (
        {"serving": decode_defaults(cfg.model.presets, gate.num_buckets)}
        if isinstance(gate, DecodeGate)
        else {}
    )
    artifacts.write(
        folder,
        kind=gate.cfg.kind,
        tensors=gate.state_dict(),
        config=asdict(cfg)
        | ({"gate": asdict(gate.cfg)} if isinstance(cfg, TrainGateConfig) else {}),
        model=loaded.fingerprint,
        details=gate.details() | served,
        data=chunks.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )

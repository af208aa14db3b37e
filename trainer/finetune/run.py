"""``msattn finetune``: trains a whole model on long text. Writes it as a Hugging Face folder, and
its gates as an artifact.

Training takes 16 bytes per parameter. With ``train.fsdp`` the ranks shard them and gather the
weights of a layer when it runs.
"""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FinetuneConfig
from msattn.trainer.data.mixture import RetrievalMixture
from msattn.trainer.errors import UserError
from msattn.trainer.finetune.trainer import FineTuner, checkpoint_activations
from msattn.trainer.memory import release_memory
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.distillation import gate_recall
from msattn.trainer.methods.gate.train import gate_thresholds, write_gate
from msattn.trainer.methods.selection import always_read
from msattn.trainer.methods.thresholds import CALIBRATION_CHUNKS
from msattn.trainer.ranks import num_ranks
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_folder
from msattn.trainer.training.checkpoints import TrainingResult, check_start, resume_settings
from msattn.trainer.training.distributed import rank_shard
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

# Says where the model comes from; a folder without this file was not written by msattn and is never
# replaced.
FACTS = "training.json"
HELDOUT_CHUNKS = 4
BYTES_PER_PARAMETER = 16  # float32: weight, gradient, and two moments of AdamW
DDP_BYTES_PER_PARAMETER = 4  # DDP's communication buckets hold a copy of the gradients
SDPA_PRIORITY = [  # fastest first; PyTorch's own order has cuDNN last
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def finetune(cfg: FinetuneConfig) -> Path:
    """Trains a whole model and writes it, and its gates, as ``outputs/<model.name>/<name>/model``
    and ``gate``.

    Returns the model's folder: weights, config with the RoPE scaling, tokenizer, ``training.json``.
    Checkpoints and metrics are in ``runs/finetune``. A model that cannot be trained is refused
    before the first step. If a loss is not finite (TrainingDiverged), the last complete checkpoint
    is kept.
    """
    folder = cfg.folder / "model"
    _check_folders(cfg, folder)
    gate = _load_gate(cfg) if cfg.sparse else None
    described = _describe_model(cfg, gate)
    chunks, heldout = data.training_chunks(
        cfg.data, described.tokenizer, seed=cfg.seed, num_heldout=HELDOUT_CHUNKS
    )
    data.warn_of_repeats(cfg.data, chunks, cfg.train.steps * cfg.train.batch_size * (1 - cfg.tasks))
    work, config = cfg.folder / "runs" / "finetune", asdict(cfg)
    known = _settings(cfg, described.fingerprint, chunks, gate)
    check_start(
        work / "checkpoints",
        resume_settings(cfg.train, cfg.seed, "adamw", num_ranks(), known),
        resume=cfg.resume,
        overwrite=cfg.overwrite,
    )
    loaded = _load_model(described, gate)
    dtype = models.resolve_dtype(cfg.dtype, loaded.model.device)
    tuner = FineTuner(
        loaded.model.requires_grad_(True),
        gate,
        cfg.select,
        gate_weight=cfg.gate_weight,
        dtype=dtype,
    )
    if cfg.train.activation_checkpointing:
        checkpoint_activations(loaded.model)
    with Tracker.of_job(
        cfg, "finetune", folder=work, run_name=f"{cfg.model.name}-{cfg.name}"
    ) as tracker:
        with tuner.attached(), sdpa_kernel(SDPA_PRIORITY, set_priority=True):
            items: Dataset[dict[str, Tensor]] = chunks
            if cfg.tasks > 0:
                length = cfg.train.steps * cfg.train.batch_size
                items = RetrievalMixture(
                    chunks, loaded.tokenizer, share=cfg.tasks, length=length, seed=cfg.seed
                )
            settings = _settings(cfg, loaded.fingerprint, chunks, gate)
            result = _fit(cfg, tuner, items, heldout, work, tracker, settings)
        if gate is not None and gate.artifact is not None:
            tracker.use_artifact(gate.artifact)
        metrics = artifacts.without_layers(result.losses | result.metrics) | {
            "steps": result.steps,
            "seconds": result.seconds,
        }
        tracker.summary(metrics)
        facts = {
            "from": loaded.fingerprint,
            "config": config,
            "data": chunks.fingerprint,
            "metrics": metrics,
        }
        _write_model(tuner.model, loaded.tokenizer, dtype, folder, facts)
        if gate is not None:
            _write_trained_gate(cfg, gate, folder, chunks, heldout)
        tracker.log_artifact(folder)
        if gate is not None:
            tracker.log_artifact(folder.with_name("gate"))
    if PartialState().is_main_process:
        artifacts.print_summary(folder, metrics)
    return folder


def _describe_model(cfg: FinetuneConfig, gate: Gate | None) -> models.Described:
    """Reads what is known of the model before its weights, and checks that it can be trained here,
    with ``gate``.
    """
    device = models.resolve_device(cfg.device)
    _check_fsdp(cfg, device)
    # Random weights are drawn in the same dtype as by msattn train-gate, so they are equal;
    # checkpoints are read in fp32.
    dtype = cfg.dtype if cfg.model.init == "random" else "float32"
    described = models.describe(cfg.model, device=cfg.device, dtype=dtype, seed=cfg.seed)
    models.check_length(described.config, cfg.data.seq_len)
    _check_memory(cfg, described.config, device)
    if gate is not None and gate.artifact is not None:
        artifacts.check_model(gate.artifact.manifest, described.fingerprint, strict=False)
    return described


def _load_model(described: models.Described, gate: Gate | None) -> models.Loaded:
    """Loads the model with fp32 weights, for which ``gate`` must have been trained, and moves that
    to its device.
    """
    loaded = described.load()
    loaded.model.float()
    if gate is not None:
        assert gate.artifact is not None
        artifacts.check_model(gate.artifact.manifest, loaded.fingerprint)
        gate.to(loaded.model.device).requires_grad_(True)
    return loaded


def _settings(
    cfg: FinetuneConfig, fingerprint: dict[str, Any], chunks: data.Chunks, gate: Gate | None
) -> dict[str, Any]:
    """Returns the settings other than ``train`` that must be the same when training resumes."""
    gate_hash = (
        gate.artifact.manifest["content_hash"] if gate is not None and gate.artifact else None
    )
    own = {
        "gate_weight": cfg.gate_weight,
        "tasks": cfg.tasks,
        "dtype": cfg.dtype,
        "select": cfg.select.as_dict(),
    }
    return own | {
        "artifacts": {"gate": gate_hash},
        "model": artifacts.identity(fingerprint),
        "data": chunks.fingerprint,
    }


def _fit(
    cfg: FinetuneConfig,
    tuner: FineTuner,
    items: Dataset[dict[str, Tensor]],
    heldout: data.Chunks,
    work: Path,
    tracker: Tracker,
    settings: dict[str, Any],
) -> TrainingResult:
    """Trains ``tuner``; the result has the metrics of the last evaluation."""
    layers: Any = models.decoder(tuner.model).layers
    try:
        return fit(
            tuner,
            items,
            train=cfg.train,
            folder=work,
            tracker=tracker,
            device=tuner.model.device,
            seed=cfg.seed,
            resume=cfg.resume,
            extra_settings=settings,
            evaluate=lambda: heldout_loss(tuner, heldout),
            shard=type(layers[0]).__name__ if cfg.train.fsdp else None,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"data.seq_len={cfg.data.seq_len}, "
            f"train.micro_batch_size={cfg.train.micro_batch_size}: out of GPU memory; lower them, "
            "or set train.activation_checkpointing=true, or train.fsdp=true on more GPUs"
        ) from error


@torch.no_grad()
def heldout_loss(tuner: FineTuner, chunks: data.Chunks) -> dict[str, float]:
    """Returns the mean next-token loss (nats) on held-out text, with the same attention as in
    training.

    Every rank must call it: sharded weights are gathered from all of them.
    """
    losses = [
        tuner(chunks[i]["input_ids"][None].to(tuner.model.device))["parts"]["language"]
        for i in range(len(chunks))
    ]
    return {"heldout/loss": torch.stack(losses).mean().item()}


def _check_folders(cfg: FinetuneConfig, folder: Path) -> None:
    """Raises UserError if the result would replace the model or gates to train, or files not
    written by msattn.
    """
    artifacts.check_writable(folder, cfg.overwrite, marker=FACTS)
    replaced = {"model.path": (cfg.model.path, folder)} if cfg.model.init == "pretrained" else {}
    if cfg.sparse:
        gates = folder.with_name("gate")
        artifacts.check_writable(gates, cfg.overwrite)
        replaced["artifacts.gate"] = (str(cfg.artifacts.gate), gates)
    for key, (source, target) in replaced.items():
        if Path(source).expanduser().resolve() == target.resolve():
            raise UserError(
                f"{key}={source}: the result would overwrite it; give the run another name="
            )


def _load_gate(cfg: FinetuneConfig) -> Gate:
    try:
        return Gate.load(str(cfg.artifacts.gate))
    except UserError as error:
        hint = (
            f"msattn train-gate {cfg.arguments('base')} trains gates, select.sparsity=0 needs none"
        )
        raise UserError(f"artifacts.gate: {error}; {hint}") from error


def _check_fsdp(cfg: FinetuneConfig, device: torch.device) -> None:
    if cfg.train.fsdp and device.type != "cuda":
        raise UserError(
            "train.fsdp=true: accelerate shards weights on GPUs only; set train.fsdp=false on a CPU"
        )
    if cfg.train.fsdp and num_ranks() == 1:
        raise UserError(
            "train.fsdp=true: needs several processes, but there is only one; "
            "torchrun --nproc-per-node 4 --no-python msattn finetune ... starts four"
        )


def _check_memory(cfg: FinetuneConfig, config: PreTrainedConfig, device: torch.device) -> None:
    """Raises UserError, before the weights are read, if weights and optimizer state exceed the
    memory of the GPU.
    """
    if device.type != "cuda":
        return
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    ranks = num_ranks()
    replicated = BYTES_PER_PARAMETER + (DDP_BYTES_PER_PARAMETER if ranks > 1 else 0)
    needed = parameters * (BYTES_PER_PARAMETER / ranks if cfg.train.fsdp else replicated)
    memory = torch.cuda.get_device_properties(device).total_memory
    if needed > memory:
        raise UserError(
            f"train.fsdp={str(cfg.train.fsdp).lower()}: weights, gradients and optimizer state "
            f"need {needed / 1e9:.0f} GB per GPU, and it has {memory / 1e9:.0f}; set "
            "train.fsdp=true under torchrun on more GPUs"
        )


def gather_weights(
    module: nn.Module, dtype: torch.dtype, *, keep: bool = True
) -> dict[str, Tensor]:
    """Returns the weights and buffers of all ranks on the CPU, {} unless ``keep`` is set; every
    rank must call it.
    """
    weights = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            weights[name] = whole.to("cpu", dtype)
    return weights


def _write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Writes ``model`` in ``dtype``; an error leaves no partial folder."""
    state = PartialState()
    weights = gather_weights(model, dtype, keep=state.is_main_process)
    if state.is_main_process:
        with torch.device("meta"):  # the trained model may be sharded and compiled
            attention = "sdpa" if models.family_of(model.config).plain_scores else "eager"
            plain: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(model.config), dtype=dtype, attn_implementation=attention
            )
        plain.load_state_dict(weights, assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        with models.no_progress_bar(), locked(folder), replace_folder(folder) as new:
            plain.save_pretrained(new)
            tokenizer.save_pretrained(new)
            (new / FACTS).write_text(
                json.dumps({**facts, "versions": artifacts.versions()}, indent=2) + "\n"
            )
    state.wait_for_everyone()


def _write_trained_gate(
    cfg: FinetuneConfig, gate: Gate, folder: Path, chunks: data.Chunks, heldout: data.Chunks
) -> None:
    """Calibrates the gates on the trained model in ``folder``, measures their recall and writes
    them to a sibling folder.
    """
    release_memory()  # frees the optimizer state
    source = replace(
        cfg.model, path=str(folder), init="pretrained", revision=None, rope_scaling=None
    )
    loaded = models.load(source, device=cfg.device, dtype=cfg.dtype)
    trained = Gate.build(loaded.model.config, gate.cfg)
    trained.load_state_dict(gather_weights(gate, torch.float32))
    trained.to(loaded.model.device)
    trained.always = always_read(cfg.select, gate.always)._replace(dense_queries=0)
    trained.thresholds = gate_thresholds(
        trained, loaded.model, rank_shard(chunks, CALIBRATION_CHUNKS, each_rank=True)
    )
    metrics = gate_recall(trained, loaded.model, rank_shard(heldout, len(heldout)))
    if PartialState().is_main_process:
        write_gate(
            folder.with_name("gate"),
            trained,
            cfg,
            loaded,
            chunks,
            artifacts.without_layers(metrics),
        )

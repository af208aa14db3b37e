"""``finetune``: a whole model learns longer text, and is written as a Hugging Face folder, its gates beside it.

Training holds 16 bytes a parameter: with ``train.fsdp`` the processes share them out, and gather a layer's weights when it
runs.
"""

import copy
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FinetuneConfig
from msattn.trainer.data.mixture import RetrievalMixture
from msattn.trainer.errors import UserError
from msattn.trainer.finetune.trainer import FineTuner, checkpoint_activations
from msattn.trainer.seer.calibrate import CALIBRATION_CHUNKS, calibrate
from msattn.trainer.seer.distillation import health
from msattn.trainer.seer.gate import Gate
from msattn.trainer.training.checkpoints import TrainingResult, flatten_settings
from msattn.trainer.training.distributed import rank_shard
from msattn.trainer.training.loop import fit, release_memory
from msattn.trainer.training.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTS = "training.json"  # how the model was made; a folder without it is not ours to replace
HELDOUT_CHUNKS = 4
BYTES_A_PARAMETER = 16  # float32: the weight, its gradient, and AdamW's two moments
BUCKET_BYTES = 4  # a parameter: the second copy of its gradient that DDP sends to the other processes
FASTEST_FIRST = [  # of the backends of dense attention; PyTorch's own order has cuDNN last
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@torch.no_grad()
def heldout_loss(tuner: FineTuner, chunks: data.Chunks) -> dict[str, float]:
    """Mean next-token loss (nats) of held-out text, read as in training. All processes run it: shared weights need that."""
    losses = [tuner(chunks[i]["input_ids"][None].to(tuner.model.device))["parts"]["language"] for i in range(len(chunks))]
    return {"heldout/loss": torch.stack(losses).mean().item()}


def finetune(cfg: FinetuneConfig) -> Path:
    """Train a whole model and write it as a Hugging Face folder, its gates beside it: the job behind ``msattn finetune``.

    Returns
    -------
    Path
        ``outputs/<model.name>/<name>/model``: weights, config with the RoPE scaling, tokenizer, ``training.json``. The gates
        of the trained model are in ``gate`` beside it, checkpoints and metrics in ``runs/finetune``.

    Raises
    ------
    UserError
        Before any work: a folder that stands there, gates that are missing or another model's, chunks longer than the
        positions, a model too large for the memory there is, ``train.fsdp`` without several GPUs. Later: memory that ran out.
    TrainingDiverged
        When a loss is not finite; the last good checkpoint stays.
    """
    folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "model")
    _check_places(cfg, folder)
    gate = _gate(cfg) if cfg.sparse else None
    device = models.resolve_device(cfg.device)
    _check_sharing(cfg, device)
    # Random weights are drawn in the dtype that train-gate saw them in; those of a checkpoint are read as they are.
    drawn = cfg.dtype if cfg.model.init == "random" else "float32"
    loaded = models.load(cfg.model, device=cfg.device, dtype=drawn, seed=cfg.seed)
    loaded.model.float()
    models.check_length(loaded.model.config, cfg.data.seq_len)
    _check_memory(cfg, loaded.model, device)
    if gate is not None:
        assert gate.manifest is not None
        artifacts.check_model(gate.manifest, loaded.fingerprint)
        gate.to(device).requires_grad_(True)
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed)
    heldout = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, num_chunks=HELDOUT_CHUNKS)
    dtype = models.resolve_dtype(cfg.dtype, device)
    tuner = FineTuner(loaded.model.requires_grad_(True), gate, cfg.select, gate_weight=cfg.gate_weight, dtype=dtype)
    if cfg.train.activation_checkpointing:
        checkpoint_activations(loaded.model)
    work, config = folder.parent / "runs" / "finetune", asdict(cfg)
    with Tracker.start(cfg.tracker, folder=work, run_name=f"{cfg.model.name}-{cfg.name}", config=config) as tracker:
        with tuner.attached(), sdpa_kernel(FASTEST_FIRST, set_priority=True):
            items, job = _items(cfg, chunks, loaded.tokenizer), _settings(cfg, loaded, chunks, gate)
            summary = _fit(cfg, tuner, items, heldout, work, tracker, job)
        figures = {name: value for name, value in {**summary.losses, **summary.metrics}.items() if "layer" not in name}
        figures |= {"steps": summary.steps, "seconds": summary.seconds}
        tracker.summary(figures)
        facts = {"from": loaded.fingerprint, "config": config, "data": chunks.fingerprint, "metrics": figures}
        _write_model(tuner.model, loaded.tokenizer, dtype, folder, facts)
        if gate is not None:
            _write_gate(cfg, gate, folder, chunks, heldout)
        tracker.artifact(folder)
        if gate is not None:
            tracker.artifact(folder.with_name("gate"))
    if PartialState().is_main_process:
        artifacts.print_summary(folder, figures)
    return folder


def _items(cfg: FinetuneConfig, chunks: data.Chunks, tokenizer: Any) -> Dataset[dict[str, Tensor]]:
    """What is trained on: the chunks as they are, or tasks among them."""
    if cfg.tasks == 0:
        return chunks
    length = cfg.train.steps * cfg.train.batch_size
    return RetrievalMixture(chunks, tokenizer, share=cfg.tasks, length=length, seed=cfg.seed)


def _settings(cfg: FinetuneConfig, loaded: models.Loaded, chunks: data.Chunks, gate: Gate | None) -> dict[str, Any]:
    """What a continuation has to share beside the optimizer's run."""
    gates = gate.manifest["content_hash"] if gate is not None and gate.manifest else None
    identity = {field: loaded.fingerprint[field] for field in artifacts.IDENTITY_FIELDS}
    own = {"gate_weight": cfg.gate_weight, "tasks": cfg.tasks, "dtype": cfg.dtype}
    parts = flatten_settings(select=asdict(cfg.select), artifacts={"gate": gates}, model=identity)
    return {**own, **parts, "data": chunks.fingerprint}


def _fit(
    cfg: FinetuneConfig,
    tuner: FineTuner,
    items: Dataset[dict[str, Tensor]],
    heldout: data.Chunks,
    work: Path,
    tracker: Tracker,
    job: dict[str, Any],
) -> TrainingResult:
    layers: Any = tuner.model.base_model.layers
    try:
        summary = fit(
            tuner,
            items,
            train=cfg.train,
            folder=work,
            tracker=tracker,
            device=tuner.model.device,
            seed=cfg.seed,
            resume=cfg.resume,
            job=job,
            evaluate=lambda: heldout_loss(tuner, heldout),
            shard=type(layers[0]).__name__ if cfg.train.fsdp else None,
        )
        if summary.metrics:
            return summary
        tuner.eval()  # train.eval_every=0: only now
        return replace(summary, metrics=heldout_loss(tuner, heldout))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"data.seq_len={cfg.data.seq_len}, train.micro_batch_size={cfg.train.micro_batch_size}: the GPU's memory does not "
            "hold it; shorten them, train.activation_checkpointing=true, or train.fsdp=true on more GPUs"
        ) from error


def _check_places(cfg: FinetuneConfig, folder: Path) -> None:
    """Refuse to write over what training starts from, or over what is not ours."""
    artifacts.check_writable(folder, cfg.overwrite, marker=FACTS)
    places = {"model.path": (cfg.model.path, folder)} if cfg.model.init == "pretrained" else {}
    if cfg.sparse:
        gates = folder.with_name("gate")
        artifacts.check_writable(gates, cfg.overwrite)
        places["artifacts.gate"] = (str(cfg.artifacts.gate), gates)
    for key, (start, end) in places.items():
        if Path(start).expanduser().resolve() == end.resolve():
            raise UserError(f"{key}={start}: the result would go there; give the run another name=")


def _gate(cfg: FinetuneConfig) -> Gate:
    try:
        return Gate.load(str(cfg.artifacts.gate))
    except UserError as error:
        hint = f"msattn train-gate model={cfg.model.name} makes gates, select.sparsity=0 needs none"
        raise UserError(f"artifacts.gate: {error}; {hint}") from error


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_sharing(cfg: FinetuneConfig, device: torch.device) -> None:
    """Refuse ``train.fsdp`` where it would share nothing."""
    if cfg.train.fsdp and device.type != "cuda":
        raise UserError("train.fsdp=true: accelerate shares weights out among GPUs alone; train.fsdp=false on a CPU")
    if cfg.train.fsdp and _processes() == 1:
        raise UserError(
            "train.fsdp=true: weights are shared out among processes, and there is one; "
            "torchrun --nproc-per-node 4 --no-python msattn finetune ... starts four"
        )


def _check_memory(cfg: FinetuneConfig, model: "PreTrainedModel", device: torch.device) -> None:
    """Refuse, before the first step, weights and optimizer state that are more than the GPU has."""
    if device.type != "cuda":
        return
    processes = _processes()
    whole = BYTES_A_PARAMETER + (BUCKET_BYTES if processes > 1 else 0)
    needed = model.num_parameters() * (BYTES_A_PARAMETER / processes if cfg.train.fsdp else whole)
    memory = torch.cuda.get_device_properties(device).total_memory
    if needed > memory:
        raise UserError(
            f"train.fsdp={str(cfg.train.fsdp).lower()}: weights, gradients and optimizer state take {needed / 1e9:.0f} GB a "
            f"GPU, and it has {memory / 1e9:.0f}; train.fsdp=true under torchrun on more GPUs"
        )


def gathered(module: nn.Module, dtype: torch.dtype, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole weights and buffers of ``module`` on the CPU, whoever holds them; all processes take part.

    Parameters
    ----------
    keep : whether this process wants them; otherwise it gets none.
    """
    found = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.to("cpu", dtype)
    return found


def _write_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dtype: torch.dtype,
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Write ``model`` in ``dtype``, whole or not at all."""
    from transformers import AutoModelForCausalLM

    state = PartialState()
    weights = gathered(model, dtype, keep=state.is_main_process)
    if state.is_main_process:
        with torch.device("meta"):  # an untouched model of that class, for the weights alone
            plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype, attn_implementation="sdpa")
        plain.load_state_dict(weights, assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        with models.no_progress_bar(), artifacts.replace_atomically(folder) as new:
            plain.save_pretrained(new)
            tokenizer.save_pretrained(new)
            (new / FACTS).write_text(json.dumps({**facts, "versions": artifacts.versions()}, indent=2) + "\n")
    state.wait_for_everyone()


def _write_gate(cfg: FinetuneConfig, gate: Gate, folder: Path, chunks: data.Chunks, heldout: data.Chunks) -> None:
    """Write the gates as those of the model in ``folder``, calibrated on it and measured."""
    release_memory()  # the optimizer's
    source = replace(cfg.model, path=str(folder), init="pretrained", revision=None, rope_scaling=None)
    loaded = models.load(source, device=cfg.device, dtype=cfg.dtype)
    trained = Gate.build(loaded.model.config, gate.cfg)
    trained.load_state_dict(gathered(gate, torch.float32))
    trained.to(loaded.model.device)
    trained.thresholds = calibrate(trained, loaded.model, rank_shard(chunks, CALIBRATION_CHUNKS))
    metrics = health(trained, loaded.model, rank_shard(heldout, len(heldout)))
    if PartialState().is_main_process:
        artifacts.write(
            folder.with_name("gate"),
            kind="gate",
            tensors=trained.tensors(),
            config=asdict(cfg),
            model=loaded.fingerprint,
            details=trained.details(),
            data=chunks.fingerprint,
            seed=cfg.seed,
            metrics={name: value for name, value in metrics.items() if "layer" not in name},
            overwrite=cfg.overwrite,
        )

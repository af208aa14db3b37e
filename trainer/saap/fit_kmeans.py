"""``msattn fit-kmeans``: spherical k-means on the keys of each key/value head, written as an artifact.

Keys are taken before RoPE; position 0, the attention sink, is left out. Under ``torchrun`` the processes share the layers.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from rich.progress import Progress, track
from torch import Tensor

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FitKMeansConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.saap.clustering import fit_points, mean_stats, resolve_engine
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.training import distributed
from msattn.trainer.training.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def collect_keys(
    model: "PreTrainedModel", chunks: data.Chunks, layers: list[int], *, rope: bool, quiet: bool = False
) -> dict[int, Tensor]:
    """Keys ``[Hkv, n, D]`` of each of ``layers`` over all chunks (without position 0), on the CPU in the model's dtype."""
    keys: dict[int, Tensor] = {}
    begin = 0

    def attend(x: LayerInputs) -> Tensor:
        if x.layer in layers:
            new = (x.k if rope else x.k_nope)[0, :, 1:]
            if begin == 0:
                keys[x.layer] = torch.empty(new.shape[0], len(chunks) * new.shape[1], new.shape[2], dtype=new.dtype)
            keys[x.layer][:, begin : begin + new.shape[1]] = new
        return dense_attention(x)

    device = next(model.parameters()).device
    with tap(model, attend), torch.no_grad():
        for i in track(range(len(chunks)), description="keys of prompts", disable=quiet):
            input_ids = chunks[i]["input_ids"].to(device)
            run_backbone(model, input_ids[None])
            begin += len(input_ids) - 1
    return keys


def check_size(cfg: FitKMeansConfig, model: "PreTrainedModel", num_chunks: int, processes: int) -> None:
    """UserError where there are more buckets than keys, or the keys of a process's layers do not fit into memory."""
    config, num_buckets, num_keys = model.config, cfg.kmeans.num_buckets, num_chunks * (cfg.data.seq_len - 1)
    if num_buckets > num_keys:
        raise UserError(f"kmeans.num_buckets={num_buckets}: accepted are at most as many as there are keys, {num_keys}")
    heads = -(-models.num_layers(config) // processes) * models.num_kv_heads(config)
    needed = heads * num_keys * models.head_dim(config) * model.dtype.itemsize
    free = psutil.virtual_memory().available // processes
    if needed > free:
        raise UserError(
            f"kmeans.num_prompts={cfg.kmeans.num_prompts}: the keys take {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free; lower it or data.seq_len"
        )


def fit_kmeans(cfg: FitKMeansConfig) -> Path:
    """The job behind ``msattn fit-kmeans``: partitions of the keys of every layer, written as an artifact.

    Process r of n under ``torchrun`` fits the layers r, r + n, ...; each runs all prompts, which costs every process what it
    costs one, and keeps the keys of its own layers. All must see the same ``outputs``.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/kmeans``.

    Raises
    ------
    UserError : the artifact exists, the model or data cannot serve, more buckets than keys, more keys than fit into memory, no
        Faiss where it is to fit.
    """
    folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    settings = {**asdict(cfg.kmeans), "engine": resolve_engine(cfg.kmeans.engine, device)}
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(loaded.model.config, cfg.data.seq_len)
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.kmeans.num_prompts)

    processes = distributed.init_process_state(device)
    check_size(cfg, loaded.model, len(chunks), processes.num_processes)
    work = folder.parent / "runs" / "kmeans"
    made_of = {
        "kmeans": settings,
        "data": chunks.fingerprint,
        "model": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "seed": cfg.seed,
    }
    with processes.main_process_first():  # it removes what other settings left
        parts = FinishedParts(work / "layers", made_of, resume=cfg.resume)
    processes.wait_for_everyone()
    layers = list(range(models.num_layers(loaded.model.config)))
    own = layers[processes.process_index :: processes.num_processes]
    fit_layers(cfg, loaded.model, chunks, parts, own, device=device, quiet=not processes.is_main_process)
    processes.wait_for_everyone()
    if processes.is_main_process:
        fitted = [parts.load(part_name(layer)) for layer in layers]
        metrics = mean_stats([stats for _, stats in fitted])
        artifacts.write(
            folder,
            kind="kmeans",
            tensors={"centroids": torch.stack([tensors["centroids"] for tensors, _ in fitted])},
            config=asdict(cfg),
            model=loaded.fingerprint,
            details={**settings, "layers": layers, "stats": [stats for _, stats in fitted]},
            data=chunks.fingerprint,
            seed=cfg.seed,
            metrics=metrics,
            overwrite=cfg.overwrite,
        )
        run_name = f"{cfg.model.name}-{cfg.name}-kmeans"
        with Tracker.start(cfg.tracker, folder=work, run_name=run_name, config=asdict(cfg)) as tracker:
            for layer, (_, stats) in enumerate(fitted):
                tracker.log(mean_stats([stats]), step=layer)
            tracker.summary(metrics)
            tracker.artifact(folder)
        parts.remove()
        artifacts.print_summary(folder, metrics)
    processes.wait_for_everyone()
    return folder


def part_name(layer: int) -> str:
    """What a layer's part is called."""
    return f"layer_{layer:03d}"


def fit_layers(
    cfg: FitKMeansConfig,
    model: "PreTrainedModel",
    chunks: data.Chunks,
    parts: FinishedParts,
    layers: list[int],
    *,
    device: torch.device,
    quiet: bool = False,
) -> None:
    """Leave a part ``centroids [Hkv, C, D]``, with stats, of each of ``layers`` that has none yet."""
    missing = [layer for layer in layers if not parts.path(part_name(layer)).exists()]
    if not missing:
        return
    keys = collect_keys(model, chunks, missing, rope=cfg.kmeans.rope, quiet=quiet)
    with Progress(disable=quiet) as progress:
        task = progress.add_task("k-means of heads", total=len(missing) * models.num_kv_heads(model.config))
        for layer in missing:
            centroids, stats = fit_points(
                keys.pop(layer),
                cfg.kmeans,
                device=device,
                seed=cfg.seed + layer,
                advance=lambda heads: progress.advance(task, heads),
            )
            parts.save(part_name(layer), {"centroids": centroids}, stats)

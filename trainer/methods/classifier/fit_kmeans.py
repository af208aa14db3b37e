"""``msattn fit-kmeans``: spherical k-means on the keys of each layer and key/value head, written as
an artifact.

Position 0, the attention sink, is left out. Under ``torchrun`` each rank fits a part of the layers;
the result does not depend on the number of ranks.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FitKMeansConfig
from msattn.trainer.data.overlap import check_heldout
from msattn.trainer.errors import UserError
from msattn.trainer.memory import free_memory
from msattn.trainer.methods.buckets import decode_defaults
from msattn.trainer.methods.classifier.clustering import (
    clustering_seconds,
    fit_centroids,
    mean_stats,
    resolve_engine,
)
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.tap import visit_layers
from msattn.trainer.progress import Progress, estimate
from msattn.trainer.storage.parts import FinishedParts, check_parts, layer_part
from msattn.trainer.training import distributed
from msattn.trainer.training.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fit_kmeans(cfg: FitKMeansConfig) -> Path:
    """Runs the job of ``msattn fit-kmeans``: clusters the keys of every served layer and writes the
    artifact.

    Rank r of n under ``torchrun`` fits the layers r, r + n, ... Every rank runs the model on all
    prompts and keeps the keys of its own layers. All ranks must see the same ``outputs`` folder.

    Returns the artifact's folder, ``outputs/<model.name>/<name>/kmeans``. Raises UserError if the
    artifact, or layers of an earlier run with other settings exist, the model or the data is not
    supported, held-out text is also training text, there are more buckets than keys, the keys do
    not fit into memory, or the engine is Faiss and it is not installed.
    """
    folder = cfg.folder / "kmeans"
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    kmeans_settings = {**asdict(cfg.kmeans), "engine": resolve_engine(cfg.kmeans, device)}
    described = models.describe(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(described.config, cfg.data.seq_len)
    check_heldout(cfg.data)
    chunks = data.chunks(
        cfg.data, described.tokenizer, seed=cfg.seed, num_chunks=cfg.kmeans.num_prompts
    )
    check_num_keys(cfg, len(chunks))
    settings = {"kmeans": kmeans_settings, "data": chunks.fingerprint, "seed": cfg.seed}
    layers = cfg.folder / "runs" / "kmeans" / "layers"
    if not cfg.starts_again:
        check_parts(layers, settings | {"model": described.fingerprint})

    ranks = distributed.init_process_state(device)
    loaded = described.load()
    check_memory(cfg, loaded.model, len(chunks), ranks.num_processes)
    settings |= {"model": loaded.fingerprint, "dtype": str(loaded.model.dtype)}
    with ranks.main_process_first():  # it removes parts that were made with other settings
        parts = FinishedParts(layers, settings, replace=cfg.starts_again)
    ranks.wait_for_everyone()
    own_layers = models.served_layers(loaded.model.config)[
        ranks.process_index :: ranks.num_processes
    ]
    fit_layers(
        cfg, loaded.model, chunks, parts, own_layers, device=device, quiet=not ranks.is_main_process
    )
    ranks.wait_for_everyone()
    if ranks.is_main_process:
        write_artifact(cfg, folder, loaded, chunks, parts, kmeans_settings)
    ranks.wait_for_everyone()
    return folder


def check_num_keys(cfg: FitKMeansConfig, num_chunks: int) -> None:
    """Raises UserError if there are fewer keys than buckets."""
    num_keys = cfg.kmeans.num_sampled(num_chunks * (cfg.data.seq_len - 1))
    num_buckets = cfg.kmeans.num_buckets
    if num_buckets > num_keys:
        raise UserError(
            f"kmeans.num_buckets={num_buckets}: expected at most {num_keys}, the number of keys"
        )


def check_memory(
    cfg: FitKMeansConfig, model: "PreTrainedModel", num_chunks: int, processes: int
) -> None:
    """Raises UserError if the keys of one rank do not fit into the memory that the model leaves."""
    config, num_keys = model.config, cfg.kmeans.num_sampled(num_chunks * (cfg.data.seq_len - 1))
    heads = -(-len(models.served_layers(config)) // processes) * models.num_kv_heads(config)
    needed = heads * num_keys * models.head_dim(config) * model.dtype.itemsize
    free = free_memory() // processes
    if needed > free:
        raise UserError(
            f"kmeans.num_prompts={cfg.kmeans.num_prompts}: the keys take {needed / 1e9:.1f} GB of "
            f"memory, {free / 1e9:.1f} GB are free; lower it or data.seq_len, or sample them with "
            "kmeans.points_per_bucket=256"
        )


def sampled_positions(cfg: FitKMeansConfig, num_chunks: int) -> list[Tensor]:
    """Returns the positions of each chunk whose keys are clustered, int64 and ascending, the same
    for all heads and layers.

    They are a simple random sample of all positions except the first of each chunk. The sample is
    drawn before the model runs, so that other keys are never kept, and depends only on the seed.
    """
    length = cfg.data.seq_len - 1
    num_keys = num_chunks * length
    generator = np.random.default_rng(cfg.seed)
    chosen = np.sort(
        generator.choice(num_keys, cfg.kmeans.num_sampled(num_keys), replace=False, shuffle=False)
    )
    ends = np.searchsorted(chosen, length * np.arange(1, num_chunks))
    return [
        torch.from_numpy(part - i * length + 1) for i, part in enumerate(np.split(chosen, ends))
    ]


def fit_layers(
    cfg: FitKMeansConfig,
    model: "PreTrainedModel",
    chunks: data.Chunks,
    parts: FinishedParts,
    layers: list[int],
    *,
    device: torch.device,
    quiet: bool,
) -> None:
    """Clusters the keys of those ``layers`` that are not finished, and saves
    ``centroids [Hkv, C, D]`` and stats of each.
    """
    missing = [layer for layer in layers if layer_part(layer) not in parts]
    if not missing:
        return
    heads = len(missing) * models.num_kv_heads(model.config)
    positions = sampled_positions(cfg, len(chunks))

    def announce(seconds: float, sample: Tensor) -> None:
        """Prints the time of the whole job, given that of a prompt and the keys ``[Hkv, n, D]`` of
        a layer in it.
        """
        if not quiet and device.type == "cpu" and sample.shape[1] >= cfg.kmeans.num_buckets:
            of_head = clustering_seconds(sample[:1], cfg.kmeans, sum(map(len, positions)))
            estimate(
                "fit-kmeans",
                {
                    f"{len(chunks)} prompts": seconds * len(chunks),
                    f"k-means of {heads} heads": of_head * heads,
                },
            )

    keys = collect_keys(
        model, chunks, missing, positions, rope=cfg.kmeans.rope, quiet=quiet, first_done=announce
    )
    with Progress(transient=False, enabled=not quiet) as progress:
        task = progress.add_task("k-means of heads", total=heads)
        for layer in missing:
            centroids, stats = fit_centroids(
                keys.pop(layer),
                cfg.kmeans,
                device=device,
                seed=cfg.seed + layer,
                advance=lambda heads: progress.advance(task, heads),
            )
            parts.save(layer_part(layer), {"centroids": centroids}, stats)


def collect_keys(
    model: "PreTrainedModel",
    chunks: data.Chunks,
    layers: list[int],
    positions: list[Tensor],
    *,
    rope: bool,
    quiet: bool = False,
    first_done: Callable[[float, Tensor], None] = lambda seconds, keys: None,
) -> dict[int, Tensor]:
    """Returns the keys ``[Hkv, n, D]`` of each of ``layers`` at the ``positions`` of each chunk, in
    the order of ``chunks``.

    The keys are on the CPU, in the model's dtype, after RoPE if ``rope`` is set. ``first_done`` is
    called after the first chunk with its seconds and its keys in a layer.
    """
    keys: dict[int, Tensor] = {}
    begin, chosen = 0, positions[0]

    def collect(x: LayerInputs) -> None:
        new = (x.k if rope else x.k_nope)[0, :, chosen]
        if x.layer not in keys:
            keys[x.layer] = torch.empty(
                new.shape[0], sum(map(len, positions)), new.shape[2], dtype=new.dtype
            )
        keys[x.layer][:, begin : begin + new.shape[1]] = new

    began = time.perf_counter()
    with Progress(transient=False, enabled=not quiet) as progress:
        for i in progress.track(range(len(chunks)), description="keys of prompts"):
            chosen = positions[i].to(model.device)
            visit_layers(model, collect, [chunks[i]], layers)
            begin += len(chosen)
            if i == 0:
                first_done(time.perf_counter() - began, keys[layers[0]][:, :begin])
    return keys


def write_artifact(
    cfg: FitKMeansConfig,
    folder: Path,
    loaded: models.Loaded,
    chunks: data.Chunks,
    parts: FinishedParts,
    kmeans_settings: dict[str, Any],
) -> None:
    """Writes the parts of all layers as one artifact, logs their stats and removes the parts."""
    layers = models.served_layers(loaded.model.config)
    tensors, stats = zip(*(parts.load(layer_part(layer)) for layer in layers), strict=True)
    metrics = mean_stats(list(stats))
    artifacts.write(
        folder,
        kind="kmeans",
        tensors={"centroids": torch.stack([of_layer["centroids"] for of_layer in tensors])},
        config=asdict(cfg),
        model=loaded.fingerprint,
        details={
            **kmeans_settings,
            "layers": layers,
            "stats": list(stats),
            "serving": decode_defaults(cfg.model.presets, cfg.kmeans.num_buckets),
        },
        data=chunks.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )
    run_name = f"{cfg.model.name}-{cfg.name}-kmeans"
    with Tracker.of_job(
        cfg, "fit-kmeans", folder=parts.folder.parent, run_name=run_name, after_work=True
    ) as tracker:
        for layer, layer_stats in zip(layers, stats, strict=True):
            tracker.log(mean_stats([layer_stats]), step=layer)
        tracker.summary(metrics)
        tracker.log_artifact(folder)
    parts.remove()
    artifacts.print_summary(folder, metrics)

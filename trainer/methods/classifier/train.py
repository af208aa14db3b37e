"""``msattn train-qmodel``: distils the frozen model's attention over buckets (SAAP, arXiv 2502.08246, section 4).

Queries and targets are cached first (:mod:`msattn.trainer.methods.classifier.targets`), or drawn while the classifiers train
(``online``). Groups of layers train together, as many at once as fit in device memory, so that a step's
launch overhead on the host, or a pass of the model, serves many heads. The ranks of ``torchrun`` divide the cached prompts,
then the layers. Weights and batches of a layer depend on the seed and the layer alone, and layers are independent
of each other, so the result is the same for every grouping and number of ranks.
"""

import os
import shutil
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import TrainQModelConfig
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.memory import free_memory, release_memory
from msattn.trainer.methods.buckets import layer_index, serving
from msattn.trainer.methods.classifier.distillation import BatchSeeds, CachedBatches, Distiller, average_layers, routing_recall
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.online import BatchNumbers, OnlineBatches, OnlineTargets
from msattn.trainer.methods.classifier.qmodel import QModel, routing_warning
from msattn.trainer.methods.classifier.targets import TargetCache
from msattn.trainer.methods.thresholds import KEY_CALIBRATION_CHUNKS, calibrate_keys
from msattn.trainer.training import distributed
from msattn.trainer.training.checkpoints import resume_settings
from msattn.trainer.training.loop import fit
from msattn.trainer.training.parts import FinishedParts, layer_part
from msattn.trainer.training.tracker import Tracker

if TYPE_CHECKING:
    from accelerate.state import PartialState

    from msattn.trainer.models.loading import Loaded

HELDOUT_PROMPTS = 4
MEMORY_SHARE = 0.8  # share of the free device memory that training may fill
STATE_BYTES = 18  # per weight: itself, its gradient and Adam's two moments in fp32, and a bf16 copy for the product
ACTIVATION_BYTES = 32  # per element of the hidden layer and the logits: tensors saved for backward, and gradients
NOT_CACHED = (  # settings without effect on the cached targets
    "source",
    "hidden",
    "heads",
    "steps_per_prompt",
    "prompts_at_once",
    "batch_queries",
    "residual",
    "layers_at_once",
)
TrainTargets = TargetCache | OnlineTargets


def train_qmodel(cfg: TrainQModelConfig) -> Path:
    """Runs the job of ``msattn train-qmodel``: trains classifiers for a k-means partition and writes the artifact.

    The partition is ``artifacts.kmeans``, or by default that of the same model and name.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/qmodel``.

    Raises
    ------
    UserError : there is no such k-means or it was made for another model (the message names the field), the artifact exists,
        or the settings do not fit each other or the machine.
    """
    folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "qmodel")
    artifacts.check_writable(folder, cfg.overwrite)
    device, work = models.resolve_device(cfg.device), folder.parent / "runs" / "qmodel"
    partition = load_partition(cfg).to(device)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    assert partition.artifact is not None
    artifacts.check_model(partition.artifact.manifest, loaded.fingerprint)
    models.check_length(loaded.model.config, cfg.data.seq_len)
    text, heldout_text = data.training_chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.qmodel.num_prompts, num_heldout=HELDOUT_PROMPTS
    )

    ranks = distributed.init_process_state(device)
    settings = target_settings(cfg, loaded, partition, [text.fingerprint, heldout_text.fingerprint])
    with ranks.main_process_first():  # it removes parts that were made with other settings
        cached, trained = open_parts(cfg, work, settings, clear=ranks.is_main_process and not cfg.resume)
    online = cfg.qmodel.source == "online"
    train: TrainTargets = (
        OnlineTargets(loaded.model, text, partition, cfg) if online else TargetCache(cached, "train", text, partition, cfg)
    )
    heldout = TargetCache(cached, "heldout", heldout_text, partition, cfg)
    for cache in (train, heldout):
        if isinstance(cache, TargetCache):
            cache.compute_missing(loaded.model, ranks)
            cache.check()
    near = 1 - long_range_share(train, heldout)
    if near >= 0.0005 and ranks.is_main_process:  # it is printed as 0.1 % or more
        print(f"{near:.1%} of the cached queries are not long-range: they come from heads with few long-range queries")
    config, fingerprint = loaded.model.config, loaded.fingerprint
    heads = models.num_kv_heads(config) if cfg.qmodel.heads == "kv" else models.num_heads(config)
    del loaded
    release_memory()

    train_missing_layers(cfg, train, heldout, heads, work, trained, ranks)
    thresholds = calibrated_thresholds(cfg, train, trained, text)
    if ranks.is_main_process:
        write_artifact(cfg, folder, train, heldout, trained, fingerprint, thresholds)
    ranks.wait_for_everyone()
    return folder


def long_range_share(train: TrainTargets, heldout: TargetCache) -> float:
    """Returns the share of long-range queries among the cached training queries, or the held-out ones if none are cached."""
    return (train if isinstance(train, TargetCache) else heldout).long_range_share()


def load_partition(cfg: TrainQModelConfig) -> KMeans:
    """Loads the k-means ``artifacts.kmeans``, by default that of the same model and name; UserError if there is none."""
    source = cfg.artifacts.kmeans or artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    if cfg.artifacts.kmeans is None and not os.path.exists(source):
        hint = f"msattn fit-kmeans {cfg.arguments(cfg.name)} creates it, artifacts.kmeans names another"
        raise UserError(f"artifacts.kmeans=null: there is no k-means in {source}; {hint}")
    return KMeans.load(source)


def target_settings(
    cfg: TrainQModelConfig, loaded: "Loaded", partition: KMeans, data_fingerprints: list[Any]
) -> dict[str, Any]:
    """Returns everything that the cached targets depend on."""
    assert partition.artifact is not None
    return {
        "qmodel": {key: value for key, value in asdict(cfg.qmodel).items() if key not in NOT_CACHED},
        "data": data_fingerprints,
        "model": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "kmeans": partition.artifact.manifest["content_hash"],
        "seed": cfg.seed,
    }


def open_parts(
    cfg: TrainQModelConfig, work: Path, target_settings: dict[str, Any], *, clear: bool
) -> tuple[FinishedParts, FinishedParts]:
    """Opens the parts of cached targets and of trained layers; ``clear`` removes the work folders of earlier runs."""
    training_settings = {
        "qmodel": {**asdict(cfg.qmodel), "layers_at_once": None},
        "train": resume_settings(cfg.train, cfg.seed, "adam", 1),
    }
    cached = FinishedParts(work / "cache", target_settings, resume=cfg.resume)
    trained = FinishedParts(work / "layers", target_settings | training_settings, resume=cfg.resume)
    for leftover in work.glob("layers_*") if clear else ():
        shutil.rmtree(leftover)
    return cached, trained


def train_missing_layers(
    cfg: TrainQModelConfig,
    train: TrainTargets,
    heldout: TargetCache,
    heads: int,
    work: Path,
    trained: FinishedParts,
    ranks: "PartialState",
) -> None:
    """Trains this rank's share of the layers that are not finished, group after group, and waits for the other ranks."""
    partition = train.partition
    device = partition.centroids.device
    shares = np.array_split(np.array(partition.layers), ranks.num_processes)
    missing = [layer for layer in shares[ranks.process_index].tolist() if layer_part(layer) not in trained]
    group_size = layers_at_once(cfg, train, heldout, len(missing), heads, device, ranks.num_processes)
    with distributed.isolated_rank(device):
        for layers in layer_groups(missing, group_size):
            print(f"layers {layer_range(layers)}: {len(layers) * heads} classifiers train at once", flush=True)
            train_layers(cfg, layers, train, heldout, heads, work, trained)
            release_memory()
    ranks.wait_for_everyone()


def layers_at_once(
    cfg: TrainQModelConfig,
    train: TrainTargets,
    heldout: TargetCache,
    layers: int,
    heads: int,
    device: torch.device,
    processes: int,
) -> int:
    """Returns how many of ``layers`` train together: ``qmodel.layers_at_once``, or as many as the free memory holds.

    Raises
    ------
    UserError : ``qmodel.layers_at_once`` layers do not fit into memory, or a single one does not.
    """
    online = isinstance(train, OnlineTargets)
    *_, num_buckets, head_dim = heldout.partition.centroids.shape
    weights = cfg.qmodel.hidden * (head_dim + num_buckets)
    elements = cfg.qmodel.batch_queries * cfg.train.least_micro_batch * (cfg.qmodel.hidden + num_buckets)
    layer_bytes = heldout.max_layer_bytes() + (train.max_layer_bytes(heads) if online else train.max_layer_bytes())
    layer_bytes += heads * (STATE_BYTES * weights + ACTIVATION_BYTES * elements)
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory() // processes
    if online:
        free = max(0, free - train.pass_bytes())
    given = cfg.qmodel.layers_at_once
    wanted = min(given or 1, layers)
    if wanted * layer_bytes > free:
        memory = f"{wanted * layer_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; lower it or"
        if wanted > 1:
            raise UserError(f"qmodel.layers_at_once={given}: training {wanted} layers takes {memory} set it to null")
        if online:
            one = f"qmodel.steps_per_prompt={cfg.qmodel.steps_per_prompt}: beside a pass of the model, training one layer takes"
            raise UserError(f"{one} {memory} qmodel.prompts_at_once")
        raise UserError(
            f"qmodel.num_prompts={cfg.qmodel.num_prompts}: training one layer takes {memory} qmodel.queries_per_prompt"
        )
    return given or max(1, int(MEMORY_SHARE * free / layer_bytes))


def layer_groups(layers: list[int], group_size: int) -> list[list[int]]:
    """Splits ``layers`` into groups of at most ``group_size``, as even as possible.

    If the first groups are finished, the remaining layers are split into the same remaining groups.
    """
    groups = np.array_split(np.array(layers, int), -(-len(layers) // group_size)) if layers else []
    return [group.tolist() for group in groups]


def layer_range(layers: list[int]) -> str:
    """Returns ``3-7`` for consecutive layers, else a list such as ``1,4``."""
    consecutive = len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if consecutive else ",".join(map(str, layers))


def train_layers(
    cfg: TrainQModelConfig,
    layers: list[int],
    train: TrainTargets,
    heldout: TargetCache,
    heads: int,
    work: Path,
    trained: FinishedParts,
) -> None:
    """Trains the classifiers of ``layers`` together and saves each layer as a part; its note has the metrics and seconds."""
    began = time.perf_counter()
    whole = train.partition
    device = whole.centroids.device
    partition = KMeans(whole.centroids[[layer_index(whole.layers, layer) for layer in layers]], layers, whole.rope)
    heldout_data, length = heldout.load(layers, heads, device), cfg.train.steps * cfg.train.batch_size
    draw: CachedBatches | OnlineBatches
    dataset: Dataset[Any]
    online = isinstance(train, OnlineTargets)
    if online:
        draw, dataset = OnlineBatches(train, layers, heads), BatchNumbers(length)
    else:
        cached = train.load(layers, heads, device)
        draw, dataset = CachedBatches(cached, layers, cfg.qmodel.batch_queries), BatchSeeds(cfg.seed, length)
    qmodel = QModel(partition, heads, cfg.qmodel.hidden, residual=cfg.qmodel.residual, seed=cfg.seed).to(device)
    bf16 = device.type == "cuda" and models.resolve_dtype(cfg.dtype, device) != torch.float32
    loading_seconds = time.perf_counter() - began
    probes = max(1, serving(cfg.model.presets, partition.num_buckets)["probes"])

    folder = work / f"layers_{layer_range(layers)}"
    run_name = f"{cfg.model.name}-{cfg.name}-qmodel-{layer_range(layers)}"
    with Tracker.of_job(cfg, "train-qmodel", folder=folder, run_name=run_name) as tracker:
        result = fit(
            Distiller(qmodel, draw, bf16=bf16),
            dataset,
            train=cfg.train,
            folder=folder,
            tracker=tracker,
            device=device,
            seed=cfg.seed,
            resume=cfg.resume,
            evaluate=lambda: average_layers(routing_recall(qmodel, heldout_data, [probes])),
            optimizer="adam",
            collate=BatchNumbers.collate if online else None,
            shuffle=not online,
        )
        metrics = {
            layer: {"loss": result.losses[f"layer {layer}"], **recalls}
            for layer, recalls in routing_recall(qmodel.eval(), heldout_data).items()
        }
        tracker.summary(average_layers(metrics))
    layer_seconds = (loading_seconds + result.seconds) / len(layers)
    tensors = qmodel.state_dict()
    for index, layer in enumerate(layers):
        layer_tensors = {name: value[index].cpu().contiguous() for name, value in tensors.items()}
        trained.save(layer_part(layer), layer_tensors, {"metrics": metrics[layer], "seconds": layer_seconds})
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def calibrated_thresholds(
    cfg: TrainQModelConfig, train: TrainTargets, trained: FinishedParts, text: data.Chunks
) -> dict[str, Any]:
    """Returns the thresholds of the trained classifiers; the ranks divide the chunks.

    The model is loaded again for it, unless its passes make the targets: training from cached ones has the memory to itself.
    """
    if isinstance(train, OnlineTargets):
        model = train.model
    else:
        model = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed).model
    partition = train.partition
    tensors = trained_tensors(trained, partition.layers)
    qmodel = QModel(partition, tensors["weight_in"].shape[1], cfg.qmodel.hidden, residual=cfg.qmodel.residual)
    qmodel.load_state_dict(tensors)
    window = {key: value for key, value in serving(cfg.model.presets, partition.num_buckets).items() if key != "probes"}
    chunks = distributed.rank_shard(text, KEY_CALIBRATION_CHUNKS)
    return calibrate_keys(qmodel.to(model.device).eval(), model, chunks, **window)


def trained_tensors(trained: FinishedParts, layers: list[int]) -> dict[str, torch.Tensor]:
    """Returns the weights of all layers, stacked."""
    parts = [trained.load(layer_part(layer))[0] for layer in layers]
    return {name: torch.stack([tensors[name] for tensors in parts]) for name in parts[0]}


def write_artifact(
    cfg: TrainQModelConfig,
    folder: Path,
    train: TrainTargets,
    heldout: TargetCache,
    trained: FinishedParts,
    fingerprint: dict[str, Any],
    thresholds: dict[str, Any],
) -> None:
    """Writes the trained layers as one artifact, logs its metrics, and removes the parts and checkpoints."""
    partition = train.partition
    assert partition.artifact is not None
    notes = [trained.load(layer_part(layer))[1] for layer in partition.layers]
    kv_heads = len(notes) * partition.centroids.shape[1]
    metrics = average_layers({layer: note["metrics"] for layer, note in zip(partition.layers, notes, strict=True)})
    cached = [each for each in (train, heldout) if isinstance(each, TargetCache)]
    metrics |= {
        "cache_seconds_a_kv_head": sum(each.seconds() for each in cached) / kv_heads,
        "training_seconds_a_kv_head": sum(note["seconds"] for note in notes) / kv_heads,
    }
    artifacts.write(
        folder,
        kind="qmodel",
        tensors=trained_tensors(trained, partition.layers),
        config=asdict(cfg),
        model=fingerprint,
        details={
            **asdict(cfg.qmodel),
            "layers": partition.layers,
            "rope": partition.rope,
            "num_buckets": partition.num_buckets,
            "kmeans_hash": partition.artifact.manifest["content_hash"],
            "share_long_range": long_range_share(train, heldout),
            "serving": serving(cfg.model.presets, partition.num_buckets),
            "thresholds": thresholds,
        },
        data=train.chunks.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )
    work = heldout.parts.folder.parent
    run_name = f"{cfg.model.name}-{cfg.name}-qmodel"
    with Tracker.of_job(cfg, "train-qmodel", folder=work, run_name=run_name, after_work=True) as tracker:
        tracker.use_artifact(partition.artifact)
        tracker.summary(metrics)
        tracker.log_artifact(folder)
    trained.remove()
    for leftover in work.glob("layers_*/checkpoints"):  # a resumed run may have grouped the layers differently
        shutil.rmtree(leftover)
    artifacts.print_summary(folder, metrics)
    if warning := routing_warning(metrics, serving(cfg.model.presets, partition.num_buckets)["probes"]):
        warnings.warn(warning, ModelWarning, stacklevel=2)

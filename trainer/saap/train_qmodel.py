"""``train-qmodel``: query classifiers learn where the frozen model's attention falls (SAAP, arXiv 2502.08246, section 4).

The training pairs are cached first (:mod:`msattn.trainer.saap.pairs`). Then layers train by groups, as many at once as the
device holds with all their pairs, so that a step gathers its batch where it computes and its cost on the host is shared by
many heads. The processes of a ``torchrun`` share out prompts, then layers. A layer's weights and batches are drawn from the
seed and its own number alone, and nothing couples it to others: its result is the same in every group and process.
"""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.saap.distillation import Distiller, Draws, over_layers, routing_recall
from msattn.trainer.saap.index import slot_of
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.pairs import PairCache
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.training import distributed
from msattn.trainer.training.checkpoints import resume_settings
from msattn.trainer.training.loop import fit, release_memory
from msattn.trainer.training.tracker import Tracker

HEALTH_PROMPTS = 4  # held-out chunks
MEMORY_SHARE = 0.8  # of the free device memory
STATE_BYTES = 18  # a weight: itself, gradient and Adam's two moments in fp32, a copy for the product in bf16
WORK_BYTES = 32  # an element of the hidden layer or the logits: what a step keeps of it for backward, and the gradients
NOT_CACHED = ("hidden", "heads", "batch_queries", "residual", "layers_at_once")  # settings that the pairs do not depend on


def groups_of(layers: list[int], at_once: int) -> list[list[int]]:
    """Groups of ``at_once`` layers at most, as even as can be: those left when some are done are the same again."""
    parts = np.array_split(np.array(layers, int), -(-len(layers) // at_once)) if layers else []
    return [part.tolist() for part in parts]


def layers_at_once(
    cfg: TrainQModelConfig, caches: list[PairCache], layers: int, heads: int, device: torch.device, processes: int
) -> int:
    """How many of ``layers`` train together: ``qmodel.layers_at_once``, or as many as fit into the free memory of ``device``.

    UserError when so many do not fit, or not even one does.
    """
    *_, num_buckets, head_dim = caches[0].partition.centroids.shape
    weights = cfg.qmodel.hidden * (head_dim + num_buckets)
    elements = cfg.qmodel.batch_queries * cfg.train.micro_batch_size * (cfg.qmodel.hidden + num_buckets)
    needed = sum(cache.layer_bytes() for cache in caches) + heads * (STATE_BYTES * weights + WORK_BYTES * elements)
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available // processes
    given = cfg.qmodel.layers_at_once
    wanted = min(given or 1, layers)
    if wanted * needed > free:
        room = f"{wanted * needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; lower it or"
        if wanted > 1:
            raise UserError(f"qmodel.layers_at_once={given}: training {wanted} layers takes {room} leave it to null")
        raise UserError(
            f"qmodel.num_prompts={cfg.qmodel.num_prompts}: training one layer takes {room} qmodel.queries_per_prompt"
        )
    return given or max(1, int(MEMORY_SHARE * free / needed))


def train_layers(
    cfg: TrainQModelConfig, layers: list[int], train: PairCache, heldout: PairCache, heads: int, work: Path, done: FinishedParts
) -> None:
    """Train the classifiers of ``layers`` together; each layer becomes a part of ``done``, its note its figures."""
    began = time.perf_counter()
    whole = train.partition
    device = whole.centroids.device
    partition = KMeans(whole.centroids[[slot_of(whole.layers, layer) for layer in layers]], layers, whole.rope)
    pairs, health = train.load(layers, heads, device), heldout.load(layers, heads, device)
    qmodel = QModel(partition, heads, cfg.qmodel.hidden, residual=cfg.qmodel.residual, seed=cfg.seed).to(device)
    bf16 = device.type == "cuda" and models.resolve_dtype(cfg.dtype, device) != torch.float32
    loading = time.perf_counter() - began

    folder = work / f"layers_{span(layers)}"
    run_name = f"{cfg.model.name}-{cfg.name}-qmodel-{span(layers)}"
    with Tracker.start(cfg.tracker, folder=folder, run_name=run_name, config=asdict(cfg)) as tracker:
        summary = fit(
            Distiller(qmodel, pairs, cfg.qmodel.batch_queries, bf16=bf16),
            Draws(cfg.seed, cfg.train.steps * cfg.train.batch_size),
            train=cfg.train,
            folder=folder,
            tracker=tracker,
            device=device,
            seed=cfg.seed,
            resume=cfg.resume,
            evaluate=lambda: over_layers(routing_recall(qmodel, health)),
            optimizer="adam",
        )
        figures = {
            layer: {"loss": summary.losses[f"layer {layer}"], **recalls}
            for layer, recalls in routing_recall(qmodel.eval(), health).items()
        }
        tracker.summary(over_layers(figures))
    seconds = (loading + summary.seconds) / len(layers)
    tensors = qmodel.state_dict()
    for slot, layer in enumerate(layers):
        own = {name: value[slot].cpu().contiguous() for name, value in tensors.items()}
        done.save(part_of(layer), own, {"figures": figures[layer], "seconds": seconds})
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def span(layers: list[int]) -> str:
    """``3-7`` for consecutive layers, else each one's number."""
    consecutive = len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if consecutive else ",".join(map(str, layers))


def part_of(layer: int) -> str:
    return f"layer_{layer:03d}"


def find_partition(cfg: TrainQModelConfig) -> KMeans:
    """The k-means that ``cfg`` names, or that of the same model and name; UserError when there is none."""
    source = cfg.artifacts.kmeans or artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    if cfg.artifacts.kmeans is None and not Path(source).exists():
        raise UserError(f"artifacts.kmeans=null: there is no k-means in {source}; make it with msattn fit-kmeans, or name one")
    return KMeans.load(source)


def train_qmodel(cfg: TrainQModelConfig) -> Path:
    """The job behind ``msattn train-qmodel``: classifiers for the k-means of the same model and name, or ``artifacts.kmeans``.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/qmodel``.

    Raises
    ------
    UserError : no such k-means, one of another model (the field is named), an artifact that exists, settings that do not fit.
    """
    folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "qmodel")
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    partition = find_partition(cfg).to(device)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    assert partition.artifact is not None
    artifacts.check_model(partition.artifact, loaded.fingerprint)
    models.check_length(loaded.model.config, cfg.data.seq_len)

    text = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.qmodel.num_prompts)
    heldout_text = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, num_chunks=HEALTH_PROMPTS)
    source = {
        "qmodel": {key: value for key, value in asdict(cfg.qmodel).items() if key not in NOT_CACHED},
        "data": [text.fingerprint, heldout_text.fingerprint],
        "model": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "kmeans": partition.artifact.manifest["content_hash"],
        "seed": cfg.seed,
    }
    work = folder.parent / "runs" / "qmodel"
    team = distributed.init_process_state(device)
    with team.main_process_first():  # it removes what was made with other settings
        cached, done = open_work(cfg, work, source, clears=team.is_main_process and not cfg.resume)
    train = PairCache(cached, "train", text, partition, cfg)
    heldout = PairCache(cached, "heldout", heldout_text, partition, cfg)
    for cache in (train, heldout):
        cache.fill(loaded.model, team)
        cache.check()
    if (share := train.long_range()) < 1 and team.is_main_process:
        print(
            f"{1 - share:.1%} of the cached queries are not long-range: their head has few in a prompt, its farthest stand in"
        )
    config, fingerprint = loaded.model.config, loaded.fingerprint
    heads = models.num_kv_heads(config) if cfg.qmodel.heads == "kv" else models.num_heads(config)
    del loaded
    release_memory()

    shares = np.array_split(np.array(partition.layers), team.num_processes)
    own = [layer for layer in shares[team.process_index].tolist() if not done.path(part_of(layer)).exists()]
    at_once = layers_at_once(cfg, [train, heldout], len(own), heads, device, team.num_processes)
    with distributed.isolated_rank(device):
        for group in groups_of(own, at_once):
            print(f"layers {span(group)}: {len(group) * heads} classifiers train at once", flush=True)
            train_layers(cfg, group, train, heldout, heads, work, done)
            release_memory()
    team.wait_for_everyone()
    if team.is_main_process:
        assemble(cfg, folder, train, heldout, done, fingerprint)
    team.wait_for_everyone()
    return folder


def open_work(
    cfg: TrainQModelConfig, work: Path, source: dict[str, Any], *, clears: bool
) -> tuple[FinishedParts, FinishedParts]:
    """The folders of cached pairs, which depend on ``source``, and of trained layers; ``clears`` removes begun ones."""
    training = {
        "qmodel": {**asdict(cfg.qmodel), "layers_at_once": None},
        "train": resume_settings(cfg.train, cfg.seed, "adam", 1),
    }
    cached = FinishedParts(work / "cache", source, resume=cfg.resume)
    done = FinishedParts(work / "layers", source | training, resume=cfg.resume)
    for left in work.glob("layers_*") if clears else ():
        shutil.rmtree(left)
    return cached, done


def assemble(
    cfg: TrainQModelConfig, folder: Path, train: PairCache, heldout: PairCache, done: FinishedParts, fingerprint: dict[str, Any]
) -> None:
    """Write the trained layers as one artifact, say so, and remove them."""
    partition = train.partition
    assert partition.artifact is not None
    trained = {layer: done.load(part_of(layer)) for layer in partition.layers}
    kv_heads = len(trained) * partition.centroids.shape[1]
    metrics = over_layers({layer: note["figures"] for layer, (_, note) in trained.items()})
    metrics |= {
        "cache_seconds_a_kv_head": (train.seconds() + heldout.seconds()) / kv_heads,
        "training_seconds_a_kv_head": sum(note["seconds"] for _, note in trained.values()) / kv_heads,
    }
    layers = [tensors for tensors, _ in trained.values()]
    artifacts.write(
        folder,
        kind="qmodel",
        tensors={name: torch.stack([tensors[name] for tensors in layers]) for name in layers[0]},
        config=asdict(cfg),
        model=fingerprint,
        details={
            **asdict(cfg.qmodel),
            "layers": partition.layers,
            "rope": partition.rope,
            "num_buckets": partition.num_buckets,
            "kmeans_hash": partition.artifact.manifest["content_hash"],
            "share_long_range": train.long_range(),
        },
        data=train.chunks.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )
    run_name = f"{cfg.model.name}-{cfg.name}-qmodel"
    with Tracker.start(cfg.tracker, folder=train.parts.folder.parent, run_name=run_name, config=asdict(cfg)) as tracker:
        tracker.summary(metrics)
        tracker.artifact(folder)
    done.remove()
    for left in train.parts.folder.parent.glob("layers_*/checkpoints"):  # of groups that were cut otherwise before a resume
        shutil.rmtree(left)
    artifacts.print_summary(folder, metrics)

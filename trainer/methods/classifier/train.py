"""``msattn train-qmodel``: distills the frozen model's attention over buckets (SAAP, arXiv
2502.08246, section 4).

Queries and targets are cached first (:mod:`msattn.trainer.methods.classifier.targets`), or drawn
while the classifiers train (``online``). Groups of layers train together, as many at once as fit in
device memory, so that a step's launch overhead on the host, or a pass of the model, serves many
heads. The ranks of ``torchrun`` divide the cached prompts, then the layers. A layer's weights and
batches depend only on the seed and the layer, and layers are independent of each other, so the
result is the same for every grouping and number of ranks.
"""

import os
import shutil
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import PartialState

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import TrainQModelConfig
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.memory import free_memory, release_memory
from msattn.trainer.methods.buckets import decode_defaults, decode_window, layer_index
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier.distillation import Distiller, average_layers, routing_recall
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.online import OnlineTargets
from msattn.trainer.methods.classifier.qmodel import QModel, routing_warning
from msattn.trainer.methods.classifier.targets import TargetCache
from msattn.trainer.methods.key_thresholds import KEY_CALIBRATION_CHUNKS, calibrate_keys
from msattn.trainer.progress import estimate
from msattn.trainer.storage.parts import FinishedParts, check_parts, layer_part
from msattn.trainer.training import distributed
from msattn.trainer.training.checkpoints import check_start, resume_settings
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

HELDOUT_PROMPTS = 4
MEMORY_SHARE = 0.8  # share of the free device memory that training may fill
# per weight: itself, its gradient and Adam's two moments in fp32, and a bf16 copy for the product
STATE_BYTES = 18
# per element of the hidden layer and the logits: tensors saved for backward, and gradients
ACTIVATION_BYTES = 32
NOT_CACHED = {  # settings without effect on the cached targets
    *(
        "source",
        "hidden",
        "heads",
        "steps_per_prompt",
        "prompts_at_once",
        "batch_queries",
        "residual",
        "layers_at_once",
    ),
}


def train_qmodel(cfg: TrainQModelConfig) -> Path:
    """Runs the job of ``msattn train-qmodel``: trains classifiers for a k-means partition and
    writes the artifact.

    The partition is ``artifacts.kmeans``, or by default that of the same model and name. Returns
    the artifact's folder, ``outputs/<model.name>/<name>/qmodel``. Raises UserError if there is no
    such k-means or it was made for another model (the message names the field), the artifact
    exists, or the settings do not fit each other or the machine.
    """
    folder = cfg.folder / "qmodel"
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    partition = _load_partition(cfg).to(device)
    described = models.describe(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    assert partition.artifact is not None
    artifacts.check_model(partition.artifact.manifest, described.fingerprint, strict=False)
    models.check_length(described.config, cfg.data.seq_len)
    text, heldout_text = data.training_chunks(
        cfg.data,
        described.tokenizer,
        seed=cfg.seed,
        num_chunks=cfg.qmodel.num_prompts,
        num_heldout=HELDOUT_PROMPTS,
    )
    _check_start(cfg, partition, text, heldout_text, described.fingerprint)
    loaded = described.load()
    artifacts.check_model(partition.artifact.manifest, loaded.fingerprint)
    ranks = distributed.init_process_state(device)
    job = _Job(cfg, loaded, partition, text, heldout_text, ranks)
    for cache in job.caches:
        cache.compute_missing(
            loaded.model, ranks, partial(job.print_estimate, ranks) if cache is job.train else None
        )
        cache.check()
    near = 1 - job.caches[0].long_range_share()
    if near >= 0.0005 and ranks.is_main_process:  # it is printed as 0.1 % or more
        print(
            f"{near:.1%} of the cached queries are not long-range; they come from heads with few "
            f"long-range queries"
        )
    fingerprint = loaded.fingerprint
    del loaded
    release_memory()

    job.train_missing_layers(ranks)
    thresholds = job.calibrated_thresholds()
    if ranks.is_main_process:
        job.write_artifact(folder, fingerprint, thresholds)
    ranks.wait_for_everyone()
    return folder


def _load_partition(cfg: TrainQModelConfig) -> KMeans:
    source = cfg.artifacts.kmeans or cfg.folder / "kmeans"
    if cfg.artifacts.kmeans is None and not os.path.exists(source):
        hint = (
            f"msattn fit-kmeans {cfg.arguments(cfg.name)} creates it, artifacts.kmeans names "
            f"another"
        )
        raise UserError(f"artifacts.kmeans=null: there is no k-means in {source}; {hint}")
    return KMeans.load(source)


def _work(cfg: TrainQModelConfig) -> Path:
    return cfg.folder / "runs" / "qmodel"


def _settings(
    cfg: TrainQModelConfig, partition: KMeans, text: data.Chunks, heldout_text: data.Chunks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what cached targets and trained layers depend on, besides the model."""
    assert partition.artifact is not None
    qmodel = asdict(cfg.qmodel)
    of_cache = {
        "qmodel": {key: value for key, value in qmodel.items() if key not in NOT_CACHED},
        "data": [text.fingerprint, heldout_text.fingerprint],
        "kmeans": partition.artifact.manifest["content_hash"],
        "seed": cfg.seed,
    }
    of_training = resume_settings(cfg.train, cfg.seed, "adam", 1)
    return of_cache, of_cache | {"qmodel": {**qmodel, "layers_at_once": None}, **of_training}


def _check_start(
    cfg: TrainQModelConfig,
    partition: KMeans,
    text: data.Chunks,
    heldout_text: data.Chunks,
    fingerprint: dict[str, Any],
) -> None:
    """Raises UserError if an earlier run has other settings, or checkpoints that are not
    resumed.
    """
    work, of_model = _work(cfg), {"model": fingerprint}
    of_cache, of_layers = _settings(cfg, partition, text, heldout_text)
    if not cfg.starts_again:
        check_parts(work / "layers", of_layers | of_model)
    if cfg.resume:
        check_parts(work / "cache", of_cache | of_model)
    else:
        for group in sorted(work.glob("layers_*")):
            check_start(group / "checkpoints", {}, resume=False, overwrite=cfg.overwrite)


class _Job:
    """The training of the classifiers of a partition.

    Opens the parts of earlier runs. Without ``resume``, cached targets of other settings are
    removed; layers that were trained with other settings only with ``overwrite``.
    """

    def __init__(
        self,
        cfg: TrainQModelConfig,
        loaded: models.Loaded,
        partition: KMeans,
        text: data.Chunks,
        heldout_text: data.Chunks,
        ranks: PartialState,
    ) -> None:
        assert partition.artifact is not None
        self.cfg, self.partition = cfg, partition
        self.work = _work(cfg)  # of caches, checkpoints and metrics
        of_model = {"model": loaded.fingerprint, "dtype": str(loaded.model.dtype)}
        # The layers that are finished have notes with their metrics and seconds.
        of_cache, of_layers = _settings(cfg, partition, text, heldout_text)
        with ranks.main_process_first():
            cached = FinishedParts(self.work / "cache", of_cache | of_model, replace=not cfg.resume)
            self.trained = FinishedParts(
                self.work / "layers", of_layers | of_model, replace=cfg.starts_again
            )
            for leftover in (
                self.work.glob("layers_*") if ranks.is_main_process and not cfg.resume else ()
            ):
                shutil.rmtree(leftover)
        self.train: TargetCache | OnlineTargets = TargetCache(cached, "train", text, partition, cfg)
        if cfg.qmodel.source == "online":
            self.train = OnlineTargets(loaded.model, text, partition, cfg)
        self.heldout = TargetCache(cached, "heldout", heldout_text, partition, cfg)
        config = loaded.model.config
        # of a layer
        self.heads = (
            models.num_kv_heads(config) if cfg.qmodel.heads == "kv" else models.num_heads(config)
        )

    @property
    def caches(self) -> list[TargetCache]:
        """The targets that are cached: those of training, unless they are drawn online, before the
        held-out ones.
        """
        return [cache for cache in (self.train, self.heldout) if isinstance(cache, TargetCache)]

    @property
    def device(self) -> torch.device:
        return self.partition.centroids.device

    @property
    def served(self) -> dict[str, Any]:
        return decode_defaults(self.cfg.model.presets, self.partition.num_buckets)

    def print_estimate(self, ranks: PartialState, seconds: float) -> None:
        """Prints the time of the whole job on a CPU, given that of the first cached prompt."""
        if self.device.type == "cpu" and ranks.is_main_process:
            prompts = 1 + sum(len(cache.missing) for cache in self.caches)
            passes = prompts / ranks.num_processes + KEY_CALIBRATION_CHUNKS
            steps = self.cfg.train.steps
            layers = -(-len(self.partition.layers) // ranks.num_processes)
            training = layers * steps * self.cfg.train.batch_size * self.seconds_per_batch()
            named = (
                f"{prompts} prompts and calibration",
                f"{steps} steps of {len(self.partition.layers)} layers",
            )
            estimate("train-qmodel", dict(zip(named, (passes * seconds, training), strict=True)))

    def seconds_per_batch(self) -> float:
        """Returns how long a batch of the classifiers of a layer takes, from one."""
        whole, cfg = self.partition, self.cfg.qmodel
        partition = KMeans(whole.centroids[:1], whole.layers[:1], whole.rope)
        qmodel = QModel(partition, self.heads, cfg.hidden, residual=cfg.residual)
        rows = 1, self.heads, cfg.batch_queries
        queries = torch.ones(*rows, whole.centroids.shape[3])
        targets = torch.full((*rows, whole.num_buckets), 1 / whole.num_buckets)
        optimizer = torch.optim.Adam(qmodel.parameters(), fused=True)
        for _ in range(2):  # the first allocates
            began = time.perf_counter()
            Distiller(qmodel, lambda batches: (queries, targets, torch.zeros(rows)))(None)[
                "loss"
            ].backward()
            optimizer.step()
        return time.perf_counter() - began

    def train_missing_layers(self, ranks: PartialState) -> None:
        """Trains this rank's share of the unfinished layers, group by group, and waits for the
        other ranks.
        """
        shares = np.array_split(np.array(self.partition.layers), ranks.num_processes)
        missing = [
            layer
            for layer in shares[ranks.process_index].tolist()
            if layer_part(layer) not in self.trained
        ]
        group_size = self.layers_at_once(len(missing), ranks.num_processes)
        with distributed.isolated_rank(self.device):
            for layers in layer_groups(missing, group_size):
                print(
                    f"layers {layer_range(layers)}: {len(layers) * self.heads} classifiers train "
                    f"at once",
                    flush=True,
                )
                self.train_layers(layers)
                release_memory()
        ranks.wait_for_everyone()

    def layers_at_once(self, layers: int, processes: int) -> int:
        """Returns how many of ``layers`` train together: ``qmodel.layers_at_once``, or as many as
        the free memory holds.

        Raises UserError if ``qmodel.layers_at_once`` layers do not fit into memory, or a single one
        does not.
        """
        cfg, pass_bytes = self.cfg, self.train.pass_bytes()
        *_, num_buckets, head_dim = self.partition.centroids.shape
        weights = cfg.qmodel.hidden * (head_dim + num_buckets)
        elements = (
            cfg.qmodel.batch_queries
            * cfg.train.least_micro_batch
            * (cfg.qmodel.hidden + num_buckets)
        )
        layer_bytes = self.heldout.max_layer_bytes(self.heads) + self.train.max_layer_bytes(
            self.heads
        )
        layer_bytes += self.heads * (STATE_BYTES * weights + ACTIVATION_BYTES * elements)
        on_gpu = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else free_memory() // processes
        free = max(0, free - pass_bytes)
        given = cfg.qmodel.layers_at_once
        wanted = min(given or 1, layers)
        if wanted * layer_bytes > free:
            memory = (
                f"{wanted * layer_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
                f"free; lower it or"
            )
            if wanted > 1:
                raise UserError(
                    f"qmodel.layers_at_once={given}: training {wanted} layers takes {memory} set "
                    f"it to null"
                )
            key, other = self.train.memory_keys
            beside = "beside a pass of the model, " if pass_bytes else ""
            one = f"qmodel.{key}={getattr(cfg.qmodel, key)}: {beside}training one layer takes"
            raise UserError(f"{one} {memory} qmodel.{other}")
        return given or max(1, int(MEMORY_SHARE * free / layer_bytes))

    def train_layers(self, layers: list[int]) -> None:
        """Trains the classifiers of ``layers`` together and saves each layer as a part."""
        began, cfg, whole = time.perf_counter(), self.cfg, self.partition
        partition = KMeans(
            whole.centroids[[layer_index(whole.layers, layer) for layer in layers]],
            layers,
            whole.rope,
        )
        heldout = self.heldout.load(layers, self.heads, self.device)
        batches = self.train.batches(layers, self.heads)
        qmodel = QModel(
            partition, self.heads, cfg.qmodel.hidden, residual=cfg.qmodel.residual, seed=cfg.seed
        ).to(self.device)
        bf16 = (
            self.device.type == "cuda"
            and models.resolve_dtype(cfg.dtype, self.device) != torch.float32
        )
        loading_seconds = time.perf_counter() - began
        probes = max(1, self.served["probes"])

        folder = self.work / f"layers_{layer_range(layers)}"
        run_name = f"{cfg.model.name}-{cfg.name}-qmodel-{layer_range(layers)}"
        with Tracker.of_job(cfg, "train-qmodel", folder=folder, run_name=run_name) as tracker:
            result = fit(
                Distiller(qmodel, batches.draw, bf16=bf16),
                batches.dataset,
                train=cfg.train,
                folder=folder,
                tracker=tracker,
                device=self.device,
                seed=cfg.seed,
                resume=cfg.resume,
                evaluate=lambda: average_layers(routing_recall(qmodel, heldout, [probes])),
                optimizer="adam",
                collate=batches.collate,
                shuffle=batches.shuffle,
            )
            metrics = {
                layer: {"loss": result.losses[f"layer {layer}"], **recalls}
                for layer, recalls in routing_recall(qmodel.eval(), heldout).items()
            }
            tracker.summary(average_layers(metrics))
        layer_seconds = (loading_seconds + result.seconds) / len(layers)
        tensors = qmodel.state_dict()
        for index, layer in enumerate(layers):
            layer_tensors = {
                name: value[index].cpu().contiguous() for name, value in tensors.items()
            }
            self.trained.save(
                layer_part(layer),
                layer_tensors,
                {"metrics": metrics[layer], "seconds": layer_seconds},
            )
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def calibrated_thresholds(self) -> KeyThresholds:
        """Returns the thresholds of the trained classifiers; the ranks divide the chunks."""
        cfg, model = self.cfg, self.train.load_model()
        qmodel = QModel(self.partition, self.heads, cfg.qmodel.hidden, residual=cfg.qmodel.residual)
        qmodel.load_state_dict(self.trained_tensors())
        chunks = distributed.rank_shard(self.train.chunks, KEY_CALIBRATION_CHUNKS)
        return calibrate_keys(
            qmodel.to(model.device).eval(), model, chunks, **decode_window(cfg.model.presets)
        )

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights of all layers, stacked."""
        parts = [self.trained.load(layer_part(layer))[0] for layer in self.partition.layers]
        return {name: torch.stack([tensors[name] for tensors in parts]) for name in parts[0]}

    def write_artifact(
        self, folder: Path, fingerprint: dict[str, Any], thresholds: KeyThresholds
    ) -> None:
        """Writes the trained layers as one artifact, logs its metrics, and removes the parts and
        checkpoints.
        """
        cfg, partition = self.cfg, self.partition
        assert partition.artifact is not None
        notes = [self.trained.load(layer_part(layer))[1] for layer in partition.layers]
        kv_heads = len(notes) * partition.kv_heads
        metrics = average_layers(
            {layer: note["metrics"] for layer, note in zip(partition.layers, notes, strict=True)}
        )
        metrics |= {
            "cache_seconds_a_kv_head": sum(cache.seconds() for cache in self.caches) / kv_heads,
            "training_seconds_a_kv_head": sum(note["seconds"] for note in notes) / kv_heads,
        }
        artifacts.write(
            folder,
            kind="qmodel",
            tensors=self.trained_tensors(),
            config=asdict(cfg),
            model=fingerprint,
            details={
                **asdict(cfg.qmodel),
                "layers": partition.layers,
                "rope": partition.rope,
                "num_buckets": partition.num_buckets,
                "kmeans_hash": partition.artifact.manifest["content_hash"],
                "share_long_range": self.caches[0].long_range_share(),
                "serving": self.served,
                "thresholds": asdict(thresholds),
            },
            data=self.train.chunks.fingerprint,
            seed=cfg.seed,
            metrics=metrics,
            overwrite=cfg.overwrite,
        )
        run_name = f"{cfg.model.name}-{cfg.name}-qmodel"
        with Tracker.of_job(
            cfg, "train-qmodel", folder=self.work, run_name=run_name, after_work=True
        ) as tracker:
            tracker.use_artifact(partition.artifact)
            tracker.summary(metrics)
            tracker.log_artifact(folder)
        self.trained.remove()
        # a resumed run may have grouped the layers differently
        for leftover in self.work.glob("layers_*/checkpoints"):
            shutil.rmtree(leftover)
        artifacts.print_summary(folder, metrics)
        if warning := routing_warning(metrics, self.served["probes"]):
            warnings.warn(warning, ModelWarning, stacklevel=2)


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

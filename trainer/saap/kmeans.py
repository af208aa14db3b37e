"""Spherical k-means on keys: the partition that SAAP routes over (arXiv 2502.08246, sections 3 and 4).

Keys are taken before RoPE, a partition for each layer and key/value head; position 0, the attention sink, is left out. Faiss
fits on the CPU; on a GPU all heads of a layer are fitted at once by :func:`batched_kmeans`, the same algorithm in products.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import track
from torch import Tensor, nn

from msattn.trainer import artifacts, data, models
from msattn.trainer.config import FitKMeansConfig, KMeansConfig
from msattn.trainer.errors import UserError
from msattn.trainer.saap.index import slot_of
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSIGN_TOKENS = 16384  # keys assigned at once: bounds the [B, Hkv, tokens, C] products
SPLIT_EPS = 1 / 1024  # an empty bucket takes half of a full one: both centroids move apart by this share


class KMeans(nn.Module):
    """Centroids of each layer and key/value head; a training-free :class:`~msattn.trainer.saap.index.Router`.

    Parameters
    ----------
    centroids : Tensor
        fp32 ``[layers, Hkv, C, D]``, of unit length.
    layers : list of int
        The model's layers, in the order of ``centroids``.
    rope : bool
        Keys and queries are taken after RoPE (the baseline) instead of before.

    Attributes
    ----------
    artifact : Artifact or None
        What it was loaded from.
    """

    centroids: Tensor

    def __init__(self, centroids: Tensor, layers: list[int], rope: bool = False) -> None:
        super().__init__()
        self.register_buffer("centroids", centroids)
        self.layers = list(layers)
        self.rope = rope
        self.num_buckets = centroids.shape[2]
        self.artifact: artifacts.Artifact | None = None

    @classmethod
    def load(cls, path: str | Path) -> "KMeans":
        """The k-means artifact in a folder or on the Hub; UserError when it is missing, damaged or of another kind."""
        artifact = artifacts.read(path, kind="kmeans")
        details = artifact.manifest["details"]
        kmeans = cls(artifact.tensors["centroids"], details["layers"], details["rope"])
        kmeans.artifact = artifact
        return kmeans

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """The nearest centroid of each key: int32 ``[B, Hkv, N]`` for keys ``[B, Hkv, N, D]`` before and after RoPE."""
        centroids = self.centroids[slot_of(self.layers, layer)].mT  # [Hkv, D, C]
        keys = (k if self.rope else k_nope).split(ASSIGN_TOKENS, dim=2)
        return torch.cat([(part.to(centroids.dtype) @ centroids).argmax(-1).to(torch.int32) for part in keys], dim=2)

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Products of one token's queries ``[B, Hq, 1, D]`` and the centroids, summed over the query group: ``[B, Hkv, C]``."""
        centroids = self.centroids[slot_of(self.layers, layer)]
        queries = q if self.rope else q_nope
        group = queries[:, :, -1].unflatten(1, (centroids.shape[0], -1)).sum(2)  # [B, Hkv, D]
        return (centroids @ group.to(centroids.dtype)[..., None]).squeeze(-1)


def assign_points(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The bucket ``[H, n]`` with the largest product for each of ``points [H, n, D]``, and that product ``[H, n]``."""
    chunk = max(1, ASSIGN_TOKENS * 8 // points.shape[0])
    best = [(part @ centroids.mT).max(-1) for part in points.split(chunk, dim=1)]
    return torch.cat([b.indices for b in best], dim=1), torch.cat([b.values for b in best], dim=1)


def batched_kmeans(points: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """Spherical k-means of ``H`` point sets at once, as ``faiss.Kmeans(spherical=True)`` does each of them.

    Parameters
    ----------
    points : Tensor
        fp32 ``[H, n, D]``, on any device, ``n >= num_buckets``.
    num_buckets, iterations, seed : int
        Random points are the first centroids; then ``iterations`` of assigning and averaging.

    Returns
    -------
    Tensor : unit centroids ``[H, C, D]``; sums are made by products, so that a seed gives the same centroids again.
    """
    heads, num_points, _ = points.shape
    generator = torch.Generator().manual_seed(seed)
    first = torch.stack([torch.randperm(num_points, generator=generator)[:num_buckets] for _ in range(heads)])
    centroids = points[torch.arange(heads)[:, None].to(points.device), first.to(points.device)]
    centroids = nn.functional.normalize(centroids, dim=-1)
    chunk = max(1, ASSIGN_TOKENS * 8 // heads)
    for _ in range(iterations):
        sums, counts = torch.zeros_like(centroids), centroids.new_zeros(centroids.shape[:2])
        for part in points.split(chunk, dim=1):
            products = part @ centroids.mT  # [H, chunk, C]
            members = torch.zeros_like(products).scatter_(2, products.argmax(-1, keepdim=True), 1.0)
            sums += members.mT @ part
            counts += members.sum(1)
        centroids = nn.functional.normalize(split_empty(sums, counts, centroids), dim=-1)
    return centroids


def split_empty(sums: Tensor, counts: Tensor, centroids: Tensor) -> Tensor:
    """Means ``[H, C, D]`` of the buckets; the e-th empty bucket and the e-th fullest share the latter's members.

    ``sums [H, C, D]``, ``counts [H, C]``. ``centroids`` stay where there is no full bucket left to share.
    """
    empty = counts == 0
    means = torch.where(empty[..., None], centroids, sums / counts.clamp(min=1)[..., None])
    by_size = counts.argsort(dim=-1, descending=True, stable=True)  # the empty ones come last
    num_empty = empty.sum(-1, keepdim=True)
    rank = torch.arange(counts.shape[1], device=counts.device)
    donor = rank < torch.minimum(num_empty, counts.shape[1] - num_empty)
    ordered = means.gather(1, by_size[..., None].expand_as(means))
    taker = donor.flip(-1)  # the e-th fullest gives to the e-th from the end
    sign = torch.where(torch.arange(means.shape[2], device=means.device) % 2 == 0, SPLIT_EPS, -SPLIT_EPS)
    moved = torch.where(donor[..., None], ordered * (1 + sign), ordered)
    moved = torch.where(taker[..., None], ordered.flip(1) * (1 - sign), moved)
    return torch.empty_like(means).scatter_(1, by_size[..., None].expand_as(means), moved)


def faiss_kmeans(points: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """The reference: Faiss on the CPU, head after head. ``points [H, n, D]`` -> unit centroids ``[H, C, D]``.

    UserError when faiss is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError("device=cpu: k-means on the CPU needs Faiss; install it with: pip install 'msattn[cpu]'") from error
    result = []
    for head in points.float().numpy():
        kmeans = faiss.Kmeans(
            head.shape[1],
            num_buckets,
            niter=iterations,
            spherical=True,
            seed=seed,
            gpu=False,
            min_points_per_centroid=1,
            max_points_per_centroid=math.ceil(len(head) / num_buckets),  # Faiss would keep 256 without a word
        )
        kmeans.train(head)
        result.append(torch.from_numpy(kmeans.centroids).clone())
    return torch.stack(result)


def fit_points(points: Tensor, cfg: KMeansConfig, *, device: torch.device, seed: int) -> tuple[Tensor, list[dict[str, float]]]:
    """Centroids ``[H, C, D]`` (on the CPU) of ``points [H, n, D]``, and for each head what :func:`partition_stats` says.

    UserError: more buckets than points, or no Faiss on a CPU.
    """
    if cfg.num_buckets > points.shape[1]:
        raise UserError(
            f"kmeans.num_buckets={cfg.num_buckets}: accepted are at most as many as there are keys, {points.shape[1]}"
        )
    points = points.to(device, torch.float32)
    if cfg.normalize_keys:
        points = nn.functional.normalize(points, dim=-1)
    fit = batched_kmeans if device.type == "cuda" else faiss_kmeans
    centroids = fit(points, cfg.num_buckets, cfg.iterations, seed)
    return centroids.cpu(), partition_stats(points, centroids)


def partition_stats(points: Tensor, centroids: Tensor) -> list[dict[str, float]]:
    """For each head: points used, objective, empty buckets, imbalance factor.

    The objective is the mean product of a point and its centroid. The imbalance factor is ``C sum_c n_c^2 / n^2``: how many
    times more points a visit meets than with equal buckets, 1 at best.
    """
    buckets, products = assign_points(points, centroids)
    num_buckets, num_points = centroids.shape[1], points.shape[1]
    stats = []
    for head in range(len(points)):
        sizes = torch.bincount(buckets[head], minlength=num_buckets).double()
        stats.append(
            {
                "points": num_points,
                "objective": products[head].double().mean().item(),
                "empty_buckets": int((sizes == 0).sum()),
                "imbalance": (num_buckets * (sizes**2).sum() / num_points**2).item(),
            }
        )
    return stats


def mean_stats(layers: list[list[dict[str, float]]]) -> dict[str, float]:
    """:func:`partition_stats` averaged over the heads of some layers."""
    heads = [head for layer in layers for head in layer]
    return {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}


def collect_keys(model: "PreTrainedModel", chunks: data.Chunks, layers: list[int], *, rope: bool) -> dict[int, Tensor]:
    """Keys ``[Hkv, n, D]`` of each of ``layers`` over all chunks (without position 0), on the CPU in the model's dtype."""
    parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def attend(x: LayerInputs) -> Tensor:
        if x.layer in parts:
            parts[x.layer].append((x.k if rope else x.k_nope)[0, :, 1:].cpu())
        return dense_attention(x)

    device = next(model.parameters()).device
    with tap(model, attend), torch.no_grad():
        for i in track(range(len(chunks)), description="keys of prompts"):
            run_backbone(model, chunks[i]["input_ids"][None].to(device))
    return {layer: torch.cat(parts.pop(layer), dim=1) for layer in layers}  # one layer twice in memory, not all


def fit_kmeans(cfg: FitKMeansConfig) -> Path:
    """The job behind ``msattn fit-kmeans``: partitions of the keys of every layer, written as an artifact.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/kmeans``.

    Raises
    ------
    UserError : the artifact exists, the model or data cannot serve, more buckets than keys, no Faiss on a CPU.
    """
    models.require_one_process("fit-kmeans")
    folder = artifacts.folder_of(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(loaded.model.config, cfg.data.seq_len)
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.kmeans.num_prompts)

    settings = {"kmeans": asdict(cfg.kmeans), "data": chunks.fingerprint, "model": loaded.fingerprint, "seed": cfg.seed}
    work = folder.parent / "runs" / "kmeans"
    parts = FinishedParts(work / "layers", settings, resume=cfg.resume)
    layers = list(range(models.num_layers(loaded.model.config)))
    missing = [layer for layer in layers if not parts.path(f"layer_{layer:03d}").exists()]
    keys = collect_keys(loaded.model, chunks, missing, rope=cfg.kmeans.rope) if missing else {}
    with Tracker.start(cfg.tracker, folder=work, run_name=f"{cfg.model.name}-{cfg.name}-kmeans", config=asdict(cfg)) as tracker:
        for layer in track(missing, description="k-means of layers"):
            centroids, stats = fit_points(keys.pop(layer), cfg.kmeans, device=device, seed=cfg.seed + layer)
            parts.save(f"layer_{layer:03d}", {"centroids": centroids}, stats)
            tracker.log(mean_stats([stats]), step=layer)
        fitted = [parts.load(f"layer_{layer:03d}") for layer in layers]
        metrics = mean_stats([stats for _, stats in fitted])
        tracker.summary(metrics)
    artifacts.write(
        folder,
        kind="kmeans",
        tensors={"centroids": torch.stack([tensors["centroids"] for tensors, _ in fitted])},
        config=asdict(cfg),
        model=loaded.fingerprint,
        details={**asdict(cfg.kmeans), "layers": layers, "stats": [stats for _, stats in fitted]},
        data=chunks.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )
    parts.remove()
    artifacts.announce(folder, metrics)
    return folder

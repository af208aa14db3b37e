"""Spherical k-means on keys: the partition that SAAP routes over (arXiv 2502.08246, sections 3 and 4).

Keys are taken before RoPE, a partition for each layer and key/value head; position 0, the attention sink, is left out. Two
engines fit: :func:`batched_kmeans`, all heads of a layer at once through :mod:`msattn.kernels.nearest_centroid`, and Faiss,
head after head. Under ``torchrun`` layers are shared out among the processes, and end the same as in one.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress, track
from torch import Tensor, nn

from msattn.kernels.nearest_centroid import bucket_sums, nearest_centroid
from msattn.trainer import artifacts, data, models, ranks
from msattn.trainer.config import FitKMeansConfig, KMeansConfig
from msattn.trainer.errors import UserError
from msattn.trainer.saap.index import slot_of
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        return nearest_centroid(k if self.rope else k_nope, self.centroids[slot_of(self.layers, layer)]).buckets

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Products of one token's queries ``[B, Hq, 1, D]`` and the centroids, summed over the query group: ``[B, Hkv, C]``."""
        centroids = self.centroids[slot_of(self.layers, layer)]
        queries = q if self.rope else q_nope
        group = queries[:, :, -1].unflatten(1, (centroids.shape[0], -1)).sum(2)  # [B, Hkv, D]
        return (centroids @ group.to(centroids.dtype)[..., None]).squeeze(-1)


def batched_kmeans(points: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """Spherical k-means of ``H`` point sets at once, as ``faiss.Kmeans(spherical=True)`` does each of them.

    Parameters
    ----------
    points : Tensor
        ``[H, n, D]``, fp32, fp16 or bf16, on any device, ``n >= num_buckets``.
    num_buckets, iterations, seed : int
        Random points are the first centroids; then ``iterations`` of assigning and averaging.

    Returns
    -------
    Tensor : unit centroids ``[H, C, D]``, fp32; on one kind of machine bitwise the same for a seed.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(points.shape[1], generator=generator)[:num_buckets].to(points.device)
    centroids = nn.functional.normalize(points[:, first].float(), dim=-1)
    for _ in range(iterations):
        buckets = nearest_centroid(points[None], centroids).buckets
        sums, counts = (x[0] for x in bucket_sums(points[None], buckets, num_buckets=num_buckets))
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


def faiss_kmeans(
    points: Tensor, num_buckets: int, iterations: int, seed: int, advance: Callable[[int], object] = lambda heads: None
) -> Tensor:
    """The reference: Faiss, head after head; on the GPU that ``points [H, n, D]`` are on, if the installed Faiss has GPUs.

    Returns unit centroids ``[H, C, D]``, fp32. ``advance(1)`` is called after each head. UserError when Faiss is not installed.
    """
    faiss = require_faiss()
    _, num_points, size = points.shape
    settings = faiss.ClusteringParameters()
    settings.niter, settings.seed, settings.spherical = iterations, seed, True
    settings.min_points_per_centroid = 1
    settings.max_points_per_centroid = math.ceil(num_points / num_buckets)  # Faiss would keep 256 without a word
    result = []
    for head in points:
        index = faiss.IndexFlatIP(size)
        if points.is_cuda and faiss.get_num_gpus():
            index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), points.device.index or 0, index)
        clustering = faiss.Clustering(size, num_buckets, settings)
        clustering.train(head.float().cpu().numpy(), index)
        centroids = faiss.vector_float_to_array(clustering.centroids).reshape(num_buckets, size)
        result.append(torch.from_numpy(centroids).to(points.device))
        advance(1)
    return torch.stack(result)


def require_faiss() -> Any:
    """The module, or UserError with the ways out."""
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "kmeans.engine=faiss (which auto is on a CPU): Faiss is not installed; pip install 'msattn[cpu]', or "
            "kmeans.engine=batched"
        ) from error
    return faiss


def resolve_engine(engine: str, device: torch.device) -> str:
    """``auto`` is ``batched`` on CUDA, ``faiss`` elsewhere; UserError for a Faiss that is not installed."""
    if engine == "auto":
        engine = "batched" if device.type == "cuda" else "faiss"
    if engine == "faiss":
        require_faiss()
    return engine


def fit_points(
    points: Tensor,
    cfg: KMeansConfig,
    *,
    device: torch.device,
    seed: int,
    advance: Callable[[int], object] = lambda heads: None,
) -> tuple[Tensor, list[dict[str, float]]]:
    """Centroids ``[H, C, D]`` (on the CPU) of ``points [H, n, D]``, and for each head what :func:`partition_stats` says.

    ``advance`` is called with numbers of heads that are done. UserError: more buckets than points, points that are not finite,
    no Faiss where it is to fit.
    """
    engine = resolve_engine(cfg.engine, device)
    heads, num_points, _ = points.shape
    if cfg.num_buckets > num_points:
        raise UserError(f"kmeans.num_buckets={cfg.num_buckets}: accepted are at most as many as there are keys, {num_points}")
    points = points.to(device)
    if not points.isfinite().all():
        name = str(points.dtype).removeprefix("torch.")
        raise UserError(f"dtype={name}: some of the model's keys are not finite; accepted is one that holds them, as float32")
    if cfg.normalize_keys:
        points = nn.functional.normalize(points.float(), dim=-1).to(points.dtype)
    if engine == "faiss":
        centroids = faiss_kmeans(points, cfg.num_buckets, cfg.iterations, seed, advance)
    else:
        centroids = batched_kmeans(points, cfg.num_buckets, cfg.iterations, seed)
        advance(heads)
    return centroids.cpu(), partition_stats(points, centroids)


def partition_stats(points: Tensor, centroids: Tensor) -> list[dict[str, float]]:
    """For each head: points used, objective, empty buckets, imbalance factor.

    The objective is the mean product of a point and its centroid. The imbalance factor is ``C sum_c n_c^2 / n^2``: how many
    times more points a visit meets than with equal buckets, 1 at best.
    """
    buckets, products = (x[0] for x in nearest_centroid(points[None], centroids))
    (heads, num_buckets, _), num_points = centroids.shape, points.shape[1]
    of_all = buckets + num_buckets * torch.arange(heads, device=buckets.device)[:, None]
    sizes = torch.bincount(of_all.flatten(), minlength=heads * num_buckets).view(heads, num_buckets).double()
    objective = products.mean(1, dtype=torch.float64).tolist()
    imbalance = (num_buckets * (sizes**2).sum(1) / num_points**2).tolist()
    empty = (sizes == 0).sum(1).tolist()
    return [
        {"points": num_points, "objective": objective[h], "empty_buckets": empty[h], "imbalance": imbalance[h]}
        for h in range(heads)
    ]


def mean_stats(layers: list[list[dict[str, float]]]) -> dict[str, float]:
    """:func:`partition_stats` averaged over the heads of some layers."""
    heads = [head for layer in layers for head in layer]
    return {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}


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


def fit_kmeans(cfg: FitKMeansConfig) -> Path:
    """The job behind ``msattn fit-kmeans``: partitions of the keys of every layer, written as an artifact.

    Process r of n under ``torchrun`` fits the layers r, r + n, ...; each runs all prompts, which costs every process what it
    costs one, and keeps the keys of its own layers. All must see the same ``outputs``.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/kmeans``.

    Raises
    ------
    UserError : the artifact exists, the model or data cannot serve, more buckets than keys, no Faiss where it is to fit.
    """
    folder = artifacts.folder_of(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    artifacts.check_writable(folder, cfg.overwrite)
    device = models.resolve_device(cfg.device)
    settings = {**asdict(cfg.kmeans), "engine": resolve_engine(cfg.kmeans.engine, device)}
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    models.check_length(loaded.model.config, cfg.data.seq_len)
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.kmeans.num_prompts)

    processes = ranks.join(device)
    work = folder.parent / "runs" / "kmeans"
    made_of = {"kmeans": settings, "data": chunks.fingerprint, "model": loaded.fingerprint, "seed": cfg.seed}
    with processes.main_process_first():  # it removes what other settings left
        parts = FinishedParts(work / "layers", made_of, resume=cfg.resume)
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
        artifacts.announce(folder, metrics)
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

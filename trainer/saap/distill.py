"""``train-qmodel``: query classifiers learn where the frozen model's attention falls (SAAP, arXiv 2502.08246, section 4).

Queries, keys and the partition are frozen, so that the target of a query is a constant: the share of its attention that each
bucket holds. The long-range queries of some prompts are taken with their targets once and kept in files; training reads those.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import Dataset

from msattn.kernels.bucket_mass import bucket_mass
from msattn.trainer import artifacts, data, models
from msattn.trainer.config import QModelConfig, TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.loop import fit
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CANDIDATES = 8  # query positions looked at for each that is kept: about a fifth of the queries are long-range
FEWEST = 16  # queries of a head and prompt: where fewer are long-range, those that look farthest make up the number
PROMPTS_A_BATCH = 8  # a batch mixes prompts, so that its norm is not one text's
HEALTH_PROMPTS = 4  # held-out chunks
HEALTH_PROBES = 32

Prompt = dict[str, Tensor]
"""One prompt's training pairs: ``queries`` fp16 [layers, Hq, n, D], ``targets`` fp16 [layers, Hq, n, C], ``counts`` and
``long_range`` int64 [layers, Hq]: how many of the n rows hold a query, and how many of those are long-range."""


def layer_pairs(x: LayerInputs, partition: KMeans, cfg: QModelConfig, positions: Tensor, generator: torch.Generator) -> Prompt:
    """One layer's entries of a :data:`Prompt` (without the dimension of layers), n = ``cfg.queries_per_prompt`` at most.

    Parameters
    ----------
    x : LayerInputs
        A whole prompt; the sink, position 0, is left out of the targets.
    positions : Tensor
        int32, ascending: the queries to choose from.
    generator : torch.Generator
        Draws among long-range queries; on the CPU, so that every machine draws the same.
    """
    buckets = partition.assign(x.layer, x.k_nope, x.k)
    buckets[:, :, 0] = -1
    queries = x.q[:, :, positions]

    def attention(min_distance: int | None):
        return bucket_mass(
            queries,
            x.k,
            buckets,
            num_buckets=partition.num_buckets,
            causal=cfg.causal,
            scale=x.scale,
            min_distance=min_distance,
            q_pos=positions,
        )

    everywhere = attention(None)
    target = everywhere if cfg.min_distance is None else attention(cfg.min_distance)
    distance = (positions - everywhere.top_key[0]).abs()  # [Hq, positions]
    usable = target.lse[0] > -torch.inf
    far = usable & (distance > cfg.long_range)
    draw = torch.rand(distance.shape, generator=generator).to(distance.device)
    rank = torch.where(far, 1 + draw, distance / x.num_keys).masked_fill(~usable, -1)
    rows = rank.topk(min(cfg.queries_per_prompt, len(positions)), dim=-1).indices  # [Hq, n]
    counts = far.sum(-1).clamp(min=FEWEST).minimum(usable.sum(-1)).clamp(max=rows.shape[1])
    source = x.q if partition.rope else x.q_nope
    kept = source[0, :, positions].gather(1, rows[..., None].expand(-1, -1, source.shape[-1]))
    masses = target.mass[0].gather(1, rows[..., None].expand(-1, -1, partition.num_buckets))
    pairs = {"queries": kept.half(), "targets": masses.half(), "counts": counts, "long_range": far.sum(-1).minimum(counts)}
    return {name: value.cpu() for name, value in pairs.items()}


def prompt_pairs(model: "PreTrainedModel", partition: KMeans, cfg: QModelConfig, input_ids: Tensor, seed: int) -> Prompt:
    """The training pairs of one prompt ``input_ids [N]``, all layers of ``partition``."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randperm(len(input_ids), generator=generator)[: CANDIDATES * cfg.queries_per_prompt]
    positions = candidates.sort().values.to(input_ids.device, torch.int32)
    layers: dict[int, Prompt] = {}

    def attend(x: LayerInputs) -> Tensor:
        if x.layer in partition.layers:
            layers[x.layer] = layer_pairs(x, partition, cfg, positions, generator)
        return dense_attention(x)

    with tap(model, attend), torch.no_grad():
        run_backbone(model, input_ids[None])
    rows = max(int(pairs["counts"].max()) for pairs in layers.values())
    ordered = [layers[layer] for layer in partition.layers]
    stacked = {name: torch.stack([pairs[name] for pairs in ordered]) for name in ordered[0]}
    return {name: value[:, :, :rows].contiguous() if value.dim() == 4 else value for name, value in stacked.items()}


def cached_pairs(
    parts: FinishedParts, chunks: data.Chunks, kind: str, model: "PreTrainedModel", partition: KMeans, cfg: TrainQModelConfig
) -> list[Prompt]:
    """The pairs of every chunk, from the files of ``parts`` where they are, else computed and kept there; mapped into memory.

    Raises
    ------
    UserError : the disk has no room for them, or no query of any prompt is long-range.
    """
    names = [f"{kind}_{i:04d}" for i in range(len(chunks))]
    missing = [i for i, name in enumerate(names) if not parts.path(name).exists()]
    heads, head_dim = models.num_heads(model.config), models.head_dim(model.config)
    row = 2 * (head_dim + partition.num_buckets)  # bytes, fp16
    size = len(missing) * len(partition.layers) * heads * cfg.qmodel.queries_per_prompt * row
    free = shutil.disk_usage(parts.folder).free
    if size > free:
        raise UserError(
            f"qmodel.num_prompts={cfg.qmodel.num_prompts}: cached queries take up to {size / 1e9:.1f} GB in {parts.folder}, "
            f"where {free / 1e9:.1f} GB are free; lower it or qmodel.queries_per_prompt"
        )
    if missing:
        print(
            f"{kind} queries and targets of {len(missing)} prompts: at most {size / 1e9:.2f} GB in {parts.folder}", flush=True
        )
    for i in track(missing, description=f"{kind} targets", disable=not missing):
        seed = 1_000_003 * cfg.seed + 2 * i + (kind == "train")
        input_ids = chunks[i]["input_ids"].to(partition.centroids.device)
        parts.save(names[i], prompt_pairs(model, partition, cfg.qmodel, input_ids, seed))
    prompts = [parts.load(name)[0] for name in names]
    found = sum(prompt["long_range"] for prompt in prompts)
    if not isinstance(found, Tensor) or not found.any():
        raise UserError(
            f"qmodel.long_range={cfg.qmodel.long_range}: no query looks that far back in {len(prompts)} prompts of "
            f"{cfg.data.seq_len} tokens; lower it"
        )
    return prompts


class QueryBatches(Dataset[dict[str, Tensor]]):
    """Item i is a batch drawn from (seed, i) alone: ``queries [layers, H, n, D]``, ``targets [layers, H, n, C]``.

    Each batch mixes up to ``PROMPTS_A_BATCH`` prompts; a classifier's rows are drawn, with replacement, from the queries of all
    query heads that it serves.

    Parameters
    ----------
    prompts : list of Prompt
    num_heads : int
        ``H``, classifiers a layer.
    batch_queries : int
        ``n``.
    length : int
        Number of items.
    """

    def __init__(self, prompts: list[Prompt], *, num_heads: int, batch_queries: int, length: int, seed: int) -> None:
        self.prompts, self.num_heads, self.batch_queries, self.length, self.seed = (
            prompts,
            num_heads,
            batch_queries,
            length,
            seed,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        chosen = torch.randperm(len(self.prompts), generator=generator)[:PROMPTS_A_BATCH].tolist()
        shares = [len(part) for part in torch.arange(self.batch_queries).tensor_split(len(chosen))]
        drawn = [self._draw(self.prompts[i], share, generator) for i, share in zip(chosen, shares, strict=True)]
        return {name: torch.cat([part[name] for part in drawn], dim=2) for name in drawn[0]}

    def _draw(self, prompt: Prompt, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        counts = prompt["counts"].unflatten(1, (self.num_heads, -1))  # [layers, H, query heads a classifier]
        ends = counts.cumsum(-1)
        pick = (torch.rand(*ends.shape[:2], count, generator=generator) * ends[..., -1:]).long().minimum(ends[..., -1:] - 1)
        head = torch.searchsorted(ends, pick, right=True)
        row = pick - (ends - counts).gather(-1, head)
        layers, heads, rows = prompt["queries"].shape[:3]
        first = torch.arange(layers * self.num_heads).view(layers, self.num_heads, 1) * (heads // self.num_heads)
        flat = (first + head) * rows + row
        return {name: prompt[name].flatten(0, 2)[flat] for name in ("queries", "targets")}


def join_batches(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several batches as one."""
    return {name: torch.cat([item[name] for item in items], dim=2) for name in items[0]}


class Distiller(nn.Module):
    """Classifiers in training: ``KL(target || classifier)``, the mean over queries, heads and layers."""

    def __init__(self, qmodel: QModel) -> None:
        super().__init__()
        self.qmodel = qmodel

    def forward(self, queries: Tensor, targets: Tensor) -> dict[str, Tensor | dict[str, Tensor]]:
        """Loss of a batch ``queries [layers, H, n, D]``, ``targets [layers, H, n, C]``, and each layer's part."""
        log_probs = self.qmodel(queries.float()).float().log_softmax(-1)
        divergence = F.kl_div(log_probs, targets.float(), reduction="none").sum(-1).mean((1, 2))
        parts = {f"layer {layer}": value for layer, value in zip(self.qmodel.layers, divergence, strict=True)}
        return {"loss": divergence.mean(), "parts": parts}


@torch.no_grad()
def routing_recall(qmodel: QModel, prompts: list[Prompt]) -> dict[str, float]:
    """Mean attention mass in the buckets that a query visits, for 1, 2, 4, ... probes.

    ``recall_qmodel@L``: chosen by the classifier; ``recall_kmeans@L``: by products with the centroids; ``recall_oracle@L``: the
    heaviest.
    """
    device, centroids = qmodel.weight_in.device, qmodel.partition.centroids
    most = min(HEALTH_PROBES, qmodel.num_buckets)
    sums = {name: torch.zeros(most, device=device) for name in ("qmodel", "kmeans", "oracle")}
    total = 0
    for prompt in prompts:
        queries, targets = prompt["queries"].to(device).float(), prompt["targets"].to(device).float()
        heads, rows = queries.shape[1:3]
        filled = torch.arange(rows, device=device) < prompt["counts"].to(device)[..., None]  # [layers, Hq, n]
        by_classifier = queries.unflatten(1, (qmodel.weight_in.shape[1], -1)).flatten(2, 3)
        scores = {
            "qmodel": qmodel(by_classifier).unflatten(2, (-1, rows)).flatten(1, 2),
            "kmeans": queries @ centroids.repeat_interleave(heads // qmodel.kv_heads, dim=1).mT,
            "oracle": targets,
        }
        total += int(filled.sum())
        for name, score in scores.items():
            mass = targets.gather(-1, score.topk(most, dim=-1).indices).cumsum(-1)
            sums[name] += mass[filled].sum(0)
    probes = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return {f"recall_{name}@{count}": (sums[name][count - 1] / total).item() for count in probes for name in sums}


def train_qmodel(cfg: TrainQModelConfig) -> Path:
    """The job behind ``msattn train-qmodel``: classifiers for the k-means of the same model and name, or ``artifacts.kmeans``.

    Returns
    -------
    Path : the artifact's folder, ``outputs/<model.name>/<name>/qmodel``.

    Raises
    ------
    UserError : no such k-means, one of another model (the field is named), an artifact that exists, settings that do not fit.
    """
    folder = artifacts.folder_of(cfg.outputs, cfg.model.name, cfg.name, "qmodel")
    artifacts.check_writable(folder, cfg.overwrite)
    models.require_one_process("train-qmodel")
    if cfg.qmodel.long_range >= cfg.data.seq_len:
        raise UserError(f"qmodel.long_range={cfg.qmodel.long_range}: accepted is less than data.seq_len={cfg.data.seq_len}")
    source = cfg.artifacts.kmeans or artifacts.folder_of(cfg.outputs, cfg.model.name, cfg.name, "kmeans")
    if cfg.artifacts.kmeans is None and not Path(source).exists():
        raise UserError(f"artifacts.kmeans=null: there is no k-means in {source}; make it with msattn fit-kmeans, or name one")
    device = models.resolve_device(cfg.device)
    partition = KMeans.load(source).to(device)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    assert partition.artifact is not None
    artifacts.check_model(partition.artifact, loaded.fingerprint)
    models.check_length(loaded.model.config, cfg.data.seq_len)

    text = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=cfg.qmodel.num_prompts)
    heldout = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, num_chunks=HEALTH_PROMPTS)
    kmeans_hash = partition.artifact.manifest["content_hash"]
    frozen = {
        "qmodel": {key: value for key, value in asdict(cfg.qmodel).items() if key not in ("hidden", "heads", "batch_queries")},
        "data": [text.fingerprint, heldout.fingerprint],
        "model": loaded.fingerprint,
        "kmeans": kmeans_hash,
        "seed": cfg.seed,
    }
    work = folder.parent / "runs" / "qmodel"
    parts = FinishedParts(work / "cache", frozen, resume=cfg.resume)
    prompts = cached_pairs(parts, text, "train", loaded.model, partition, cfg)
    health = cached_pairs(parts, heldout, "heldout", loaded.model, partition, cfg)
    share = float(sum(prompt["long_range"].sum() for prompt in prompts)) / float(
        sum(prompt["counts"].sum() for prompt in prompts)
    )
    if share < 1:
        print(
            f"{1 - share:.1%} of the cached queries are not long-range: their head has few in a prompt, its farthest stand in"
        )

    config = loaded.model.config
    heads = models.num_kv_heads(config) if cfg.qmodel.heads == "kv" else models.num_heads(config)
    fingerprint = loaded.fingerprint
    del loaded
    torch.manual_seed(cfg.seed)
    qmodel = QModel(partition, heads, cfg.qmodel.hidden).to(device)
    batches = QueryBatches(
        prompts,
        num_heads=heads,
        batch_queries=cfg.qmodel.batch_queries,
        length=cfg.train.steps * cfg.train.batch_size,
        seed=cfg.seed,
    )
    with Tracker.start(cfg.tracker, folder=work, run_name=f"{cfg.model.name}-{cfg.name}-qmodel", config=asdict(cfg)) as tracker:
        summary = fit(
            Distiller(qmodel),
            batches,
            train=cfg.train,
            folder=work,
            tracker=tracker,
            device=device,
            seed=cfg.seed,
            resume=cfg.resume,
            evaluate=lambda: routing_recall(qmodel, health),
            collate=join_batches,
            optimizer="adam",
        )
        metrics = {**summary.losses, **routing_recall(qmodel.eval(), health)}
        tracker.summary(metrics)
    artifacts.write(
        folder,
        kind="qmodel",
        tensors={name: value.cpu().contiguous() for name, value in qmodel.state_dict().items()},
        config=asdict(cfg),
        model=fingerprint,
        details={
            **asdict(cfg.qmodel),
            "layers": partition.layers,
            "rope": partition.rope,
            "num_buckets": partition.num_buckets,
            "kmeans_hash": kmeans_hash,
            "share_long_range": share,
        },
        data=text.fingerprint,
        seed=cfg.seed,
        metrics=metrics,
        overwrite=cfg.overwrite,
    )
    artifacts.announce(folder, metrics)
    return folder

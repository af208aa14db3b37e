"""k-means partitions for an analysis: those of the artifacts, and fitted ones of the other kind and
of other sizes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from msattn.trainer import data, models
from msattn.trainer.config import EvalRunConfig, KMeansConfig
from msattn.trainer.data.overlap import check_heldout
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, ComparedRouting
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.tasks.analysis.queries import Window
from msattn.trainer.memory import free_memory
from msattn.trainer.methods.base import ROPE
from msattn.trainer.methods.buckets import decode_defaults
from msattn.trainer.methods.classifier.clustering import fit_centroids
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.loading import Loaded
from msattn.trainer.models.tap import LayerInputs, visit_layers

POINTS_PER_BUCKET = 128  # training keys of each head, for each bucket
MIN_CHUNKS = 4  # chunks of training text
BEFORE, AFTER = KMeans.method, KMeans.method.of(ROPE)


@dataclass(frozen=True)
class TrainingKeys:
    """Keys of training text, by layer: ``[Hkv, n, D]`` before and after RoPE, on the CPU, in the
    model's dtype.
    """

    before: dict[int, Tensor]
    after: dict[int, Tensor]
    num_chunks: int

    @property
    def count(self) -> int:
        return next(iter(self.before.values())).shape[1]


def with_k_means(methods: Compared) -> Compared:
    """Returns ``methods`` without the routings whose buckets are not those of a k-means, with the
    same notes.
    """
    learned = [
        routing
        for routing in methods.bucket_routings
        if isinstance(routing.router.assigner, KMeans)
    ]
    return replace(methods, bucket_routings=learned)


def k_means(routings: list[ComparedRouting]) -> dict[bool, ComparedRouting]:
    """Returns the first routing by a k-means alone before RoPE (False), and the first after RoPE
    (True).
    """
    by_rope: dict[bool, ComparedRouting] = {}
    for routing in routings:
        if isinstance(routing.router, KMeans):
            by_rope.setdefault(routing.router.rope, routing)
    return by_rope


def num_buckets(cfg: EvalRunConfig, methods: Compared) -> int:
    """Returns the number of buckets of the first routing, or that of the model's presets."""
    routers = [routing.router.num_buckets for routing in methods.bucket_routings]
    return routers[0] if routers else cfg.model.presets.num_buckets


def other_sizes(cfg: EvalRunConfig, methods: Compared) -> list[int]:
    """Returns the numbers of buckets of the further partitions."""
    main = num_buckets(cfg, methods)
    given = cfg.eval.analysis.buckets
    return [
        size
        for size in dict.fromkeys([main // 4] if given is None else given)
        if size not in (0, main)
    ]


def window_of(cfg: EvalRunConfig, methods: Compared) -> Window:
    """Returns the window of the first routing, else the configured one or that of the model's
    presets.
    """
    for routing in methods.bucket_routings:
        return Window(routing.sink, routing.recent)
    given, defaults = cfg.routing, decode_defaults(cfg.model.presets, cfg.model.presets.num_buckets)
    return Window(
        *(defaults[key] if given.get(key) is None else given[key] for key in ("sink", "recent"))
    )


def training_keys(job: Job, methods: Compared, layers: list[int]) -> TrainingKeys:
    """Collects keys of ``layers`` at random positions of training chunks, the attention sink left
    out.

    There are ``POINTS_PER_BUCKET`` keys of each head for each bucket of the largest partition.
    """
    loaded, cfg = job.loaded, job.cfg
    check_heldout(cfg.data)
    length = cfg.eval.analysis.length
    largest = max(num_buckets(cfg, methods), *other_sizes(cfg, methods))
    points = POINTS_PER_BUCKET * largest
    count = max(MIN_CHUNKS, -(-points // (length - 1)))
    chunks = data.chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, seq_len=length, num_chunks=count
    )
    per_chunk = min(length - 1, -(-points // len(chunks)))
    check_num_keys(loaded, length, len(chunks) * per_chunk, largest, len(layers))
    generator = torch.Generator().manual_seed(cfg.seed)
    before, after = ({layer: list[Tensor]() for layer in layers} for _ in range(2))
    advance = job.bar("analysis, training keys", len(chunks) * len(layers))
    for i in range(len(chunks)):
        chosen = (1 + torch.randperm(length - 1, generator=generator)[:per_chunk]).to(
            loaded.model.device
        )

        def keep(x: LayerInputs, chosen: Tensor = chosen) -> None:
            before[x.layer].append(x.k_nope[0, :, chosen].cpu())
            after[x.layer].append(x.k[0, :, chosen].cpu())
            advance()

        visit_layers(loaded.model, keep, [chunks[i]], layers)
    joined = (
        {layer: torch.cat(parts, dim=1) for layer, parts in by_layer.items()}
        for by_layer in (before, after)
    )
    return TrainingKeys(*joined, num_chunks=len(chunks))


def check_num_keys(loaded: Loaded, length: int, count: int, largest: int, num_layers: int) -> None:
    """Raises UserError if ``count`` keys of each head are fewer than the buckets, or do not fit
    into memory.
    """
    config = loaded.model.config
    if count < largest:
        raise UserError(
            f"eval.analysis.length={length}: the training text gives {count} keys, "
            f"fewer than the {largest} buckets of a partition; more text, longer chunks or fewer "
            f"buckets are needed"
        )
    keys = 2 * num_layers * models.num_kv_heads(config) * count  # before and after RoPE
    needed, free = keys * models.head_dim(config) * loaded.model.dtype.itemsize, free_memory()
    if needed > free:
        raise UserError(
            f"eval.analysis.layers={num_layers} layers: their training keys take "
            f"{needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; choose fewer, or "
            "lower eval.analysis.buckets"
        )


def routings(job: Job, methods: Compared, keys: TrainingKeys) -> list[ComparedRouting]:
    """Returns the routings of the artifacts, and fitted k-means: one before RoPE, one after, and of
    the further sizes.
    """
    cfg, device = job.cfg, job.loaded.model.device
    main = num_buckets(cfg, methods)
    wanted = {BEFORE: (False, main), AFTER: (True, main)}
    learned = k_means(methods.bucket_routings)
    wanted = {
        method: (rope, size) for method, (rope, size) in wanted.items() if rope not in learned
    }
    wanted |= {BEFORE.of(f"{size} buckets"): (False, size) for size in other_sizes(cfg, methods)}
    layers = sorted(keys.before)
    advance = job.bar("analysis, k-means of heads", len(wanted) * len(layers))
    fitted = []
    for method, (rope, size) in wanted.items():
        settings, centroids = KMeansConfig(num_buckets=size, rope=rope, engine="batched"), []
        for layer in layers:
            of_layer = (keys.after if rope else keys.before)[layer]
            centroids.append(
                fit_centroids(of_layer, settings, device=device, seed=cfg.seed + layer)[0]
            )
            advance()
        router = KMeans(torch.stack(centroids), layers, rope).to(device)
        fitted.append(ComparedRouting.configured(method, router, cfg))
    if fitted:
        names = "; ".join(str(routing.method) for routing in fitted)
        text = f"{keys.count:,} keys of each head from {keys.num_chunks} training chunks"
        methods.notes.append(f"Fitted for the analysis, on {text}: {names}.")
    return [*methods.bucket_routings, *fitted]


def check_model_has(cfg: EvalRunConfig, config: PreTrainedConfig) -> None:
    """Raises UserError if ``eval.analysis.layers`` or ``heads`` names one that the model does not
    have.
    """
    settings = cfg.eval.analysis
    for layer in models.attention_layers(config):
        if layer.kept and layer.layer in (settings.layers or ()):
            raise UserError(
                f"eval.analysis.layers={settings.layers}: layer {layer.layer} is never sparse: "
                f"{layer.kept}"
            )
    counts = (
        ("layers", "layers", models.num_layers(config)),
        ("heads", "key/value heads", models.num_kv_heads(config)),
    )
    for key, name, count in counts:
        given = getattr(settings, key) or []
        if max(given, default=0) >= count:
            raise UserError(
                f"eval.analysis.{key}={given}: expected 0 to {count - 1}, as the model has "
                f"{count} {name}"
            )

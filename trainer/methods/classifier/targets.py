"""Training data of the query classifiers: queries and the attention mass of each bucket (SAAP,
section 4).

The model and the partition are frozen, so the target of a query is a constant. The long-range
queries of some prompts and their targets are computed once and cached in files, one for each
prompt. Training then loads all rows of its layers onto the device.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from accelerate.state import PartialState
from torch import Tensor
from torch.utils.data import Dataset

from msattn.kernels.bucket_mass import bucket_mass
from msattn.trainer import data, models
from msattn.trainer.config import QModelConfig, TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import hash32, layer_index
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.tap import visit_layers
from msattn.trainer.progress import Progress
from msattn.trainer.storage.parts import FinishedParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# query positions examined for each that is kept: about a fifth of the queries are long-range
CANDIDATES = 8
# minimum per head and prompt: if fewer are long-range, those with the most distant top key are
# added
MIN_QUERIES = 16
ENTROPY_BYTES = 4  # bytes per row, in addition to its fp16 query and target
# separates the hashes of small seeds and batch numbers from those of layers, heads and rows
SALT = 0x9E3779B9


def key_buckets(x: LayerInputs, partition: KMeans) -> Tensor:
    """Returns the bucket of each key of a whole prompt: int32 ``[1, Hkv, N]``, -1 for the attention
    sink, position 0.
    """
    buckets = partition.assign(x.layer, x.k_nope, x.k)
    buckets[:, :, 0] = -1
    return buckets


def layer_targets(
    x: LayerInputs,
    partition: KMeans,
    buckets: Tensor,
    cfg: QModelConfig,
    positions: Tensor,
    generator: torch.Generator,
    most: int,
) -> dict[str, Tensor]:
    """Returns queries and targets of one layer and prompt, at most ``most`` for each query head.

    ``x`` is a whole prompt, ``buckets`` the result of :func:`key_buckets`, ``positions`` int32,
    ascending, those of the queries to choose from. ``generator`` samples the long-range queries on
    the CPU, so that the samples are the same on every machine.

    The result, on the device of ``x``: ``queries`` fp16 [rows, D] and ``targets`` fp16 [rows, C],
    ordered by query head; ``counts`` and ``long_range`` int64 [Hq], the number of rows of each head
    and of long-range queries among them.
    """
    queries = x.q[:, :, positions]

    def mass_beyond(min_distance: int | None):
        return bucket_mass(
            queries,
            x.k,
            buckets,
            num_buckets=partition.num_buckets,
            causal=cfg.causal,
            scale=x.scale,
            softcap=x.scoring.softcap,
            min_distance=min_distance,
            q_pos=positions,
        )

    all_keys = mass_beyond(None)
    target = all_keys if cfg.min_distance is None else mass_beyond(cfg.min_distance)
    distance = (positions - all_keys.top_key[0]).abs()  # [Hq, positions]
    usable = target.lse[0] > -torch.inf
    far = usable & (distance > cfg.long_range) if cfg.long_range else usable
    sample = torch.rand(distance.shape, generator=generator).to(distance.device)
    # Long-range queries first, in random order, then the others by distance.
    priority = torch.where(far, 1 + sample, distance / x.num_keys).masked_fill(~usable, -1)
    ranked = priority.topk(min(most, len(positions)), dim=-1).indices  # [Hq, n]
    counts = far.sum(-1).clamp(min=MIN_QUERIES).minimum(usable.sum(-1)).clamp(max=ranked.shape[1])
    head, rank = (torch.arange(ranked.shape[1], device=ranked.device) < counts[:, None]).nonzero(
        as_tuple=True
    )
    chosen = ranked[head, rank]
    source = x.q if partition.rope else x.q_nope
    return {
        "queries": source[0][head, positions[chosen].long()].half(),
        "targets": target.mass[0][head, chosen].half(),
        "counts": counts,
        "long_range": far.sum(-1).minimum(counts),
    }


def prompt_targets(
    model: "PreTrainedModel", partition: KMeans, cfg: QModelConfig, input_ids: Tensor, seed: int
) -> dict[str, Tensor]:
    """Returns :func:`layer_targets` of every routed layer for one prompt ``input_ids [N]``, with
    keys ``{layer}.{name}``.

    The tensors are on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randperm(len(input_ids), generator=generator)[
        : CANDIDATES * cfg.queries_per_prompt
    ]
    positions = candidates.sort().values.to(input_ids.device, torch.int32)
    targets: dict[str, Tensor] = {}

    def record(x: LayerInputs) -> None:
        tensors = layer_targets(
            x,
            partition,
            key_buckets(x, partition),
            cfg,
            positions,
            generator,
            cfg.queries_per_prompt,
        )
        targets.update({f"{x.layer}.{name}": value.cpu() for name, value in tensors.items()})

    visit_layers(model, record, [{"input_ids": input_ids}], partition.layers)
    return targets


@dataclass(frozen=True)
class QueryTargets:
    """Queries and targets of some layers on one device. The rows of a classifier are contiguous."""

    queries: Tensor  # fp16 [rows, D]
    targets: Tensor  # fp16 [rows, C]
    entropy: Tensor  # fp32 [rows], of the targets, in nats
    start: Tensor  # int64 [layers, H], the first row of each classifier
    count: Tensor  # int64 [layers, H], its number of rows, at least one


class BatchSeeds(Dataset[dict[str, int]]):
    """Seeds of batches: item i depends only on (seed, i)."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length = seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"batches": hash32(hash32(self.seed ^ SALT) ^ index)}


class CachedBatches:
    """Random batches of cached ``data``: a seed samples ``batch_queries`` rows of a classifier,
    with replacement.
    """

    def __init__(self, data: QueryTargets, layers: list[int], batch_queries: int) -> None:
        self.data = data
        device = data.queries.device
        layer, head, sample = (
            torch.as_tensor(values, device=device)
            for values in (layers, range(data.count.shape[1]), range(batch_queries))
        )
        head_hashes = hash32(hash32(layer)[:, None] ^ head)
        # [layers, H, 1, n], the same in any group
        self.sample_hashes = hash32(head_hashes[:, :, None, None] ^ sample)

    def sample(self, batch_seeds: Tensor) -> Tensor:
        """Samples rows of each classifier uniformly: int64 ``[layers, H, m * n]`` for
        ``batch_seeds`` int64 ``[m]``.
        """
        start, count = self.data.start[:, :, None, None], self.data.count[:, :, None, None]
        offset = hash32(self.sample_hashes ^ batch_seeds[:, None]) * count >> 32
        return (offset + start).flatten(2)

    def __call__(self, batch_seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, targets and entropy of the rows that :meth:`sample` returns."""
        rows = self.sample(batch_seeds)
        gathered = (
            table.index_select(0, rows.flatten())
            for table in (self.data.queries, self.data.targets)
        )
        queries, targets = (values.view(*rows.shape, -1) for values in gathered)
        return queries, targets, self.data.entropy[rows]


class TrainingBatches(NamedTuple):
    """Batches of the classifiers of some layers, as :func:`msattn.trainer.training.loop.fit` takes
    them.
    """

    draw: Callable[[Any], tuple[Tensor, Tensor, Tensor]]  # of items, as Distiller takes it
    dataset: Any  # seeds or numbers of batches
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    shuffle: bool = True


@dataclass(frozen=True)
class TargetCache:
    """Queries and targets of the prompts ``chunks``, cached in files."""

    parts: FinishedParts  # the files, one per prompt; both splits share the folder
    split: str  # train or heldout
    chunks: data.Chunks
    partition: KMeans
    cfg: TrainQModelConfig
    # of qmodel, to lower if a layer does not fit into memory
    memory_keys: ClassVar = "num_prompts", "queries_per_prompt"

    def load_model(self) -> "PreTrainedModel":
        """Loads the model again: training from cached targets uses all of the memory."""
        return models.load(
            self.cfg.model, device=self.cfg.device, dtype=self.cfg.dtype, seed=self.cfg.seed
        ).model

    def batches(self, layers: list[int], num_heads: int) -> TrainingBatches:
        """Returns the batches that train ``num_heads`` classifiers of each of ``layers``
        together.
        """
        cfg, rows = self.cfg, self.load(layers, num_heads, self.partition.centroids.device)
        draw = CachedBatches(rows, layers, cfg.qmodel.batch_queries)
        return TrainingBatches(draw, BatchSeeds(cfg.seed, cfg.train.steps * cfg.train.batch_size))

    def part_name(self, prompt: int) -> str:
        """Returns the name of the part that holds one prompt."""
        return f"{self.split}_{prompt:04d}"

    @property
    def missing(self) -> list[int]:
        """The prompts that are not cached."""
        return [i for i in range(len(self.chunks)) if self.part_name(i) not in self.parts]

    def compute_missing(
        self,
        model: "PreTrainedModel",
        ranks: PartialState,
        first_done: Callable[[float], None] | None = None,
    ) -> None:
        """Computes the targets of prompts that are not cached, split over ``ranks``; a part's note
        is its time in seconds.

        ``first_done`` is called after the first of them with its seconds. Raises UserError: the
        files do not fit on the disk.
        """
        missing = self.missing
        # every rank must list the missing prompts before the first is added
        ranks.wait_for_everyone()
        self._check_disk_space(len(missing), model, ranks.is_main_process)
        own = missing[ranks.process_index :: ranks.num_processes]
        began = time.perf_counter()
        with Progress(transient=False, enabled=bool(own) and ranks.is_main_process) as progress:
            for i in progress.track(own, description=f"{self.split} targets"):
                seed = 1_000_003 * self.cfg.seed + 2 * i + (self.split == "train")
                input_ids = self.chunks[i]["input_ids"].to(self.partition.centroids.device)
                targets = prompt_targets(model, self.partition, self.cfg.qmodel, input_ids, seed)
                ended = time.perf_counter()
                self.parts.save(self.part_name(i), targets, ended - began)
                if first_done is not None and i == own[0]:
                    first_done(ended - began)
                    ended = time.perf_counter()
                began = ended  # the time of writing counts for the next prompt
        ranks.wait_for_everyone()

    def _check_disk_space(self, prompts: int, model: "PreTrainedModel", prints: bool) -> None:
        if not prompts:
            return
        cfg, folder = self.cfg.qmodel, self.parts.folder
        row_bytes = 2 * (models.head_dim(model.config) + self.partition.num_buckets)  # fp16
        size = (
            prompts
            * len(self.partition.layers)
            * models.num_heads(model.config)
            * cfg.queries_per_prompt
            * row_bytes
        )
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UserError(
                f"qmodel.num_prompts={cfg.num_prompts}: cached queries take up to {size / 1e9:.1f} "
                f"GB in {folder}, where {free / 1e9:.1f} GB are free; lower it or "
                "qmodel.queries_per_prompt"
            )
        if prints:
            content = f"{self.split} queries and targets of {prompts} prompts"
            print(
                f"{content}: at most {size / 1e9:.2f} GB in {folder}, kept for further runs",
                flush=True,
            )

    def totals(self, name: str) -> Tensor:
        """Returns the sum over prompts of ``counts`` or ``long_range``: int64 ``[layers, Hq]``."""
        files = [self.parts.load(self.part_name(i))[0] for i in range(len(self.chunks))]
        return torch.stack(
            [
                torch.stack([file[f"{layer}.{name}"] for layer in self.partition.layers])
                for file in files
            ]
        ).sum(0)

    def seconds(self) -> float:
        """Returns the seconds that computing all files took, summed over ranks."""
        return sum(self.parts.load(self.part_name(i))[1] for i in range(len(self.chunks)))

    def long_range_share(self) -> float:
        """Returns the share of long-range queries among all rows."""
        return float(self.totals("long_range").sum() / self.totals("counts").sum())

    def check(self) -> None:
        """Raises UserError if a head has no query, or if no query is long-range."""
        cfg, where = (
            self.cfg.qmodel,
            f"in {len(self.chunks)} prompts of {self.cfg.data.seq_len} tokens; lower it",
        )
        if not self.totals("counts").all():
            raise UserError(
                f"qmodel.min_distance={cfg.min_distance}: some head has no query with keys that "
                f"far away {where}"
            )
        if not self.totals("long_range").any():
            raise UserError(
                f"qmodel.long_range={cfg.long_range}: no query has its top key that far away "
                f"{where}"
            )

    def pass_bytes(self) -> int:
        """Returns 0: no pass of the model runs during training."""
        return 0

    def max_layer_bytes(self, num_heads: int) -> int:
        """Returns the memory that the rows of the largest layer take, in bytes, for any number of
        classifiers.
        """
        row_bytes = (
            2 * (self.partition.centroids.shape[3] + self.partition.num_buckets) + ENTROPY_BYTES
        )
        return int(self.totals("counts").sum(1).max()) * row_bytes

    def load(self, layers: list[int], num_heads: int, device: torch.device) -> QueryTargets:
        """Returns the rows of ``layers`` on ``device``, for ``num_heads`` classifiers in each
        layer.
        """
        indices = [layer_index(self.partition.layers, layer) for layer in layers]
        count = self.totals("counts")[indices].unflatten(1, (num_heads, -1)).sum(2)  # [layers, H]
        start = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
        rows, (_, _, num_buckets, head_dim) = int(count.sum()), self.partition.centroids.shape
        queries = torch.empty(rows, head_dim, dtype=torch.float16, device=device)
        targets = torch.empty(rows, num_buckets, dtype=torch.float16, device=device)
        entropy = torch.empty(rows, device=device)
        next_row = start.clone()
        for i in range(len(self.chunks)):
            tensors, _ = self.parts.load(self.part_name(i))
            for index, layer in enumerate(layers):
                sizes = tensors[f"{layer}.counts"].unflatten(0, (num_heads, -1)).sum(1).tolist()
                split = zip(
                    tensors[f"{layer}.queries"].split(sizes),
                    tensors[f"{layer}.targets"].split(sizes),
                    strict=True,
                )
                for head, (head_queries, head_targets) in enumerate(split):
                    first = int(next_row[index, head])
                    where = slice(first, first + sizes[head])
                    queries[where], targets[where] = head_queries, head_targets
                    mass = targets[where].float()
                    entropy[where] = -torch.xlogy(mass, mass).sum(-1)
                    next_row[index, head] += sizes[head]
        return QueryTargets(queries, targets, entropy, start.to(device), count.to(device))

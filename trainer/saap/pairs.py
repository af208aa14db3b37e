"""Training pairs of the query classifiers: a query, and the share of its attention that each bucket holds (SAAP, section 4).

Queries, keys and the partition are frozen, so that the target of a query is a constant. The long-range queries of some prompts
are taken with their targets once and kept in files, one a prompt, each layer's rows on their own; a layer's training then holds
all its rows on the device that trains.
"""

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.state import PartialState
from rich.progress import track
from torch import Tensor

from msattn.kernels.bucket_mass import bucket_mass
from msattn.trainer import data, models
from msattn.trainer.config import QModelConfig, TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.saap.index import slot_of
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.parts import FinishedParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CANDIDATES = 8  # query positions looked at for each that is kept: about a fifth of the queries are long-range
FEWEST = 16  # queries of a head and prompt: where fewer are long-range, those that look farthest make up the number
ENTROPY_BYTES = 4  # a row, beside its fp16 query and target


def layer_pairs(
    x: LayerInputs, partition: KMeans, cfg: QModelConfig, positions: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The training pairs of one layer and prompt, at most ``cfg.queries_per_prompt`` a query head.

    Parameters
    ----------
    x : LayerInputs
        A whole prompt; the sink, position 0, is left out of the targets.
    positions : Tensor
        int32, ascending: the queries to choose from.
    generator : torch.Generator
        Draws among long-range queries; on the CPU, so that every machine draws the same.

    Returns
    -------
    dict
        ``queries`` fp16 [rows, D] and ``targets`` fp16 [rows, C], by query head; ``counts`` and ``long_range`` int64 [Hq]: a
        head's rows, and how many of them are long-range. On the CPU.
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
    far = usable & (distance > cfg.long_range) if cfg.long_range else usable
    draw = torch.rand(distance.shape, generator=generator).to(distance.device)
    rank = torch.where(far, 1 + draw, distance / x.num_keys).masked_fill(~usable, -1)
    rows = rank.topk(min(cfg.queries_per_prompt, len(positions)), dim=-1).indices  # [Hq, n]
    counts = far.sum(-1).clamp(min=FEWEST).minimum(usable.sum(-1)).clamp(max=rows.shape[1])
    head, place = (torch.arange(rows.shape[1], device=rows.device) < counts[:, None]).nonzero(as_tuple=True)
    row = rows[head, place]
    source = x.q if partition.rope else x.q_nope
    pairs = {
        "queries": source[0][head, positions[row].long()].half(),
        "targets": target.mass[0][head, row].half(),
        "counts": counts,
        "long_range": far.sum(-1).minimum(counts),
    }
    return {name: value.cpu() for name, value in pairs.items()}


def prompt_pairs(
    model: "PreTrainedModel", partition: KMeans, cfg: QModelConfig, input_ids: Tensor, seed: int
) -> dict[str, Tensor]:
    """The training pairs of one prompt ``input_ids [N]``: ``{layer}.{name}`` for each layer and name of :func:`layer_pairs`."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randperm(len(input_ids), generator=generator)[: CANDIDATES * cfg.queries_per_prompt]
    positions = candidates.sort().values.to(input_ids.device, torch.int32)
    found: dict[str, Tensor] = {}

    def attend(x: LayerInputs) -> Tensor:
        if x.layer in partition.layers:
            pairs = layer_pairs(x, partition, cfg, positions, generator)
            found.update({f"{x.layer}.{name}": value for name, value in pairs.items()})
        return dense_attention(x)

    with tap(model, attend), torch.no_grad():
        run_backbone(model, input_ids[None])
    return found


@dataclass(frozen=True)
class Pairs:
    """The pairs of some layers on one device; the rows of a classifier lie together.

    Attributes
    ----------
    queries : fp16 ``[rows, D]``.
    targets : fp16 ``[rows, C]``.
    entropy : fp32 ``[rows]``, of the targets, in nats.
    start, count : int64 ``[layers, H]``: the first row of each classifier, and how many it has (at least one).
    """

    queries: Tensor
    targets: Tensor
    entropy: Tensor
    start: Tensor
    count: Tensor


@dataclass(frozen=True)
class PairCache:
    """The training pairs of ``chunks`` in files.

    Parameters
    ----------
    parts : the files; both kinds share them.
    kind : ``train`` or ``heldout``.
    """

    parts: FinishedParts
    kind: str
    chunks: data.Chunks
    partition: KMeans
    cfg: TrainQModelConfig

    def name(self, prompt: int) -> str:
        return f"{self.kind}_{prompt:04d}"

    def fill(self, model: "PreTrainedModel", ranks: PartialState) -> None:
        """Compute what is missing; the prompts are shared out among ``ranks``. A file's note is the seconds it took.

        Raises
        ------
        UserError : the disk has no room for them.
        """
        missing = [i for i in range(len(self.chunks)) if not self.parts.path(self.name(i)).exists()]
        ranks.wait_for_everyone()  # all have seen the same before the first file is added
        self._announce(len(missing), model, ranks.is_main_process)
        mine = missing[ranks.process_index :: ranks.num_processes]
        began = time.perf_counter()
        for i in track(mine, description=f"{self.kind} targets", disable=not (mine and ranks.is_main_process)):
            seed = 1_000_003 * self.cfg.seed + 2 * i + (self.kind == "train")
            input_ids = self.chunks[i]["input_ids"].to(self.partition.centroids.device)
            pairs = prompt_pairs(model, self.partition, self.cfg.qmodel, input_ids, seed)
            now = time.perf_counter()
            self.parts.save(self.name(i), pairs, now - began)
            began = now  # the next one's seconds hold this one's writing
        ranks.wait_for_everyone()

    def _announce(self, prompts: int, model: "PreTrainedModel", speaks: bool) -> None:
        if not prompts:
            return
        cfg, folder = self.cfg.qmodel, self.parts.folder
        row = 2 * (models.head_dim(model.config) + self.partition.num_buckets)  # bytes, fp16
        size = prompts * len(self.partition.layers) * models.num_heads(model.config) * cfg.queries_per_prompt * row
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UserError(
                f"qmodel.num_prompts={cfg.num_prompts}: cached queries take up to {size / 1e9:.1f} GB in {folder}, "
                f"where {free / 1e9:.1f} GB are free; lower it or qmodel.queries_per_prompt"
            )
        if speaks:
            what = f"{self.kind} queries and targets of {prompts} prompts"
            print(f"{what}: at most {size / 1e9:.2f} GB in {folder}, kept for further runs", flush=True)

    def totals(self, name: str) -> Tensor:
        """The sum over prompts of ``counts`` or ``long_range``: int64 ``[layers, Hq]``."""
        files = [self.parts.load(self.name(i))[0] for i in range(len(self.chunks))]
        return torch.stack([torch.stack([file[f"{layer}.{name}"] for layer in self.partition.layers]) for file in files]).sum(0)

    def seconds(self) -> float:
        """What computing all files took, over all processes."""
        return sum(self.parts.load(self.name(i))[1] for i in range(len(self.chunks)))

    def long_range(self) -> float:
        """The share of long-range queries among all rows."""
        return float(self.totals("long_range").sum() / self.totals("counts").sum())

    def check(self) -> None:
        """UserError where some head has nothing to learn from."""
        cfg, where = self.cfg.qmodel, f"in {len(self.chunks)} prompts of {self.cfg.data.seq_len} tokens; lower it"
        if not self.totals("counts").all():
            raise UserError(f"qmodel.min_distance={cfg.min_distance}: a head has no query with keys so far away {where}")
        if not self.totals("long_range").any():
            raise UserError(f"qmodel.long_range={cfg.long_range}: no query looks that far back {where}")

    def layer_bytes(self) -> int:
        """What the rows of the largest layer take in memory."""
        row = 2 * (self.partition.centroids.shape[3] + self.partition.num_buckets) + ENTROPY_BYTES
        return int(self.totals("counts").sum(1).max()) * row

    def load(self, layers: list[int], num_heads: int, device: torch.device) -> Pairs:
        """The rows of ``layers``, read from their places in the files, for ``num_heads`` classifiers a layer."""
        slots = [slot_of(self.partition.layers, layer) for layer in layers]
        count = self.totals("counts")[slots].unflatten(1, (num_heads, -1)).sum(2)  # [layers, H]
        start = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
        rows, (_, _, num_buckets, head_dim) = int(count.sum()), self.partition.centroids.shape
        queries = torch.empty(rows, head_dim, dtype=torch.float16, device=device)
        targets = torch.empty(rows, num_buckets, dtype=torch.float16, device=device)
        entropy = torch.empty(rows, device=device)
        place = start.clone()
        for i in range(len(self.chunks)):
            tensors, _ = self.parts.load(self.name(i))
            for slot, layer in enumerate(layers):
                sizes = tensors[f"{layer}.counts"].unflatten(0, (num_heads, -1)).sum(1).tolist()
                split = zip(tensors[f"{layer}.queries"].split(sizes), tensors[f"{layer}.targets"].split(sizes), strict=True)
                for head, (some_queries, some_targets) in enumerate(split):
                    first = int(place[slot, head])
                    own = slice(first, first + sizes[head])
                    queries[own], targets[own] = some_queries, some_targets
                    mass = targets[own].float()
                    entropy[own] = -torch.xlogy(mass, mass).sum(-1)
                    place[slot, head] += sizes[head]
        return Pairs(queries, targets, entropy, start.to(device), count.to(device))

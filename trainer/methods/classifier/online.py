"""Training batches that are drawn during training: one prompt per batch, new queries each time
(SAAP, appendix A).

A round runs the frozen model over a few prompts, the next ones in rotation, and draws some batches
of long-range queries from each. Each batch is then used once, in random order. Only the batches are
kept: the targets of a layer are computed while the model runs, so that memory does not depend on
the prompt length. A round depends only on the seed and its number, so a resumed run repeats the
round in which it stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from msattn.trainer import data, models
from msattn.trainer.config import TrainQModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import hash32
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.targets import (
    CANDIDATES,
    TrainingBatches,
    key_buckets,
    layer_targets,
)
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.tap import visit_layers
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def numbered(numbers: list[int]) -> dict[str, list[int]]:
    """Returns the input of a forward pass from the numbers of its batches. They stay plain
    integers, because reading a tensor would synchronize with the device.
    """
    return {"batches": numbers}


@dataclass(frozen=True)
class OnlineTargets:
    """The frozen model and the prompts from which batches are drawn."""

    model: "PreTrainedModel"  # the model of the whole partition, on the device of its centroids
    chunks: data.Chunks  # prompts, visited in rotation
    partition: KMeans
    cfg: TrainQModelConfig
    # of qmodel, to lower if a layer does not fit into memory
    memory_keys: ClassVar = "steps_per_prompt", "prompts_at_once"

    def load_model(self) -> "PreTrainedModel":
        """Returns the model, which computes the targets."""
        return self.model

    def batches(self, layers: list[int], num_heads: int) -> TrainingBatches:
        """Returns the batches that train ``num_heads`` classifiers of each of ``layers`` together,
        in the order of rounds.
        """
        numbers = range(self.cfg.train.steps * self.cfg.train.batch_size)
        return TrainingBatches(
            OnlineBatches(self, layers, num_heads), numbers, numbered, shuffle=False
        )

    @property
    def batches_per_round(self) -> int:
        return self.cfg.qmodel.prompts_at_once * self.cfg.qmodel.steps_per_prompt

    def max_layer_bytes(self, num_heads: int) -> int:
        """Returns the memory that the batches of one layer and round take, in bytes, for
        ``num_heads`` classifiers.
        """
        row_bytes = 2 * (self.partition.centroids.shape[3] + self.partition.num_buckets)  # fp16
        return self.batches_per_round * num_heads * self.cfg.qmodel.batch_queries * row_bytes

    def pass_bytes(self) -> int:
        """Returns the memory that a pass of the model over one prompt takes, in bytes; the MLP
        takes the most.
        """
        config = models.text_config(self.model.config)
        inner = getattr(config, "intermediate_size", None) or config.moe_intermediate_size
        width = 4 * config.hidden_size + 3 * inner
        return self.cfg.data.seq_len * width * self.model.dtype.itemsize


class OnlineBatches:
    """Batches of ``layers`` by their number, for ``num_heads`` classifiers of a layer; holds those
    of one round.
    """

    def __init__(self, source: OnlineTargets, layers: list[int], num_heads: int) -> None:
        self.source, self.layers, self.num_heads = source, layers, num_heads
        self.round = -1
        cfg, (*_, num_buckets, head_dim) = source.cfg.qmodel, source.partition.centroids.shape
        rows = (len(layers), source.batches_per_round, num_heads, cfg.batch_queries)
        device = source.partition.centroids.device
        self.queries = torch.empty(*rows, head_dim, dtype=torch.float16, device=device)
        self.targets = torch.empty(*rows, num_buckets, dtype=torch.float16, device=device)

    def __call__(self, batches: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, targets and entropy, as ``Distiller`` takes them."""
        drawn = [self._batch(number) for number in batches]
        queries, targets = (torch.cat(values, dim=2) for values in zip(*drawn, strict=True))
        mass = targets.float()
        return queries, targets, -torch.xlogy(mass, mass).sum(-1)

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        size = self.source.batches_per_round
        round_number, position = divmod(number, size)
        if round_number != self.round:
            for prompt in range(self.source.cfg.qmodel.prompts_at_once):
                self._visit(round_number, prompt)
            self.round = round_number
        order = torch.randperm(size, generator=self._generator(round_number, size))
        slot = int(order[position])
        return self.queries[:, slot], self.targets[:, slot]

    def _visit(self, round_number: int, prompt: int) -> None:
        """Runs the model over a prompt of the round and draws its batches for every layer."""
        source, cfg = self.source, self.source.cfg.qmodel
        visit = round_number * cfg.prompts_at_once + prompt
        first_slot = prompt * cfg.steps_per_prompt
        device = source.partition.centroids.device
        input_ids = source.chunks[visit % len(source.chunks)]["input_ids"].to(device)
        group = models.num_heads(source.model.config) // self.num_heads
        candidates = CANDIDATES * -(-cfg.batch_queries // group)  # candidates per query head
        drawn = random_positions(len(input_ids), candidates, self._generator(visit))
        positions = [
            next(drawn).sort().values.to(device, torch.int32) for _ in range(cfg.steps_per_prompt)
        ]

        def record(x: LayerInputs) -> None:
            index, buckets = self.layers.index(x.layer), key_buckets(x, source.partition)
            generator = self._generator(visit, x.layer)
            for slot, chosen in enumerate(positions, first_slot):
                batch = layer_targets(
                    x, source.partition, buckets, cfg, chosen, generator, cfg.batch_queries
                )
                rows = self._rows(batch["counts"])
                self.queries[index, slot] = batch["queries"][rows]
                self.targets[index, slot] = batch["targets"][rows]

        with activity(f"drawing queries of prompt {visit}"):
            visit_layers(source.model, record, [{"input_ids": input_ids}], self.layers)

    def _rows(self, counts: Tensor) -> Tensor:
        """Returns the rows of each classifier's batch, int64 ``[H, n]``, of ``counts [Hq]`` rows of
        query heads.

        They are evenly spaced; as the rows of a query head are in random order, each is as likely
        as any other. A classifier with fewer rows than a batch takes some of them several times.
        Raises UserError: a classifier has no row.
        """
        cfg = self.source.cfg.qmodel
        count = counts.unflatten(0, (self.num_heads, -1)).sum(1)
        if not count.all():
            accepted = (
                f"some head has no query with keys that far away in a prompt of "
                f"{self.source.cfg.data.seq_len} tokens"
            )
            raise UserError(f"qmodel.min_distance={cfg.min_distance}: {accepted}; lower it")
        start = count.cumsum(0) - count
        sample = torch.arange(cfg.batch_queries, device=counts.device)
        return start[:, None] + sample * count[:, None] // cfg.batch_queries

    def _generator(self, *numbers: int) -> torch.Generator:
        """Returns a generator on the CPU that depends on the run's seed and ``numbers`` alone."""
        word: Any = self.source.cfg.seed
        for number in (len(numbers), *numbers):
            word = hash32(hash32(word) ^ number)
        return torch.Generator().manual_seed(word)


def random_positions(length: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields sets of ``size`` (at most ``length``) positions below ``length`` without end, disjoint
    as long as possible.
    """
    size = min(size, length)
    while True:
        yield from torch.randperm(length, generator=generator)[: length // size * size].split(size)

"""Queries and keys of a head in a plane (SAAP, figure 1): they lie apart, so that a partition of
keys suits queries badly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.methods.base import Method
from msattn.trainer.models.tap import LayerInputs

SAMPLE = 1000  # positions whose keys and queries are measured
DRAWN = 150  # keys, and as many queries, of a picture
STAGES = ("before RoPE", "after RoPE")
DIGITS = 3  # decimal places of stored coordinates


def principal_plane(keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, float]:
    """Returns the plane of the first two principal components of fp64 keys ``[n, D]`` and queries
    ``[m, D]`` together.

    That is its origin ``[D]``, its orthonormal axes ``[D, 2]``, which point to where the mean key
    has positive coordinates, and the share of the variance in the plane.
    """
    points = torch.cat([keys, queries])
    mean = points.mean(0)
    _, spread, directions = torch.linalg.svd(points - mean, full_matrices=False)
    axes = directions[:2].T
    axes = axes * torch.where((keys.mean(0) - mean) @ axes < 0, -1.0, 1.0)
    variance = spread.square()
    return mean, axes, (variance[:2].sum() / variance.sum().clamp(min=1e-300)).item()


@dataclass
class Planes:
    """Planes of the first chunk, for each layer and each of ``heads`` (key/value heads), before and
    after RoPE.

    The queries of a key/value head are those of all its query heads. Position 0, the attention
    sink, is left out of the sample and drawn as a point of its own.
    """

    heads: list[int]
    seed: int
    numbers: dict[str, dict[int, list[dict[str, float]]]] = field(
        default_factory=lambda: {stage: {} for stage in STAGES}
    )
    pictures: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {stage: [] for stage in STAGES}
    )

    @property
    def measured(self) -> set[int]:
        return set(self.numbers[STAGES[0]])

    def add(self, x: LayerInputs) -> None:
        """Measures one layer; the picture shows the first of ``heads``."""
        generator = torch.Generator().manual_seed(self.seed)
        chosen = 1 + torch.randperm(x.num_keys - 1, generator=generator)[:SAMPLE]
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), chosen]).to(x.k.device)
        group = x.q.shape[1] // x.k.shape[1]
        for stage, (q, k) in zip(STAGES, ((x.q_nope, x.k_nope), (x.q, x.k)), strict=True):
            self.numbers[stage][x.layer] = []
            for head in self.heads:
                keys = k[0, head, rows].double().cpu()
                # [group, rows, D]
                all_queries = q[0, head * group : (head + 1) * group, rows].double().cpu()
                member = torch.randint(group, (len(chosen),), generator=generator)
                # one of the group at each position
                queries = all_queries[member, 1 + torch.arange(len(chosen))]
                plane = principal_plane(keys[1:], queries)
                # -1: on opposite sides of 0
                cosine = F.cosine_similarity(keys[1:].mean(0), queries.mean(0), dim=0).item()
                # share of all pairs (figure 1, middle)
                negative = (queries @ keys[1:].T < 0).double().mean().item()
                numbers = {"cosine": cosine, "negative_products": negative, "explained": plane[2]}
                self.numbers[stage][x.layer].append(numbers)
                if head == self.heads[0]:
                    picture = _picture(
                        plane, keys[1:], queries, sinks=(keys[:1], all_queries[:, 0])
                    )
                    self.pictures[stage].append({"layer": x.layer, "head": head, **picture})

    def rows(self, length: int) -> Iterator[EvalRow]:
        """Yields one row before and one after RoPE; the score is the mean cosine of mean key and
        mean query.
        """
        for stage, by_layer in self.numbers.items():
            layers, numbers = sorted(by_layer), ("cosine", "negative_products", "explained")
            table = {
                name: [[head[name] for head in by_layer[layer]] for layer in layers]
                for name in numbers
            }
            score, negative, explained = (
                float(torch.tensor(values).mean()) for values in table.values()
            )
            extra = {
                "length": length,
                "negative_products": negative,
                "explained": explained,
                "layers": layers,
                "kv_heads": self.heads,
                "heads": table["cosine"],
                "negative_products_heads": table["negative_products"],
                "planes": self.pictures[stage],
            }
            method, name = Method("queries and keys"), "cosine of the means"
            yield EvalRow("analysis", method, Setting(stage), score, name, samples=1, extra=extra)


def _picture(
    plane: tuple[Tensor, Tensor, float], keys: Tensor, queries: Tensor, sinks: tuple[Tensor, Tensor]
) -> dict[str, list[list[float]]]:
    """Returns the coordinates in the ``plane`` of some keys and queries, of the attention sink and
    of the vector 0.
    """
    mean, axes, _ = plane
    parts = {
        "keys": keys[:DRAWN],
        "queries": queries[:DRAWN],
        "sink_keys": sinks[0],
        "sink_queries": sinks[1],
    }
    parts["origin"] = torch.zeros_like(keys[:1])
    return {
        name: [
            [round(value, DIGITS) for value in point] for point in ((points - mean) @ axes).tolist()
        ]
        for name, points in parts.items()
    }

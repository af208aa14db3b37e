"""Error of the attention output against the share of keys read (SAAP, figures 5 and 10).

Every decoding query reads the window, then far keys in stages: the exact top keys of each query
head, random keys, or the buckets that a router ranks highest for the query group. The stages of a
method are nested, so that one pass over the keys gives the outputs after all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from msattn.trainer.evaluate.compared import ComparedRouting
from msattn.trainer.evaluate.row import WINDOW, EvalRow, Setting
from msattn.trainer.evaluate.tasks.analysis.queries import SHARES, Queries, counts_of
from msattn.trainer.evaluate.tasks.recall import LayerRecall, MethodRecall
from msattn.trainer.methods.base import Method
from msattn.trainer.models.tap import LayerInputs

ORACLE = Method(
    "exact top keys", servable=False, style={"color": "#222222", "marker": "D", "linestyle": "--"}
)
RANDOM = Method("random keys", servable=False, style={"color": "#999999", "marker": "x"})


def rank(priority: Tensor) -> Tensor:
    """Returns the rank of each entry of ``priority [..., M]`` in its row, 0 for the largest:
    int64.
    """
    order = priority.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def stages_of_shares(priority: Tensor, far: Tensor) -> Tensor:
    """Returns the stage at which each key is read: int64 ``[H, n, M]``, ``len(SHARES) + 1`` for
    keys that no stage reads.

    Stage s reads the ``SHARES[s - 1]`` of the keys in ``far [n, M]`` with the highest
    ``priority [H, n, M]``; other keys are read at stage 0.
    """
    ranks = rank(priority.masked_fill(~far, -torch.inf))
    counts = counts_of(SHARES, far.sum(-1))
    stage = 1 + torch.searchsorted(
        counts.expand(len(ranks), -1, -1).contiguous(), ranks, right=True
    )
    return torch.where(far, stage, 0)


def stages_of_buckets(scores: Tensor, buckets: Tensor, probes: list[int], far: Tensor) -> Tensor:
    """Returns the stage at which each key is read: int64 ``[1, n, M]``, ``len(probes) + 1`` for
    keys that no stage reads.

    Stage s reads the keys in ``far [n, M]`` whose ``buckets [M]`` have the ``probes[s - 1]``
    highest ``scores [n, C]``; others are read at stage 0.
    """
    ranks = rank(scores)[:, buckets.long()]
    stage = 1 + torch.searchsorted(torch.tensor(probes, device=ranks.device), ranks, right=True)
    return torch.where(far, stage, 0)[None]


def read_in_stages(
    queries: Queries, v: Tensor, stage: Tensor, num_stages: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention over ``v [M, D]`` after each of ``num_stages`` stages, and over all keys
    as a last one.

    Only dense attention reads keys whose ``stage [group or 1, n, M]`` is ``num_stages`` or above.
    Returns the outputs ``[group, n, num_stages + 1, D]``, the share of the attention mass that is
    read, ``[group, n, num_stages + 1]``, and the share of the visible keys that is read,
    ``[group or 1, n, num_stages + 1]``.
    """
    logits = queries.logits.masked_fill(~queries.visible, -torch.inf)
    if queries.sinks is not None:
        logits = torch.cat(
            [logits, queries.sinks[:, None, None].expand(*logits.shape[:2], 1)], dim=-1
        )
    weights, of_sinks = logits.softmax(-1).tensor_split([len(v)], dim=-1)
    stage = stage.clamp(max=num_stages)
    empty = weights.new_zeros(num_stages + 1)
    mass = (
        empty.expand(*weights.shape[:2], -1)
        .clone()
        .scatter_add_(-1, stage.expand_as(weights), weights)
        .cumsum(-1)
    )
    mass = mass + of_sinks.sum(-1, keepdim=True)  # in the softmax of every stage
    seen = queries.visible.float().expand(stage.shape)
    keys = empty.expand(*stage.shape[:2], -1).clone().scatter_add_(-1, stage, seen).cumsum(-1)
    out = torch.stack(
        [torch.where(stage == s, weights, 0) @ v for s in range(num_stages + 1)], dim=-2
    ).cumsum(-2)
    return (
        out / mass[..., None].clamp(min=torch.finfo(mass.dtype).tiny),
        mass,
        keys / keys[..., -1:],
    )


@dataclass
class LayerReads:
    """Measures one layer of one chunk, query group by query group.

    ``routed`` are, of each routing, numbers of probes, the buckets of the keys ``[Hkv, M]`` and
    bucket scores ``[n, Hkv, C]``.
    """

    values: Tensor  # [Hkv, M, D]
    routed: dict[Method, tuple[list[int], Tensor, Tensor]]
    generator: torch.Generator
    settings: dict[Method, list[Setting]] = field(default_factory=dict)
    # by method and head
    parts: dict[Method, dict[int, list[tuple[Tensor, ...]]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, x: LayerInputs, routings: list[ComparedRouting], positions: Tensor, seed: int
    ) -> "LayerReads":
        """Assigns the keys to the buckets of each routing that covers the layer, and scores the
        buckets for all queries.
        """
        routed = {}
        for routing in routings:
            if x.layer in routing.router.layers:
                buckets = routing.router.buckets_of_keys(x)[0][0]
                scores = routing.router.scores_at(x, positions.to(x.q.device), routing.recent)
                # up to half of the buckets
                powers = max(1, routing.router.num_buckets.bit_length() - 1)
                routed[routing.method] = [2**i for i in range(powers)], buckets, scores
        return cls(x.v[0], routed, torch.Generator(x.q.device).manual_seed(seed + x.layer))

    def add(self, head: int, queries: Queries) -> None:
        values = self.values[head].float()
        for name, settings, stage in self._stages(head, queries):
            self.settings[name] = settings
            read = read_in_stages(queries, values, stage, len(settings) + 1)
            self.parts.setdefault(name, {}).setdefault(head, []).append(read)

    def recalls(self) -> Iterator[tuple[Method, Setting, LayerRecall]]:
        """Yields ``(method, setting, recall)``, the window first."""
        for number, (name, by_head) in enumerate(self.parts.items()):
            stages = _by_stage(list(by_head.values()))
            if not number:
                yield WINDOW, Setting("probes", 0), stages[0]
            for setting, recall in zip(self.settings[name], stages[1:], strict=True):
                yield name, setting, recall

    def _stages(
        self, head: int, queries: Queries
    ) -> Iterator[tuple[Method, list[Setting], Tensor]]:
        shares = [Setting(f"{share:.0%} of far keys") for share in SHARES]
        yield ORACLE, shares, stages_of_shares(queries.logits, queries.far)
        chance = torch.rand(
            1, *queries.far.shape, generator=self.generator, device=queries.far.device
        )
        yield RANDOM, shares, stages_of_shares(chance, queries.far)
        for name, (probes, buckets, scores) in self.routed.items():
            stage = stages_of_buckets(
                scores[queries.rows, head], buckets[head], probes, queries.far
            )
            yield name, [Setting("probes", count) for count in probes], stage


def _by_stage(heads: list[list[tuple[Tensor, ...]]]) -> list[LayerRecall]:
    """Returns the recall after each stage but dense attention, from the results of
    :func:`read_in_stages` by head and batch.
    """
    masses, errors, shares = [], [], []
    for parts in heads:
        out, mass, keys = (
            torch.cat(batches, dim=1).double().cpu() for batches in zip(*parts, strict=True)
        )
        dense = out[:, :, -1:]
        # [group, stages + 1]
        errors.append((out - dense).square().sum((1, 3)) / dense.square().sum((1, 3)))
        masses.append(mass.mean(1).clamp(max=1))
        shares.append(keys.mean((0, 1)))
    mass, error, share = torch.cat(masses), torch.cat(errors), torch.stack(shares).mean(0)
    return [LayerRecall(mass[:, s], error[:, s], share[s]) for s in range(len(share) - 1)]


def error_rows(recalls: dict[tuple[Method, Setting], MethodRecall], length: int) -> list[EvalRow]:
    """Returns a row for each method and setting, with the fields of ``eval=recall``; the score is
    the mass that is read.
    """
    rows = [recall.as_row(method, setting, length) for (method, setting), recall in recalls.items()]
    return [
        replace(row, task="analysis", extra=row.extra | {"missed_mass": 1 - row.score})
        for row in rows
    ]

"""How much of the attention mass lies in what is read, layer by layer and head by head, and how far the output moves.

Every method is shown the same queries, keys and values: those of the dense model, layer after layer. The mass that a query
reads is ``exp(lse_sparse - lse_dense)``, from the statistics of the operations that serve.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.bucket_mass import bucket_mass
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.intervals import mean_interval
from msattn.trainer.evaluate.methods import Blocks, Methods, Routing
from msattn.trainer.evaluate.perplexity import prefill
from msattn.trainer.evaluate.row import WINDOW, EvalRow
from msattn.trainer.models.tap import LayerInputs, tap
from msattn.trainer.saap.index import top_buckets
from msattn.trainer.seer.select import Selection, selected_attention, sparsity

if TYPE_CHECKING:
    from rich.progress import Progress

    from msattn.kernels.types import MaxPoolAttention, SparseAttention
    from msattn.trainer.models.loading import Loaded

QUERY_BATCH = 16  # decoding queries at once: bounds the gathered keys


class Reading(NamedTuple):
    """What one method in one setting read in one layer: mass ``[Hq]``, relative output error ``[Hq]``, share of keys."""

    recall: Tensor
    error: Tensor
    share: Tensor


@dataclass
class Tally:
    """The readings of one method in one setting: ``readings[layer]`` holds one a chunk."""

    routed: bool
    readings: dict[int, list[Reading]] = field(default_factory=lambda: defaultdict(list))

    def row(self, method: str, setting: str) -> EvalRow:
        """Means over layers, heads and chunks; the heads' own figures in ``extra``."""
        layers = sorted(self.readings)
        recall = torch.stack([torch.stack([reading.recall for reading in self.readings[layer]]) for layer in layers]).cpu()
        error = torch.stack([torch.stack([reading.error for reading in self.readings[layer]]) for layer in layers]).cpu()
        share = torch.stack([reading.share for layer in layers for reading in self.readings[layer]]).mean().item()
        spread = mean_interval(recall.double().mean((0, 2)).tolist())
        return EvalRow(
            task="recall",
            method=method,
            setting=setting,
            score=recall.mean().item(),
            score_name="attention mass read",
            interval=spread and (max(0.0, spread[0]), min(1.0, spread[1])),
            ratio_to_dense=recall.mean().item(),
            sparsity=None if self.routed else 1 - share,
            selectivity=share,
            recall=recall.mean().item(),
            samples=recall.shape[1],
            extra={
                "reads": "buckets" if self.routed else "blocks",
                "output_error": error.mean().item(),
                "layers": layers,
                "heads": recall.mean(1).tolist(),
                "output_error_heads": error.mean(1).tolist(),
            },
        )


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: Methods, progress: "Progress") -> list[EvalRow]:
    """A row for each block selection at each sparsity, and for each routing (and the oracle's) with each number of probes."""
    settings = cfg.eval.recall
    chunks = data.chunks(
        cfg.data,
        loaded.tokenizer,
        seed=cfg.seed,
        heldout=True,
        seq_len=settings.length,
        num_chunks=settings.num_chunks,
    )
    tallies: dict[tuple[str, str], Tally] = {}
    advance = partial(progress.advance, progress.add_task("recall", total=len(chunks) * loaded.model.config.num_hidden_layers))

    def attend(x: LayerInputs) -> Tensor:
        dense = maxpool_attention(x.q, x.k, x.v, scale=x.scale, kv_start=x.kv_start)
        for method in methods.blocks:
            for label, reading in read_blocks(x, dense, method, settings.sparsities).items():
                tallies.setdefault((method.name, label), Tally(False)).readings[x.layer].append(reading)
        for number, routing in enumerate(methods.routing):
            for (name, label), reading in read_buckets(x, dense, routing, cfg, first=number == 0).items():
                tallies.setdefault((name, label), Tally(True)).readings[x.layer].append(reading)
        advance()
        return dense.out

    for i in range(len(chunks)):
        with torch.inference_mode(), tap(loaded.model, attend):
            prefill(loaded, chunks[i]["input_ids"])
    return [tally.row(method, label) for (method, label), tally in sorted(tallies.items(), key=lambda item: item[1].routed)]


def compare(sparse: "SparseAttention", out: Tensor, lse: Tensor, share: Tensor) -> Reading:
    """Sparse against dense ``out [B, H, N, D]`` and ``lse [B, H, N]``, over batch and queries."""
    mass = (sparse.lse - lse).exp().mean((0, 2))
    moved, size = (sparse.out.float() - out.float()).square(), out.float().square()
    return Reading(mass.clamp(max=1), moved.sum((0, 2, 3)) / size.sum((0, 2, 3)), share)


def read_blocks(x: LayerInputs, dense: "MaxPoolAttention", method: Blocks, sparsities: list[float]) -> dict[str, Reading]:
    """``{setting: reading}`` of one block selection; its scores are computed once for all sparsities."""
    selections = {label: Selection.from_config(select, method.gate) for label, select in method.settings(sparsities)}
    scores, readings = None, {}
    for label, selection in selections.items():
        scores = selection.scorer(x) if scores is None else scores
        chosen, size = selection.choose(scores, x), selection.block_size
        sparse = selected_attention(x, chosen, size)
        readings[label] = compare(sparse, dense.out, dense.lse, 1 - sparsity(chosen, selection.candidates(x)))
    return readings


def read_buckets(
    x: LayerInputs, dense: "MaxPoolAttention", method: Routing, cfg: EvalRunConfig, first: bool
) -> dict[tuple[str, str], Reading]:
    """``{(method, setting): reading}`` of one router over a chunk's decoding queries.

    The ``first`` router brings along what hangs on none: the best possible routing over its buckets, and the window alone.
    The queries stand evenly over the positions whose context is longer than the dense window. A query group shares its probes;
    with ``independent`` there are also rows in which each query head has its own, as if the group's keys were its alone.
    """
    if x.layer in method.dense_layers or x.layer not in method.router.layers:
        return {}
    begin = method.recent + method.sink
    count = min(cfg.eval.recall.num_queries, x.num_keys - begin)
    positions = torch.linspace(begin, x.num_keys - 1, count, device=x.q.device).round().int()
    buckets = method.router.assign(x.layer, x.k_nope, x.k)
    q, q_nope = (queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q, x.q_nope))  # [n, Hq, 1, D]
    views = {"": (x, buckets, method.router.scores(x.layer, q_nope, q))}
    if cfg.eval.recall.independent:
        group = x.q.shape[1] // x.k.shape[1]
        k, v, own_buckets = (each.repeat_interleave(group, 1) for each in (x.k, x.v, buckets))
        views[", independent"] = (replace(x, k=k, v=v), own_buckets, method.router.head_scores(x.layer, q_nope, q))
    readings = {}
    for suffix, (view, held, worth) in views.items():
        scores = {method.name: worth}
        if first:
            scores["oracle routing"] = true_mass(view, dense.lse, method, held, positions)
        for name, ranked in scores.items():
            for label, probes in method.settings(cfg.eval.recall.probes):
                if probes or (first and not suffix):
                    visited = top_buckets(ranked, probes)
                    key = (name + suffix if probes else WINDOW, label)
                    readings[key] = decode_at(view, dense, method, held, positions, visited)
    return readings


def true_mass(x: LayerInputs, dense_lse: Tensor, method: Routing, buckets: Tensor, positions: Tensor) -> Tensor:
    """Attention mass in each bucket outside the dense window, summed over the query group: fp32 ``[n, Hkv, C]``."""
    keys = torch.arange(x.num_keys, dtype=torch.int32, device=x.q.device)
    far = bucket_mass(
        x.q[:, :, positions],
        x.k,
        buckets.masked_fill(keys < method.sink, -1),
        num_buckets=method.router.num_buckets,
        causal=True,
        scale=x.scale,
        min_distance=method.recent - 1,
        q_pos=positions,
        k_pos=keys,
    )
    mass = far.mass[0] * (far.lse[0] - dense_lse[0, :, positions]).exp()[..., None]  # [Hq, n, C]
    return mass.unflatten(0, (x.k.shape[1], -1)).sum(1).transpose(0, 1)


def decode_at(
    x: LayerInputs, dense: "MaxPoolAttention", method: Routing, buckets: Tensor, positions: Tensor, probes: Tensor
) -> Reading:
    """Decode the queries at ``positions [n]``, each as if it were the newest, over the window and ``probes [n, Hkv, L]``."""
    index = build_bucket_index(buckets, method.router.num_buckets)
    outs, lses, shares = [], [], []
    for position, probe in zip(positions.split(QUERY_BATCH), probes.split(QUERY_BATCH), strict=True):
        batch = len(position)
        sparse = bucket_decode(
            x.q[0, :, position].transpose(0, 1)[:, :, None],
            x.k.expand(batch, -1, -1, -1),
            x.v.expand(batch, -1, -1, -1),
            type(index)(*(part.expand(batch, -1, -1).contiguous() for part in index)),
            probe,
            recent=method.recent,
            sink=method.sink,
            scale=x.scale,
            kv_len=position + 1,
        )
        outs.append(sparse.out[:, :, 0])
        lses.append(sparse.lse[:, :, 0])
        shares.append(share_read(buckets, position, probe, method))
    stacked = type(sparse)(torch.cat(outs).transpose(0, 1)[None], torch.cat(lses).T[None])  # [1, Hq, n, ...]
    return compare(stacked, dense.out[:, :, positions], dense.lse[:, :, positions], torch.cat(shares).mean())


def share_read(buckets: Tensor, positions: Tensor, probes: Tensor, method: Routing) -> Tensor:
    """Share of its visible keys that each query's group reads: fp32 ``[n, Hkv]``."""
    batch, kv_heads, _ = probes.shape
    visited = torch.zeros(batch, kv_heads, method.router.num_buckets, dtype=torch.bool, device=probes.device)
    visited.scatter_(2, probes.long(), True)
    read = visited.gather(2, buckets.long().expand(batch, -1, -1))  # [n, Hkv, M]
    keys, newest = torch.arange(buckets.shape[2], device=buckets.device), positions[:, None, None]
    read |= (keys < method.sink) | (keys > newest - method.recent)
    return ((keys <= newest) & read).sum(-1) / (positions[:, None] + 1)

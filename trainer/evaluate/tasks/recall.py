"""Recall of attention mass and error of the attention output, for each layer and head.

Every method gets the same queries, keys and values, those of the dense model in each layer. The
mass that a query reads is ``exp(lse_sparse - lse_dense)``, from the log-sum-exp that the sparse
kernels of ``attach`` return.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.bucket_mass import bucket_mass
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.types import MaxPoolAttention, SparseAttention
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.chunking import Chunks
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, ComparedRouting, ComparedSelection
from msattn.trainer.evaluate.intervals import mean_interval, within
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import ERROR, SHARE, Task
from msattn.trainer.evaluate.tasks.perplexity import heldout_chunks
from msattn.trainer.evaluate.tasks.reads import collect, keys_read
from msattn.trainer.methods.base import INDEPENDENT, Method
from msattn.trainer.methods.blocks import sparsity
from msattn.trainer.methods.buckets import bucket_sizes
from msattn.trainer.models.families import served_layers
from msattn.trainer.models.layer_attention import (
    attention_recall,
    block_map,
    selected_attention,
    with_sinks,
)
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import LayerInputs, run_tapped

QUERY_BATCH = 16  # decoding queries per call; bounds the memory of gathered keys

ORACLE_ROUTING = Method(
    "oracle routing", servable=False, style={"color": "#808080", "marker": "D", "linestyle": "--"}
)


class LayerRecall(NamedTuple):
    """Recall of one method in one layer and chunk: mass ``[Hq]``, relative output error ``[Hq]``,
    share of keys read.
    """

    recall: Tensor
    error: Tensor
    share: Tensor


@dataclass
class MethodRecall:
    """Recall of one method in one setting; ``by_layer[layer]`` holds one entry for each chunk."""

    routed: bool
    by_layer: dict[int, list[LayerRecall]] = field(default_factory=lambda: defaultdict(list))

    def as_row(self, method: Method, setting: Setting, length: int) -> EvalRow:
        """Returns the means over layers, heads and chunks of ``length`` tokens; ``extra`` holds the
        values of each head.
        """
        layers = sorted(self.by_layer)
        of_layers = [
            [torch.stack(parts).cpu() for parts in zip(*self.by_layer[layer], strict=True)]
            for layer in layers
        ]
        # [layers, chunks, Hq]
        recall, error, shares = (torch.stack(parts) for parts in zip(*of_layers, strict=True))
        share = shares.mean().item()
        spread = mean_interval(recall.double().mean((0, 2)).tolist())
        mean, interval = recall.mean().item(), within(spread)
        extra = {
            "length": length,
            "reads": "buckets" if self.routed else "blocks",
            "output_error": error.mean().item(),
            "layers": layers,
            "heads": recall.mean(1).tolist(),
            "output_error_heads": error.mean(1).tolist(),
        }
        return EvalRow(
            "recall", method, setting, mean, "attention mass read", interval=interval,
            ratio_to_dense=mean,
            sparsity=None if self.routed else 1 - share, selectivity=share, recall=mean,
            samples=recall.shape[1], extra=extra,
        )  # fmt: skip


def run(job: Job) -> list[EvalRow]:
    """Returns rows of each block selection at each sparsity, and of each routing and the oracle in
    each setting.

    The last row of one block selection and of one routing carries the data of the report's
    pictures.
    """
    loaded, cfg, methods, settings = job.loaded, job.cfg, job.compared, job.cfg.eval.recall
    chunks = job.prepared["recall"]
    routings = methods.with_independent(settings.independent).bucket_routings
    recalls: dict[tuple[Method, Setting], MethodRecall] = {}
    advance = job.bar("recall", len(chunks) * len(served_layers(loaded.model.config)))

    def measured_dense_attention(x: LayerInputs) -> Tensor:
        dense = block_map(x)
        for method in methods.block_selections:
            for label, recall in block_recalls(x, dense, method, settings.sparsities).items():
                recalls.setdefault((method.method, label), MethodRecall(False)).by_layer[
                    x.layer
                ].append(recall)
        for routing in routings:
            first = routing.router is routings[0].router
            for (name, label), recall in bucket_recalls(x, dense, routing, cfg, first).items():
                recalls.setdefault((name, label), MethodRecall(True)).by_layer[x.layer].append(
                    recall
                )
        advance()
        return dense.out

    with torch.inference_mode():
        run_tapped(loaded.model, measured_dense_attention, (chunks[i] for i in range(len(chunks))))
    blocks_first = sorted(recalls.items(), key=lambda item: item[1].routed)
    rows = [
        recall.as_row(method, label, settings.length) for (method, label), recall in blocks_first
    ]
    for method, pictures in collect(loaded, chunks[0], methods, cfg).items():
        own = [i for i, row in enumerate(rows) if row.method == method]
        if own:  # with 0 probes only, there is just the row of the window
            rows[own[-1]] = replace(rows[own[-1]], extra=rows[own[-1]].extra | pictures)
    return rows


def check_sizes(cfg: EvalRunConfig, model: Described | Loaded, methods: Compared) -> None:
    """Raises UserError for chunks that the window covers, or a window that is shorter than a block
    of a routing.
    """
    length = cfg.eval.recall.length
    for routing in methods.bucket_routings:
        exact = routing.recent + routing.sink
        if length <= exact:
            raise UserError(
                f"eval.recall.length={length}: expected more than recent + sink = {exact} tokens"
            )
        least = routing.router.block_size - 1
        if routing.recent < least:
            # The block of the first key before the window would have keys after the query in its
            # summary.
            raise UserError(
                f"recent={routing.recent}: recall with {routing.method} accepts {least} or more "
                f"tokens"
            )


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> Chunks:
    """Returns the chunks; raises UserError if there is too little held-out text."""
    return heldout_chunks(cfg, model.tokenizer, cfg.eval.recall.length, cfg.eval.recall.num_chunks)


def compare(sparse: SparseAttention, out: Tensor, lse: Tensor, share: Tensor) -> LayerRecall:
    """Compares sparse attention with dense ``out [B, H, N, D]`` and ``lse [B, H, N]``, over batch
    and queries.
    """
    difference, size = (sparse.out.float() - out.float()).square(), out.float().square()
    return LayerRecall(
        attention_recall(sparse.lse, lse), difference.sum((0, 2, 3)) / size.sum((0, 2, 3)), share
    )


def block_recalls(
    x: LayerInputs, dense: MaxPoolAttention, method: ComparedSelection, sparsities: list[float]
) -> dict[Setting, LayerRecall]:
    """Returns ``{setting: recall}`` of one block selection; its scores are computed once for all
    sparsities.
    """
    selections = {label: method.selection(select) for label, select in method.settings(sparsities)}
    scores, recalls = None, {}
    for label, selection in selections.items():
        scores = selection.scorer(x) if scores is None else scores
        chosen = selection.choose(scores, x)
        sparse = selected_attention(x, chosen, selection.sizes)
        recalls[label] = compare(
            sparse, dense.out, dense.lse, 1 - sparsity(chosen, selection.candidates(x))
        )
    return recalls


def bucket_recalls(
    x: LayerInputs,
    dense: MaxPoolAttention,
    routing: ComparedRouting,
    cfg: EvalRunConfig,
    first: bool,
) -> dict[tuple[Method, Setting], LayerRecall]:
    """Returns ``{(method, setting): recall}`` of one routing over the decoding queries of a chunk.

    The ``first`` router also gives the entries that need no router: oracle routing over its
    buckets, the dense window alone. Queries are spaced evenly over the positions whose context is
    longer than the dense window.
    """
    if x.layer in routing.dense_layers or x.layer not in routing.router.layers:
        return {}
    settings, begin = cfg.eval.recall, routing.recent + routing.sink
    count = min(settings.num_queries, x.num_keys - begin)
    positions = torch.linspace(begin, x.num_keys - 1, count, device=x.q.device).round().int()
    buckets, num_buckets = routing.router.buckets_of_keys(x)
    scores = routing.router.scores_at(x, positions, routing.recent, by_head=routing.independent)
    if routing.independent:  # every query head has key/value heads of its own
        k, v, buckets = (
            tensor.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
            for tensor in (x.k, x.v, buckets)
        )
        x = replace(x, k=k, v=v)
    sizes = bucket_sizes(buckets[0], positions, num_buckets)

    def recall(scores: Tensor, setting: int | float) -> LayerRecall:
        visited = routing.buckets(scores, setting, sizes)
        return decode_queries(x, dense, routing, buckets, num_buckets, positions, visited)

    recalls = {
        (routing.method_at(setting), label): recall(scores, setting)
        for label, setting in routing.settings(
            settings.probes, [] if routing.independent else settings.keys
        )
        if setting or (first and not routing.independent)
    }
    if first:
        mass = bucket_attention_mass(x, dense.lse, routing, buckets, num_buckets, positions)
        best = routing.router.only_far(mass, positions + 1 - routing.recent)
        oracle = ORACLE_ROUTING.of(INDEPENDENT) if routing.independent else ORACLE_ROUTING
        recalls |= {
            (oracle, label): recall(best, probes)
            for label, probes in routing.settings(settings.probes)
            if probes
        }
    return recalls


def bucket_attention_mass(
    x: LayerInputs,
    dense_lse: Tensor,
    method: ComparedRouting,
    buckets: Tensor,
    num_buckets: int,
    positions: Tensor,
) -> Tensor:
    """Returns the attention mass of each bucket outside the dense window, summed over the query
    group: fp32 ``[n, Hkv, C]``.
    """
    keys = torch.arange(x.num_keys, dtype=torch.int32, device=x.q.device)
    far = bucket_mass(
        x.q[:, :, positions],
        x.k,
        buckets.masked_fill(keys < method.sink, -1),
        num_buckets=num_buckets,
        causal=True,
        scale=x.scale,
        softcap=x.scoring.softcap,
        min_distance=method.recent - 1,
        q_pos=positions,
        k_pos=keys,
    )
    mass = far.mass[0] * (far.lse[0] - dense_lse[0, :, positions]).exp()[..., None]  # [Hq, n, C]
    return mass.unflatten(0, (x.k.shape[1], -1)).sum(1).transpose(0, 1)


def decode_queries(
    x: LayerInputs,
    dense: MaxPoolAttention,
    method: ComparedRouting,
    buckets: Tensor,
    num_buckets: int,
    positions: Tensor,
    probes: Tensor,
) -> LayerRecall:
    """Decodes the queries at ``positions [n]``, each as the newest token, over the dense window and
    ``probes [n, Hkv, L]``.
    """
    index = build_bucket_index(buckets, num_buckets)
    outs, lses, shares = [], [], []
    for position, probe in zip(
        positions.split(QUERY_BATCH), probes.split(QUERY_BATCH), strict=True
    ):
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
            softcap=x.scoring.softcap,
            kv_len=position + 1,
        )
        sparse = with_sinks(x, sparse)
        outs.append(sparse.out[:, :, 0])
        lses.append(sparse.lse[:, :, 0])
        shares.append(keys_read(buckets, position, probe, method).sum(-1) / (position[:, None] + 1))
    # [1, Hq, n, ...]
    stacked = type(sparse)(torch.cat(outs).transpose(0, 1)[None], torch.cat(lses).T[None])
    return compare(
        stacked, dense.out[:, :, positions], dense.lse[:, :, positions], torch.cat(shares).mean()
    )


TASK = Task(
    heading="Attention mass read",
    unit="chunks",
    columns={"mass read": SHARE, "95 % interval": ("interval", "{:.1%}"), **ERROR},
    text="heldout",
    samples=lambda section: section.num_chunks,
    hidden=("recall",),
)

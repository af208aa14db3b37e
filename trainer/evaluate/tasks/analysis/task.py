"""The task ``analysis``: four measurements on held-out text, layer by layer.

- :mod:`~msattn.trainer.evaluate.tasks.analysis.planes`: queries and keys in a plane (SAAP, arXiv
  2502.08246, figure 1);
- :mod:`~msattn.trainer.evaluate.tasks.analysis.bucket_sizes`: bucket sizes over prompts and
  positions (figure 2);
- :mod:`~msattn.trainer.evaluate.tasks.analysis.top_mass`: attention mass in the top keys, by head
  (figure 3);
- :mod:`~msattn.trainer.evaluate.tasks.analysis.selectivity`: error against the share of keys read
  (figures 5 and 10).
"""

from collections import defaultdict
from functools import partial
from typing import Any

from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.chunking import Chunks
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, ComparedRouting
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import ERROR, NAME, Task
from msattn.trainer.evaluate.tasks.analysis import partitions
from msattn.trainer.evaluate.tasks.analysis.bucket_sizes import SampledBuckets
from msattn.trainer.evaluate.tasks.analysis.planes import Planes
from msattn.trainer.evaluate.tasks.analysis.queries import query_batches, query_positions
from msattn.trainer.evaluate.tasks.analysis.selectivity import LayerReads, error_rows
from msattn.trainer.evaluate.tasks.analysis.top_mass import TopMass
from msattn.trainer.evaluate.tasks.perplexity import heldout_chunks
from msattn.trainer.evaluate.tasks.recall import MethodRecall
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.gate.maps import evenly_spaced
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import LayerInputs, visit_layers

NUM_LAYERS = 4  # by default, evenly spaced from the first to the last


def run(job: Job) -> list[EvalRow]:
    """Returns the rows of all measurements. Partitions of a kind without an artifact are fitted on
    training text.
    """
    loaded, cfg, settings, config = (
        job.loaded,
        job.cfg,
        job.cfg.eval.analysis,
        job.loaded.model.config,
    )
    methods = partitions.with_k_means(job.compared)
    layers = chosen_layers(settings.layers, models.served_layers(config))
    heads = sorted(set(settings.heads or range(models.num_kv_heads(config))))
    keys = partitions.training_keys(job, methods, layers)
    routings = partitions.routings(job, methods, keys)
    sizes = training_sizes(routings, keys, layers, heads, cfg.seed)
    del keys
    chunks = job.prepared["analysis"]
    window = partitions.window_of(cfg, methods)
    positions = query_positions(settings.length, window, settings.num_queries)
    planes, mass = Planes(heads, cfg.seed), TopMass(cfg.select.sizes.queries, heads)
    errors: dict[tuple[Method, Setting], MethodRecall] = defaultdict(
        partial(MethodRecall, routed=True)
    )
    advance = job.bar("analysis", len(chunks) * len(layers) * len(heads))

    def measure(x: LayerInputs) -> None:
        if x.layer not in planes.measured:
            planes.add(x)
        for routing, of_partition in sizes:
            if x.layer in routing.router.layers:
                of_partition.heldout[x.layer].append(
                    routing.router.buckets_of_keys(x)[0][0, heads, 1:].cpu()
                )
        reads = LayerReads.of(x, routings, positions, cfg.seed)
        for head in heads:
            for queries in query_batches(x, head, positions, window):
                mass.add_queries(x, head, queries)
                reads.add(head, queries)
            mass.add_blocks(x, head)
            advance()
        for method, setting, recall in reads.recalls():
            errors[method, setting].by_layer[x.layer].append(recall)

    visit_layers(loaded.model, measure, (chunks[i] for i in range(len(chunks))), layers)
    length, by_size = (
        settings.length,
        [row for _, of_partition in sizes for row in of_partition.rows(settings.length)],
    )
    return [
        *planes.rows(length),
        *by_size,
        *mass.rows(length, len(chunks)),
        *error_rows(errors, length),
    ]


def check_sizes(cfg: EvalRunConfig, model: Described | Loaded, methods: Compared) -> None:
    """Raises UserError for layers and heads that the model does not have, and for chunks that the
    window covers.
    """
    partitions.check_model_has(cfg, model.config)
    window = partitions.window_of(cfg, partitions.with_k_means(methods))
    length = cfg.eval.analysis.length
    if length <= window.size:
        raise UserError(
            f"eval.analysis.length={length}: expected more than recent + sink = {window.size} "
            f"tokens"
        )


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> Chunks:
    """Returns the chunks; raises UserError if there is too little held-out text."""
    return heldout_chunks(
        cfg, model.tokenizer, cfg.eval.analysis.length, cfg.eval.analysis.num_chunks
    )


def chosen_layers(given: list[int] | None, served: list[int]) -> list[int]:
    """Returns the layers to measure of a model in which those in ``served`` may be sparse, in
    order.
    """
    return (
        [served[i] for i in evenly_spaced(len(served), NUM_LAYERS)]
        if given is None
        else sorted(set(given))
    )


def training_sizes(
    routings: list[ComparedRouting],
    keys: partitions.TrainingKeys,
    layers: list[int],
    heads: list[int],
    seed: int,
) -> list[tuple[ComparedRouting, SampledBuckets]]:
    """Assigns the training keys of each layer to the buckets of the first k-means before RoPE and
    of the first after RoPE.
    """
    assigned = []
    for routing in partitions.k_means(routings).values():
        router: Any = routing.router
        sizes = SampledBuckets(routing.method, router.num_buckets, seed)
        for layer in (layer for layer in layers if layer in router.layers):
            before, after = (
                by_layer[layer][None].to(router.centroids.device)
                for by_layer in (keys.before, keys.after)
            )
            sizes.training[layer] = router.assign(layer, before, after)[0, heads].cpu()
        if sizes.training:
            assigned.append((routing, sizes))
    return assigned


TASK = Task(
    heading="Queries, keys and attention mass",
    unit="chunks",
    columns={
        "measure": NAME,
        "value": ("score", "{:.3f}"),
        **ERROR,
        "imbalance": ("imbalance", "{:.2f}"),
    },
    reads=("routings",),
    text="heldout",
    form="{:.3f}",
    hidden=("recall",),
)

"""SAAP's analysis of queries and keys (arXiv 2502.08246, figures 1 to 3, appendix B) that
``eval=analysis`` leaves out; docs/papers.md lists them.

``python docs/experiments/saap_analysis.py OVERRIDES`` takes the overrides of ``msattn eval``:
prompts, queries, layers and heads are those of ``eval.analysis``; the partition is that of the
k-means artifact. Prints CSV with the mean over prompts, one line for each layer, key/value head and
measure:

- ``product``: scaled products of queries with the first key, the last keys, and random keys (figure
  1, middle), and the share of negative products with random keys; before RoPE, like the partition;
- ``assigned``: largest share of the keys and of the queries in a bucket, and their total variation
  (figure 1, right);
- ``deviation``: how a prompt's bucket sizes deviate from those of all prompts, in mean sizes, for
  keys and queries (figure 2);
- ``top_256``: attention mass of the far keys in the 256 heaviest (figure 3);
- ``error``: squared error of the output relative to its square, and the share of the keys ``read``,
  if a query reads the window and one of 4 to 64 bins of the keys in the order of KDEformer's and
  Reformer's hashes (figure 5).
"""

from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import data, models
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError, run_program
from msattn.trainer.evaluate import compared
from msattn.trainer.evaluate.tasks.analysis import partitions
from msattn.trainer.evaluate.tasks.analysis.bucket_sizes import bucket_counts, deviation
from msattn.trainer.evaluate.tasks.analysis.queries import (
    Queries,
    Window,
    query_batches,
    query_positions,
)
from msattn.trainer.evaluate.tasks.analysis.selectivity import read_in_stages
from msattn.trainer.evaluate.tasks.analysis.task import chosen_layers
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.tap import LayerInputs, visit_layers

BINS = (4, 16, 64)
BITS = 16  # bits of a hash: KDEformer's buckets are sparse
TOP, LATEST, DRAWN = 256, 64, 4096  # keys


def kdeformer_order(x: Tensor, directions: Tensor) -> Tensor:
    """Returns the place of the signs of ``x [..., D]`` among Gray codes, int64 ``[...]``, of
    ``directions [D, BITS]``.
    """
    signs = (x @ directions > 0).long()
    # the number whose Gray code is given by the signs, highest bit first
    bits = signs.cumsum(-1) % 2
    return (bits << torch.arange(bits.shape[-1] - 1, -1, -1, device=x.device)).sum(-1)


def reformer_order(x: Tensor, directions: Tensor) -> Tensor:
    """Returns which direction, or opposite direction, has the largest product with ``x [..., D]``:
    int64 ``[...]``.
    """
    products = x @ directions
    return torch.cat([products, -products], -1).argmax(-1)


ORDERS = {"kdeformer": kdeformer_order, "reformer": reformer_order}


def bin_stages(keys: Tensor, queries: Tensor, bins: int, far: Tensor) -> Tensor:
    """Returns the stage at which each key is read, int64 ``[group, n, M]``: 0 in the window, 1 in
    the bin of the query, else 2.

    Keys are sorted by their order ``[M]`` and cut into bins of equal size; a query of order
    ``[group, n]`` is in one of them.
    """
    ordered, order = keys.sort(stable=True)
    bin_of_key = torch.empty_like(order)
    bin_of_key[order] = torch.arange(len(keys), device=keys.device) * bins // len(keys)
    place = torch.searchsorted(ordered, queries).clamp(max=len(keys) - 1)
    outside = bin_of_key != (place * bins // len(keys))[..., None]
    return torch.where(far, 1 + outside.long(), 0)


class Measures:
    """Sums of the measures of each layer and head over prompts."""

    def __init__(
        self, partition: KMeans, positions: Tensor, window: Window, heads: list[int], seed: int
    ) -> None:
        self.partition = partition
        self.positions = positions
        self.window = window
        self.heads = heads
        self.generator = torch.Generator().manual_seed(seed)
        self.found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        self.counts: dict[tuple[int, int, str], list[Tensor]] = defaultdict(list)

    def add(self, x: LayerInputs) -> None:
        """Adds a layer of a prompt."""
        directions = torch.randn(x.k.shape[-1], BITS, generator=self.generator).to(x.k.device)
        group, (keys, queries) = (
            x.q.shape[1] // x.k.shape[1],
            ((x.k, x.q) if self.partition.rope else (x.k_nope, x.q_nope)),
        )
        of_keys = self.partition.assign(x.layer, x.k_nope, x.k)[0]
        for head in self.heads:
            own = queries[0, head * group : (head + 1) * group].float()
            centroids = self.partition.centroids[self.partition.layers.index(x.layer), head]
            assigned = {
                "keys": of_keys[head, 1:],
                "queries": (own @ centroids.T).argmax(-1).flatten(),
            }
            for name, buckets in assigned.items():
                self.counts[x.layer, head, name].append(
                    bucket_counts(buckets[None].cpu(), len(centroids))[0]
                )
            self._add_products(x.layer, head, own, keys[0, head].float(), x.scale)
            for batch in query_batches(x, head, self.positions, self.window):
                self._add_attention(x, head, batch, directions)

    def _add_products(self, layer: int, head: int, q: Tensor, k: Tensor, scale: float) -> None:
        asked = q[:, self.positions.to(q.device)].flatten(0, 1) * scale
        drawn = 1 + torch.randint(len(k) - 1, (DRAWN,), generator=self.generator).to(k.device)
        random = asked @ k[drawn].T
        latest = torch.stack(
            [k[p - LATEST + 1 : p + 1].mean(0) for p in self.positions.tolist()]
        ).repeat(len(q), 1)
        values = {
            "first": asked @ k[0],
            "latest": (asked * latest).sum(-1),
            "random": random,
            "negative": (random < 0).float(),
        }
        for name, value in values.items():
            self.found[layer, head, f"product {name}"].append(float(value.mean()))

    def _add_attention(self, x: LayerInputs, head: int, batch: Queries, directions: Tensor) -> None:
        mass = batch.logits.masked_fill(~batch.far, -torch.inf).softmax(-1)
        heaviest = mass.topk(min(TOP, mass.shape[-1]), -1).values.sum(-1)
        self.found[x.layer, head, "top_256"].append(float(heaviest.mean()))
        group = batch.logits.shape[0]
        q = x.q[0, head * group : (head + 1) * group, batch.positions].float()
        k, v = x.k[0, head].float(), x.v[0, head].float()
        for name, order in ORDERS.items():
            of_keys, of_queries = (order(vectors, directions) for vectors in (k, q))
            for bins in BINS:
                out, _, keys = read_in_stages(
                    batch, v, bin_stages(of_keys, of_queries, bins, batch.far), 2
                )
                error = (out[:, :, 1] - out[:, :, -1]).square().sum() / out[:, :, -1].square().sum()
                self.found[x.layer, head, f"error {name} {bins} bins"].append(float(error))
                self.found[x.layer, head, f"read {name} {bins} bins"].append(
                    float(keys[:, :, 1].mean())
                )

    def rows(self) -> Iterator[tuple[int, int, str, float]]:
        """Yields layer, key/value head, measure and value."""
        for (layer, head, name), values in sorted(self.found.items()):
            yield layer, head, name, sum(values) / len(values)
        for (layer, head, name), counts in sorted(self.counts.items()):
            total = torch.stack(counts).sum(0)
            yield layer, head, f"assigned {name}", float(total.max() / total.sum())
            yield (
                layer,
                head,
                f"deviation {name}",
                float(deviation(torch.stack(counts), total).mean()),
            )
            if name == "keys":
                other = torch.stack(self.counts[layer, head, "queries"]).sum(0)
                yield (
                    layer,
                    head,
                    "assigned variation",
                    float((total / total.sum() - other / other.sum()).abs().sum() / 2),
                )


@torch.inference_mode()
def main() -> None:
    """Prints the measures."""
    parser = ArgumentParser(description="Analyze queries, keys and buckets.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval")
    cfg: Any = compose(
        "eval", ["eval=analysis", "eval.analysis.num_chunks=10", *parser.parse_args().overrides]
    )
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    settings = cfg.eval.analysis
    methods = compared.find_compared(cfg, loaded).on(loaded)
    partition = next(
        (
            routing.router
            for routing in methods.bucket_routings
            if isinstance(routing.router, KMeans)
        ),
        None,
    )
    if partition is None:
        raise UserError("artifacts.kmeans: no k-means; msattn fit-kmeans creates one")
    window = partitions.window_of(cfg, methods)
    layers = chosen_layers(settings.layers, partition.layers)
    heads = settings.heads or list(range(models.num_kv_heads(loaded.model.config)))
    positions = query_positions(settings.length, window, settings.num_queries)
    measures = Measures(partition, positions, window, heads, cfg.seed)
    options = {"seq_len": settings.length, "num_chunks": settings.num_chunks}
    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, **options)
    visit_layers(loaded.model, measures.add, (chunks[i] for i in range(len(chunks))), layers)
    print("layer,kv_head,measure,value")
    for layer, head, name, value in measures.rows():
        print(f"{layer},{head},{name},{value:.4f}")


if __name__ == "__main__":
    run_program(main)

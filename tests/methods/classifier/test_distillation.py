"""Distillation of query classifiers: sampled batches, loss and routing recall."""

import pytest
import torch

from msattn.trainer.methods.classifier.distillation import Distiller, routing_recall
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.classifier.targets import BatchSeeds, CachedBatches, QueryTargets
from tests.factory import random_partition


def random_targets(count: torch.Tensor, size: int, buckets: int) -> QueryTargets:
    """Returns random queries and targets for classifiers with ``count [layers, H]`` rows."""
    rows = int(count.sum())
    targets = torch.rand(rows, buckets)
    targets[:, 0] = 0  # an empty bucket
    targets /= targets.sum(-1, keepdim=True)
    entropy = -torch.xlogy(targets, targets).sum(-1)
    return QueryTargets(
        torch.randn(rows, size),
        targets,
        entropy,
        (count.flatten().cumsum(0) - count.flatten()).view_as(count),
        count,
    )


def random_qmodel(layers: list[int], *, residual: bool) -> QModel:
    return QModel(random_partition(5, layers=layers, size=8), 2, 6, residual=residual)


def test_sampled_rows_are_uniform_and_depend_on_the_layer_alone() -> None:
    count = torch.tensor([[7, 100], [50, 1]])
    rows = random_targets(count, 4, 3)
    both = CachedBatches(rows, [1, 3], 400)
    seeds = torch.tensor([BatchSeeds(5, 100)[i]["batches"] for i in range(100)])
    assert len(set(seeds.tolist())) == 100
    sampled = both.sample(seeds) - rows.start[..., None]
    assert sampled.shape == (2, 2, 40_000)
    for layer in range(2):
        for head in range(2):
            seen = sampled[layer, head].bincount(minlength=int(count[layer, head])).double()
            assert len(seen) == count[layer, head]
            expected = 40_000 / len(seen)
            # chi squared
            assert ((seen - expected) ** 2 / expected).sum() < len(seen) + 5 * (
                2 * len(seen)
            ) ** 0.5
    # every head has its own samples
    assert both.sample_hashes.unique().numel() == both.sample_hashes.numel()

    own = QueryTargets(rows.queries, rows.targets, rows.entropy, rows.start[1:], rows.count[1:])
    alone = CachedBatches(own, [3], 400)
    assert torch.equal(alone.sample(seeds), both.sample(seeds)[1:])
    assert torch.equal(both.sample(seeds[3:4]), both.sample(seeds)[:, :, 1200:1600])
    assert not torch.equal(both.sample(seeds[3:4]), both.sample(seeds[4:5]))
    other = torch.tensor([BatchSeeds(6, 1)[0]["batches"]])
    assert not torch.equal(both.sample(other), both.sample(seeds[:1]))


@pytest.mark.parametrize("residual", [False, True])
def test_loss_is_the_mean_divergence_and_its_gradient_that_of_the_sum(residual: bool) -> None:
    rows = random_targets(torch.tensor([[9, 4], [6, 8]]), 8, 5)
    qmodel = random_qmodel([1, 3], residual=residual)
    seeds = torch.tensor([12345])
    batches = CachedBatches(rows, [1, 3], 16)
    outputs = Distiller(qmodel, batches)(seeds)
    sampled = batches.sample(seeds)
    targets, probs = rows.targets[sampled], qmodel(rows.queries[sampled]).softmax(-1)
    divergence = (targets * (targets.clamp(min=1e-30) / probs).log()).sum(-1).mean(-1)
    torch.testing.assert_close(outputs["loss"], divergence.mean())
    assert list(outputs["parts"]) == ["layer 1", "layer 3"]
    torch.testing.assert_close(torch.stack(list(outputs["parts"].values())), divergence.mean(-1))
    weights = [qmodel.weight_in, qmodel.weight_out, qmodel.gain]
    gradients, expected = (
        torch.autograd.grad(loss, weights, retain_graph=True)
        for loss in (outputs["loss"], divergence.sum())
    )
    torch.testing.assert_close(gradients, expected)


def test_a_step_compiles_without_graph_breaks() -> None:
    rows = random_targets(torch.tensor([[9, 4]]), 8, 5)
    distiller = Distiller(random_qmodel([0], residual=True), CachedBatches(rows, [0], 16))
    seeds = torch.tensor([3])
    eager = distiller(seeds)["loss"]
    compiled = torch.compile(distiller, fullgraph=True, backend="aot_eager", dynamic=False)(seeds)[
        "loss"
    ]
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("per_query_head", [False, True])
def test_routing_recall(per_query_head: bool) -> None:
    """A classifier built from the centroids has their recall, for any number of rows."""
    heads = 4 if per_query_head else 2
    qmodel = QModel(random_partition(layers=[4], size=6), heads, 12).eval()
    with torch.no_grad():
        both_signs = torch.cat([torch.eye(6), -torch.eye(6)], dim=1)  # relu(x) - relu(-x) = x
        qmodel.weight_in.copy_(both_signs)
        centroids = qmodel.head_centroids().mT
        qmodel.weight_out.copy_(torch.cat([centroids, -centroids], dim=2))
    count = torch.tensor([[7, 1, 1500, 30][:heads]])
    rows = random_targets(count, 6, 6)
    (metrics,) = routing_recall(qmodel, rows).values()
    names = ("qmodel", "kmeans", "oracle")
    assert set(metrics) == {"heldout_loss"} | {
        f"recall_{name}@{probes}" for name in names for probes in (1, 2, 4)
    }
    head = torch.arange(heads).repeat_interleave(count[0])
    scores = (rows.queries[:, None] @ centroids[0, head])[:, 0]
    divergence = torch.nn.functional.kl_div(
        scores.log_softmax(-1), rows.targets, reduction="batchmean"
    )
    assert metrics["heldout_loss"] == pytest.approx(divergence.item(), abs=1e-5)
    two = rows.targets.gather(-1, scores.topk(2).indices).sum(-1).mean().item()
    assert metrics["recall_kmeans@2"] == pytest.approx(two, abs=1e-5)
    assert metrics["recall_qmodel@2"] == pytest.approx(two, abs=1e-5)
    assert metrics["recall_oracle@4"] == pytest.approx(
        rows.targets.topk(4).values.sum(-1).mean().item(), abs=1e-5
    )

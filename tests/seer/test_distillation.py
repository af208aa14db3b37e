"""Query classifiers in training: what batches are drawn, what the loss is, and how well what is learnt routes."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from msattn.trainer.saap.distillation import Distiller, Draws, over_layers, routing_recall, scattered
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.pairs import Pairs
from msattn.trainer.saap.qmodel import QModel


def some_pairs(count: torch.Tensor, size: int, buckets: int) -> Pairs:
    """Random pairs for classifiers with ``count [layers, H]`` rows."""
    rows = int(count.sum())
    targets = torch.rand(rows, buckets)
    targets[:, 0] = 0  # an empty bucket
    targets /= targets.sum(-1, keepdim=True)
    entropy = -torch.xlogy(targets, targets).sum(-1)
    return Pairs(torch.randn(rows, size), targets, entropy, (count.flatten().cumsum(0) - count.flatten()).view_as(count), count)


def some_qmodel(layers: list[int], heads: int, size: int, buckets: int, **settings: Any) -> QModel:
    centroids = normalize(torch.randn(len(layers), 2, buckets, size), dim=-1)
    return QModel(KMeans(centroids, layers), heads, 6, **settings)


def test_draws_are_uniform_and_a_layers_own() -> None:
    count = torch.tensor([[7, 100], [50, 1]])
    rows = some_pairs(count, 4, 3)
    both = Distiller(some_qmodel([1, 3], 2, 4, 3), rows, 400)
    keys = torch.tensor([Draws(5, 100)[i]["keys"] for i in range(100)])
    assert len(set(keys.tolist())) == 100
    drawn = both.draw(keys) - rows.start[..., None]
    assert drawn.shape == (2, 2, 40_000)
    for layer in range(2):
        for head in range(2):
            seen = drawn[layer, head].bincount(minlength=int(count[layer, head])).double()
            assert len(seen) == count[layer, head]
            expected = 40_000 / len(seen)
            assert ((seen - expected) ** 2 / expected).sum() < len(seen) + 5 * (2 * len(seen)) ** 0.5  # chi squared
    assert both.streams.unique().numel() == both.streams.numel()  # every head draws for itself

    own = Pairs(rows.queries, rows.targets, rows.entropy, rows.start[1:], rows.count[1:])
    alone = Distiller(some_qmodel([3], 2, 4, 3), own, 400)
    assert torch.equal(alone.draw(keys), both.draw(keys)[1:])
    assert torch.equal(both.draw(keys[3:4]), both.draw(keys)[:, :, 1200:1600])
    assert not torch.equal(both.draw(keys[3:4]), both.draw(keys[4:5]))
    other = torch.tensor([Draws(6, 1)[0]["keys"]])
    assert not torch.equal(both.draw(other), both.draw(keys[:1]))


def test_hash_is_one_to_one_and_the_same_for_ints_and_tensors() -> None:
    words = torch.arange(2**16) * 65_521 % 2**32
    hashed = scattered(words)
    assert hashed.unique().numel() == 2**16
    assert 0 <= int(hashed.min()) <= int(hashed.max()) < 2**32
    assert hashed[:100].tolist() == [scattered(word) for word in words[:100].tolist()]


@pytest.mark.parametrize("residual", [False, True])
def test_loss_is_the_divergence_and_each_head_trains_as_if_alone(residual: bool) -> None:
    rows = some_pairs(torch.tensor([[9, 4], [6, 8]]), 8, 5)
    qmodel = some_qmodel([1, 3], 2, 8, 5, residual=residual)
    keys = torch.tensor([12345])
    distiller = Distiller(qmodel, rows, 16)
    outputs = distiller(keys)
    drawn = distiller.draw(keys)
    targets, probs = rows.targets[drawn], qmodel(rows.queries[drawn]).softmax(-1)
    divergence = (targets * (targets.clamp(min=1e-30) / probs).log()).sum(-1).mean(-1)
    torch.testing.assert_close(outputs["loss"], divergence.mean())
    assert list(outputs["parts"]) == ["layer 1", "layer 3"]
    torch.testing.assert_close(torch.stack(list(outputs["parts"].values())), divergence.mean(-1))
    weights = [qmodel.weight_in, qmodel.weight_out, qmodel.gain]
    ours, theirs = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in (outputs["loss"], divergence.sum()))
    torch.testing.assert_close(ours, theirs)


def test_a_step_compiles_whole() -> None:
    rows = some_pairs(torch.tensor([[9, 4]]), 8, 5)
    distiller = Distiller(some_qmodel([0], 2, 8, 5, residual=True), rows, 16)
    keys = torch.tensor([3])
    eager = distiller(keys)["loss"]
    compiled = torch.compile(distiller, fullgraph=True, backend="aot_eager", dynamic=False)(keys)["loss"]
    torch.testing.assert_close(compiled, eager)


@pytest.mark.gpu
def test_bf16_products_lose_little_and_draws_are_the_same() -> None:
    rows = some_pairs(torch.tensor([[900, 40], [60, 800]]), 64, 128)
    qmodel = some_qmodel([1, 3], 2, 64, 128)
    keys = torch.tensor([3, 4])
    exact = Distiller(qmodel, rows, 256)
    expected, drawn = exact(keys)["loss"], exact.draw(keys)
    there = Pairs(*(getattr(rows, field.name).cuda() for field in fields(Pairs)))
    quick = Distiller(qmodel.cuda(), there, 256, bf16=True)
    assert torch.equal(quick.draw(keys.cuda()).cpu(), drawn)
    loss = quick(keys.cuda())["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in qmodel.parameters())


@pytest.mark.parametrize("per_query_head", [False, True])
def test_recall(per_query_head: bool) -> None:
    """A classifier made of the centroids themselves routes as they do, whatever the number of rows at once."""
    heads = 4 if per_query_head else 2
    qmodel = QModel(KMeans(normalize(torch.randn(1, 2, 6, 6), dim=-1), [4]), heads, 12).eval()
    with torch.no_grad():
        both_signs = torch.cat([torch.eye(6), -torch.eye(6)], dim=1)  # relu(x) - relu(-x) = x
        qmodel.weight_in.copy_(both_signs)
        centroids = qmodel.directions().mT
        qmodel.weight_out.copy_(torch.cat([centroids, -centroids], dim=2))
    count = torch.tensor([[7, 1, 1500, 30][:heads]])
    rows = some_pairs(count, 6, 6)
    (figures,) = routing_recall(qmodel, rows).values()
    assert set(figures) == {f"recall_{name}@{probes}" for name in ("qmodel", "kmeans", "oracle") for probes in (1, 2, 4)}
    head = torch.arange(heads).repeat_interleave(count[0])
    scores = (rows.queries[:, None] @ centroids[0, head])[:, 0]
    two = rows.targets.gather(-1, scores.topk(2).indices).sum(-1).mean().item()
    assert figures["recall_kmeans@2"] == pytest.approx(two, abs=1e-5)
    assert figures["recall_qmodel@2"] == pytest.approx(two, abs=1e-5)
    assert figures["recall_oracle@4"] == pytest.approx(rows.targets.topk(4).values.sum(-1).mean().item(), abs=1e-5)


def test_figures_over_layers() -> None:
    layers = {0: {"loss": 1.0, "recall@1": 0.2, "recall@32": 0.5}, 7: {"loss": 3.0, "recall@1": 0.4, "recall@32": 0.7}}
    assert over_layers(layers) == pytest.approx(
        {"loss": 2, "recall@1": 0.3, "recall@32": 0.6}
        | {"loss/layer 0": 1, "recall@32/layer 0": 0.5, "loss/layer 7": 3, "recall@32/layer 7": 0.7}
    )

"""Query classifiers: the batched form against one MLP per head, and folded weights against
evaluation mode.
"""

import pytest
import torch
from torch import nn

from msattn.trainer.methods.classifier.qmodel import QModel
from tests.factory import random_partition

LAYERS, KV_HEADS, GROUP, DIM, HIDDEN, BUCKETS = 2, 2, 3, 8, 12, 5


def qmodel(per_query_head: bool = False, rope: bool = False, residual: bool = False) -> QModel:
    partition = random_partition(BUCKETS, layers=[0, 3], heads=KV_HEADS, size=DIM, rope=rope)
    router = QModel(
        partition, KV_HEADS * (GROUP if per_query_head else 1), HIDDEN, residual=residual
    )
    for parameter in (router.gain, router.shift, router.bias_out):
        nn.init.normal_(parameter)
    return router


def plain_mlp(batched: QModel, layer: int, head: int) -> nn.Sequential:
    """Returns one classifier as a module of PyTorch layers."""
    mlp = nn.Sequential(
        nn.Linear(DIM, HIDDEN, bias=False),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, BUCKETS),
    )
    linear_in, norm, _, linear_out = mlp
    assert isinstance(linear_in, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(linear_out, nn.Linear)
    with torch.no_grad():
        linear_in.weight.copy_(batched.weight_in[layer, head].T)
        norm.weight.copy_(batched.gain[layer, head, 0])
        norm.bias.copy_(batched.shift[layer, head, 0])
        linear_out.weight.copy_(batched.weight_out[layer, head].T)
        linear_out.bias.copy_(batched.bias_out[layer, head, 0])
    return mlp.train(batched.training)


def test_batched_matches_one_mlp_per_head_in_training_and_evaluation() -> None:
    batched = qmodel().train()
    mlps = [
        [plain_mlp(batched, layer, head) for head in range(KV_HEADS)] for layer in range(LAYERS)
    ]
    for rows, training in ((40, True), (25, True), (7, False), (1, False)):
        batched.train(training)
        queries = torch.randn(LAYERS, KV_HEADS, rows, DIM)
        logits = batched(queries)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                expected = mlps[layer][head].train(training)(queries[layer, head])
                torch.testing.assert_close(logits[layer, head], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("per_query_head", "rope", "residual"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@torch.no_grad()
def test_scores_are_probabilities_summed_over_the_query_group(
    per_query_head: bool, rope: bool, residual: bool
) -> None:
    router = qmodel(per_query_head, rope, residual)
    router.mean.normal_()
    router.variance.uniform_(0.5, 2)
    router.eval()
    before = torch.randn(2, KV_HEADS * GROUP, 1, DIM)
    after = torch.randn(2, KV_HEADS * GROUP, 1, DIM)
    scores = router.scores(3, before, after)
    assert scores.shape == (2, KV_HEADS, BUCKETS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.sum(-1), torch.full((2, KV_HEADS), float(GROUP)))

    queries = (after if rope else before)[:, :, 0]
    per_head = 1 if per_query_head else GROUP
    # [H, queries per classifier * B, D]
    rows = queries.transpose(0, 1).reshape(-1, per_head * 2, DIM)
    probs = router(rows.expand(LAYERS, -1, -1, -1))[1].softmax(-1)
    expected = probs.reshape(KV_HEADS, GROUP, 2, BUCKETS).sum(1).transpose(0, 1)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    head_scores = router.head_scores(3, before, after)
    torch.testing.assert_close(
        head_scores,
        probs.reshape(KV_HEADS * GROUP, 2, BUCKETS).transpose(0, 1),
        rtol=1e-5,
        atol=1e-6,
    )


@torch.no_grad()
def test_folded_weights_are_dropped_by_train_and_to() -> None:
    router = qmodel().eval()
    query = torch.randn(1, KV_HEADS * GROUP, 1, DIM)
    before = router.scores(0, query, query)
    router.train()
    router.weight_out.mul_(3)
    after = router.eval().scores(0, query, query)
    assert not torch.allclose(before, after)
    half = router.scores(0, query.half(), query.half())
    # fp16 products: logits of about 5 are off by 5e-3
    torch.testing.assert_close(half, after, rtol=0, atol=2e-2)
    double = router.double().scores(0, query.double(), query.double())
    torch.testing.assert_close(double, after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("per_query_head", [False, True])
@torch.no_grad()
def test_a_residual_classifier_adds_the_centroid_products(per_query_head: bool) -> None:
    router = qmodel(per_query_head, residual=True).eval()
    queries = torch.randn(LAYERS, router.weight_in.shape[1], 7, DIM)
    corrected = router(queries)
    router.residual = False
    heads = torch.arange(router.weight_in.shape[1]) // (GROUP if per_query_head else 1)
    products = torch.einsum("lhnd,lhcd->lhnc", queries, router.partition.centroids[:, heads])
    torch.testing.assert_close(corrected, router(queries) + products)

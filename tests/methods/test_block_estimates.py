"""Block scores of published methods against loops over rows, tiles and single queries."""

import pytest
import torch
from torch import Tensor

from msattn.kernels import testing
from msattn.trainer.config import BlockSizes
from msattn.trainer.methods.untrained.scores.flashprefill import FlashPrefill
from msattn.trainer.methods.untrained.scores.flexprefill import FlexPrefill
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.methods.untrained.scores.minference import MInference
from msattn.trainer.methods.untrained.scores.vertical_slash import VerticalSlash
from msattn.trainer.methods.untrained.scores.xattention import XAttention
from msattn.trainer.models.tap import LayerInputs
from tests.methods.layers import layer_inputs

BLOCK = 16
SHAPES = [(96, 96), (70, 70), (32, 96)]  # queries, keys


def probabilities(x: LayerInputs) -> Tensor:
    seen = testing.visible(1, x.num_queries, x.num_keys, True, None)
    return testing.dense_attention(x.q, x.k, x.v, seen, x.scale).probs.float()


@pytest.mark.parametrize(("num_queries", "num_keys"), SHAPES)
@pytest.mark.parametrize("sizes", [BlockSizes(BLOCK, BLOCK), BlockSizes(64, BLOCK)])
def test_flashprefill_sums_the_exponentials_of_single_queries(num_queries, num_keys, sizes):
    x, past = layer_inputs(num_queries, num_keys), num_keys - num_queries
    scores = FlashPrefill(*sizes)(x)
    for head in range(4):
        means = [block.mean(0) for block in x.k[0, head // 2].split(sizes.keys)]
        for r, first in enumerate(range(0, num_queries, sizes.queries)):
            end = min(first + sizes.queries, num_queries)
            last = (end + past - 1) // sizes.keys
            sums = torch.stack(
                [
                    (x.q[0, head, first:end] @ means[c] * x.scale).exp().sum()
                    for c in range(last + 1)
                ]
            )
            torch.testing.assert_close(
                scores[0, head, r, : last + 1], sums / sums.sum(), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(96, 96), (32, 96)])
@pytest.mark.parametrize("stride", [4, 8])
def test_xattention_sums_antidiagonals(num_queries, num_keys, stride):
    x, past = layer_inputs(num_queries, num_keys), num_keys - num_queries
    scores = XAttention(BLOCK, stride=stride)(x)
    for head in range(4):
        expected = torch.zeros(num_queries // BLOCK, num_keys // BLOCK)
        for i in range(num_queries // stride):
            seen = (past + i * stride) // stride + 1
            logits = torch.zeros(seen)
            for j in range(seen):
                for s in range(stride):
                    query = x.q[0, head, i * stride + s]
                    key = x.k[0, head // 2, j * stride + stride - 1 - s]
                    logits[j] += query @ key * x.scale / stride
            for j, mass in enumerate(logits.softmax(0)):
                expected[i * stride // BLOCK, j * stride // BLOCK] += mass * stride / BLOCK
        torch.testing.assert_close(scores[0, head], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_queries", "num_keys"), SHAPES)
def test_flexprefill_pools_in_the_heads_whose_last_queries_it_predicts(num_queries, num_keys):
    x = layer_inputs(num_queries, num_keys)
    x.q[:, :2] *= 0.05  # so flat that means predict the attention of these heads
    probs, found = probabilities(x)[0, :, -BLOCK:], []
    for head in range(4):
        true = torch.stack([part.sum() for part in probs[head].split(BLOCK, dim=1)]) / len(
            probs[head]
        )
        mean = x.q[0, head, -BLOCK:].mean(0)
        logits = torch.stack(
            [part.mean(0) @ mean * x.scale for part in x.k[0, head // 2].split(BLOCK)]
        )
        estimate, middle = logits.softmax(0), (logits.softmax(0) + true) / 2
        nats = ((true / middle).log() * true + (estimate / middle).log() * estimate).sum() / 2
        found.append(bool(nats.clamp(min=0).sqrt() < 0.1))
    assert num_keys % BLOCK or found == [True, True, False, False]
    pooled, slashes = MeanPool(BLOCK)(x), VerticalSlash(BLOCK, last_queries=BLOCK)(x)
    torch.testing.assert_close(
        FlexPrefill(BLOCK)(x), torch.where(torch.tensor(found)[:, None, None], pooled, slashes)
    )


def test_minference_ranks_the_first_columns_and_the_last_distances_first():
    x = layer_inputs(320)
    scores, plain = MInference(BLOCK)(x), VerticalSlash(BLOCK)(x)
    first = torch.zeros(20, 20, dtype=torch.bool)
    for r in range(20):
        for c in range(r + 1):
            first[r, c] = 16 * c < 30 or 16 * (r - c) - 15 < 100
    largest = scores.amax(-1, keepdim=True).expand_as(scores)
    torch.testing.assert_close(scores[..., first], largest[..., first])
    others = ~first & torch.ones(20, 20, dtype=torch.bool).tril()
    ratio = (scores / plain)[..., others]
    assert (scores[..., others] <= largest[..., others]).all()
    rows = others.nonzero()[:, 0]
    for r in rows.unique():  # the others keep their order and their ratios
        assert torch.allclose(ratio[..., rows == r], ratio[..., rows == r][..., :1], rtol=1e-4)


def test_scores_that_add_over_keys_add_up_to_those_of_larger_blocks():
    x = layer_inputs(128, 256)
    fine, coarse = XAttention(64, 16)(x), XAttention(64, 64)(x)
    torch.testing.assert_close(fine.unflatten(-1, (-1, 4)).sum(-1), coarse)

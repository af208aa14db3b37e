"""Routers without training: their buckets, scores and pages against direct computations in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.trainer.config.select import BASELINES, ROUTERS
from msattn.trainer.methods.key_blocks import count_blocks
from msattn.trainer.methods.untrained import untrained_router, untrained_scorer
from msattn.trainer.methods.untrained.base import BLOCK_SIZE, UntrainedRouter, UntrainedScorer
from msattn.trainer.methods.untrained.routers.lsh import BITS, TABLES, CollidingKeys
from msattn.trainer.methods.untrained.routers.quest import QuestBlocks
from msattn.trainer.methods.untrained.routers.random import RandomBuckets
from msattn.trainer.methods.untrained.routers.window import WindowBlocks
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from tests.routers import number_to_read

LAYERS, KV_HEADS, HEADS, SIZE, BUCKETS = [1, 3], 2, 4, 16, 8


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(k: Tensor, start: Tensor | None = None) -> LayerInputs:
    return LayerInputs(1, k, k, k, k, k, Angles(k, k), Scoring(1.0), start)


@pytest.mark.parametrize("padding", [None, [0, 60]])
def test_keys_are_read_from_their_second_collision_on(padding: list[int] | None) -> None:
    router = CollidingKeys(BUCKETS, LAYERS, KV_HEADS, head_dim=SIZE, seed=3)
    k, q = normal(2, KV_HEADS, 150, SIZE) + 3, normal(2, HEADS, 1, SIZE, seed=1)
    start = None if padding is None else torch.tensor(padding)
    summaries = router.summarize(inputs(k, start))
    assert summaries.shape == (2, KV_HEADS, 150, TABLES)
    scores = router.head_scores(1, summaries, q, q, torch.tensor([149, 149]))
    shared = router.scores(1, summaries, q, q, torch.tensor([149, 149]))
    vectors = router.vectors.double().unflatten(-1, (TABLES, BITS))
    for row, head in ((0, 0), (0, 3), (1, 1)):
        own = k[row, head // 2, 0 if padding is None else padding[row] :].double()
        signs = torch.einsum("nd,dtb->ntb", own - own.mean(0), vectors) > 0
        # [n, TABLES]
        collides = (
            signs == (torch.einsum("d,dtb->tb", q[row, head, 0].double(), vectors) > 0)
        ).all(-1)
        for key, tables in enumerate(collides):
            found = tables.nonzero().flatten().tolist()
            assert scores[row, head, key] == (TABLES - found[1] if len(found) > 1 else 0)
        assert 0.02 < (scores[row, head, : len(own)] > 0).float().mean() < 0.5
        both = scores[row, 2 * (head // 2) : 2 * (head // 2) + 2]
        assert torch.equal(shared[row, head // 2], both.amax(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_random_buckets_are_even_and_depend_on_the_vector_alone(dtype: torch.dtype) -> None:
    router = RandomBuckets(8, LAYERS, KV_HEADS, seed=5)
    k = normal(2, KV_HEADS, 4000, SIZE, dtype=dtype)
    buckets = router.assign(1, -k, k)
    assert buckets.dtype == torch.int32
    for counts in (buckets[b, h].bincount(minlength=8) for b in range(2) for h in range(KV_HEADS)):
        assert len(counts) == 8
        assert (counts - 500).abs().max() < 6 * 500**0.5
    assert torch.equal(router.assign(1, k, k[1:, :, 100:101]), buckets[1:, :, 100:101])
    assert torch.equal(RandomBuckets(8, LAYERS, KV_HEADS, seed=5).assign(1, k, k), buckets)
    for other in (
        RandomBuckets(8, LAYERS, KV_HEADS, seed=6).assign(1, k, k),
        router.assign(3, k, k),
    ):
        assert 0.05 < (other == buckets).float().mean() < 0.2


def test_queries_of_one_sequence_share_its_summaries() -> None:
    k, q = normal(1, KV_HEADS, 70, SIZE), normal(5, HEADS, 1, SIZE, seed=1)
    hashes = CollidingKeys(8, LAYERS, KV_HEADS, head_dim=SIZE)
    for router in (QuestBlocks(8, LAYERS, KV_HEADS), WindowBlocks(8, LAYERS, KV_HEADS), hashes):
        summaries, positions = router.summarize(inputs(k)), torch.full((5,), 69)
        together = router.scores(1, summaries, q, q, positions)
        for row in range(5):
            one = q[row : row + 1]
            torch.testing.assert_close(
                together[row : row + 1], router.scores(1, summaries, one, one, positions[:1])
            )


@settings(max_examples=60, deadline=None)
@given(
    before=st.lists(st.integers(-5, 200), min_size=1, max_size=3),
    buckets=st.integers(1, 40),
    data=st.data(),
    seed=st.integers(0, 2**16),
)
def test_the_best_far_pages_are_chosen(
    before: list[int], buckets: int, data: st.DataObject, seed: int
) -> None:
    probes = data.draw(st.integers(0, buckets))
    router = QuestBlocks(buckets, LAYERS, KV_HEADS)
    scores = normal(len(before), KV_HEADS, count_blocks(200, BLOCK_SIZE), seed=seed)
    # memory beyond the summaries may hold anything
    scores[..., count_blocks(max(1, *before), BLOCK_SIZE) :] = torch.nan
    chosen = router.best(router.only_far(scores, torch.tensor(before)), probes)
    assert chosen.dtype == torch.int32
    for row, keys in enumerate(before):
        far = count_blocks(max(keys, 0), BLOCK_SIZE)
        count = number_to_read(far, probes, buckets)
        for head in range(KV_HEADS):
            expected = scores[row, head, :far].argsort(descending=True)[:count].tolist()
            found = chosen[row, head].tolist()
            assert found == expected + [-1] * (len(found) - count)


def test_files_register_methods() -> None:
    assert all(issubclass(untrained_scorer(name), UntrainedScorer) for name in BASELINES)
    assert all(issubclass(untrained_router(name), UntrainedRouter) for name in ROUTERS)

"""Decoding with routers without training: the keys that are read, against a direct computation in
fp64.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import BucketRouter
from msattn.trainer.methods.budgets import KeyShare, Probes
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.untrained.routers.clusters import KeyClusters
from msattn.trainer.methods.untrained.routers.lsh import CollidingKeys
from msattn.trainer.methods.untrained.routers.quest import QuestBlocks
from msattn.trainer.methods.untrained.routers.random import RandomBuckets
from msattn.trainer.methods.untrained.routers.twilight import TopPKeys
from msattn.trainer.methods.untrained.routers.window import WindowBlocks
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from msattn.trainer.serving.attach import Sparse, attach
from msattn.trainer.serving.contiguous.install import install_layers
from msattn.trainer.serving.dispatch import Dispatch, Routing
from msattn.trainer.serving.statistics import Statistics
from tests.factory import left_padded, random_partition, random_tokens, tiny_model
from tests.methods.gate.random_gates import random_decode_gate
from tests.routers import Head, capped_products, keys_of_a_token
from tests.serving.decoding import close, generate
from tests.serving.decoding import models as grouped

BUCKETS, KV_HEADS, HEADS, SIZE, RECENT, SINK = 8, 2, 4, 16, 5, 2
ROUTERS: dict[str, Any] = {
    "window": lambda layers: WindowBlocks(BUCKETS, layers, KV_HEADS),
    "random": lambda layers: RandomBuckets(BUCKETS, layers, KV_HEADS),
    "lsh": lambda layers: CollidingKeys(BUCKETS, layers, KV_HEADS, head_dim=SIZE),
    "quest": lambda layers: QuestBlocks(BUCKETS, layers, KV_HEADS),
    "clusters": lambda layers: KeyClusters(BUCKETS, layers, KV_HEADS),
    "twilight": lambda layers: TopPKeys(BUCKETS, layers, KV_HEADS),
}
# with all probes, they read the keys that collide, and those that hold enough attention
PARTIAL = ("lsh", "twilight")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def routed_attention(
    router: Any, budget: Any, statistics: Statistics, **options: Any
) -> Callable[[LayerInputs, Any], Tensor]:
    """Returns attention of new tokens, a function of a layer's inputs and its cache."""
    options |= {"recent": RECENT, "sink": SINK, "layers": frozenset({0})}
    routing = Routing(router=router, budget=budget, **options)
    dispatch = Dispatch(None, routing, 0, lambda batch: 0)
    made = Sparse(dispatch, statistics, rotation=None, kv_heads=KV_HEADS, measure_recall=False)
    return lambda x, layer: made._new_tokens(x, layer, layer)


def decode(
    router: Any,
    k: Tensor,
    q: Tensor,
    padding: Tensor | None,
    budget: Any,
    softcap: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor, int]:
    """Decodes the last of the keys after a prompt of the others; returns the output, keys read
    ``[B, Hkv]``, and window.
    """
    cache, statistics = DynamicCache(), Statistics()
    install_layers(cache, router, num_layers=1, routed=[0], rebuild_every=8)
    layer: Any = cache.layers[0]
    attend, out = routed_attention(router, budget, statistics, **options), q
    for new in (part for part in (k[:, :, :-1], k[:, :, -1:]) if part.shape[2]):
        keys, values = layer.update(new, new.flip(-1))
        x = LayerInputs(
            0, q, keys, values, q, new, Angles(q, q), Scoring(0.25, softcap), padding, layer
        )
        layer.assign(x)
        if new.shape[2] == 1:
            out = attend(x, layer)
    return out, statistics.key_counts(len(k), k.shape[1], k.device), layer.window(RECENT)


@pytest.mark.parametrize(
    ("name", "softcap"), [*dict.fromkeys(ROUTERS).items(), ("clusters", 0.3), ("twilight", 0.3)]
)
@pytest.mark.parametrize(
    ("lengths", "probes"),
    [
        ((1,), 3),
        ((65,), 0),
        ((65,), BUCKETS),
        ((63, 200), 3),
        ((180, 200), 0),
        ((180, 200), 3),
        ((180, 200), BUCKETS),
    ],
)
def test_the_keys_that_are_read(
    name: str, softcap: float | None, lengths: tuple[int, ...], probes: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    longest = max(lengths)
    k = torch.randn(len(lengths), KV_HEADS, longest, SIZE, generator=generator, dtype=torch.float64)
    q = torch.randn(len(lengths), HEADS, 1, SIZE, generator=generator, dtype=torch.float64)
    padding = torch.tensor([longest - each for each in lengths], dtype=torch.int32)
    router = ROUTERS[name]([0])
    out, counts, window = decode(
        router, k, q, padding if len(lengths) > 1 else None, Probes(probes), softcap
    )
    for row, length in enumerate(lengths):
        for head in range(KV_HEADS):
            keys = k[row, head, longest - length :]
            queries = q[row, 2 * head : 2 * head + 2, 0]
            one = Head(keys, queries, window, probes, BUCKETS, softcap, router)
            read = keys_of_a_token(name, one, SINK)
            assert counts[row, head] == read.sum()
            if probes == BUCKETS and name not in PARTIAL:
                assert read.all()
            scores = capped_products(queries, keys, softcap)
            weights = scores.masked_fill(~read, -torch.inf).softmax(-1)
            torch.testing.assert_close(
                out[row, 2 * head : 2 * head + 2, 0], weights @ keys.flip(-1)
            )


def test_clusters_follow_a_cache() -> None:
    """After appended, removed and reordered tokens every key before the window is in one cluster,
    and each row has its own.
    """
    random, router = generator(1), ROUTERS["clusters"]([0])
    q, cache = torch.randn(2, HEADS, 1, SIZE, generator=random, dtype=torch.float64), DynamicCache()
    install_layers(cache, router, num_layers=1, routed=[0], rebuild_every=8)
    layer: Any = cache.layers[0]
    attend = routed_attention(router, Probes(BUCKETS), Statistics())

    def append(count: int) -> LayerInputs:
        new = torch.randn(2, KV_HEADS, count, SIZE, generator=random, dtype=torch.float64)
        keys, values = layer.update(new, new.flip(-1))
        x = LayerInputs(0, q, keys, values, q, new, Angles(q, q), Scoring(0.25), None, layer)
        layer.assign(x)
        return x

    append(100)
    for change in (
        lambda: layer.crop(-3),
        lambda: layer.crop(-36),
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
    ):
        for _ in range(20):
            x = append(1)
        index, indexed = layer.index, layer.indexed
        assert indexed > x.num_keys - 8
        assert torch.equal(
            index.order[..., :indexed].sort().values,
            torch.arange(indexed).int().expand(2, KV_HEADS, -1),
        )
        assert (index.offsets[..., -1] == indexed).all()
        weights = (q.unflatten(1, (KV_HEADS, -1)).squeeze(3) @ x.k.mT * 0.25).softmax(-1)
        torch.testing.assert_close(attend(x, layer), (weights @ x.v).flatten(1, 2).unsqueeze(2))
        change()
    means = [
        [
            x.k[b, h, index.order[b, h, : index.offsets[b, h, 1]].long()].mean(0)
            for h in range(KV_HEADS)
        ]
        for b in (0, 1)
    ]
    found = layer.summaries[:, :, 0]  # of the prompt, which is whole
    torch.testing.assert_close(found, torch.stack([torch.stack(row) for row in means]))


def classifiers(kv_heads: int) -> QModel:
    """Classifiers that are the same whatever the number of key/value heads."""
    centroids = random_partition(BUCKETS, layers=[0], seed=3).centroids
    partition = KMeans(centroids.repeat_interleave(kv_heads // KV_HEADS, 1), [0])
    return QModel(partition, HEADS, 8, seed=0).double().requires_grad_(False).eval()


@pytest.mark.parametrize("name", [*ROUTERS, "classifiers", "classifiers by density"])
def test_query_heads_choose_by_themselves(name: str) -> None:
    """Independent query heads read what they would read if each had a key/value head of its own."""
    random = generator(7)
    k = torch.randn(2, KV_HEADS, 200, SIZE, generator=random, dtype=torch.float64)
    q = torch.randn(2, HEADS, 1, SIZE, generator=random, dtype=torch.float64)
    padding, group = torch.tensor([0, 70], dtype=torch.int32), HEADS // KV_HEADS
    budget = KeyShare(0.1, 1.0, 3) if name == "classifiers by density" else Probes(3)
    if name in ROUTERS:
        router, alone = ROUTERS[name]([0]), ROUTERS[name]([0])
        alone.kv_heads = HEADS
    else:
        router, alone = classifiers(KV_HEADS), classifiers(HEADS)
    expected, counts, _ = decode(alone, k.repeat_interleave(group, 1), q, padding, budget)
    out, summed, _ = decode(router, k, q, padding, budget, independent=True)
    torch.testing.assert_close(out, expected)
    assert torch.equal(summed, counts.unflatten(1, (KV_HEADS, group)).sum(2))
    shared, _, _ = decode(router, k, q, padding, budget)
    assert torch.allclose(out, shared) == (name == "window")


@pytest.mark.parametrize("name", [*ROUTERS, 1, 4, 7])
def test_an_attached_model(name: str | int, where: str) -> None:
    """All probes are dense attention; in a batch with padding each row is as alone; fewer probes
    read less.

    Numbers are query heads of a group, with decode gates. Random buckets
    are those of a key's bits, which rounding in another batch changes.
    """
    model, router = (tiny_model(), name) if isinstance(name, str) else grouped(name)
    buckets = 1024 if isinstance(router, str) else router.num_buckets
    model = model.to(where)
    rows = [random_tokens(1, length, seed=length)[0] for length in (1, 63, 100)]
    ids, mask = left_padded(rows)
    options: dict[str, Any] = {
        "qmodel": router,
        "recent": RECENT,
        "sink": SINK,
        "dense_layers": (),
        "dense_below": 0,
    }
    dense, shares = generate(model, ids, mask, max_new_tokens=12), []
    for probes in (0, buckets // 4, buckets):
        with attach(model, probes=probes, **options) as sparse:
            found = generate(model, ids, mask, max_new_tokens=12)
            shares.append(sparse.stats()["selectivity"])
    assert shares[0] < shares[1] < shares[2] <= 1
    if name not in PARTIAL:
        close(found, dense)
        assert shares[2] == 1
    with attach(model, probes=0 if name == "random" else buckets // 4, **options):
        together = generate(model, ids[1:], mask[1:], max_new_tokens=6)
        for row in (1, 2):
            close(generate(model, rows[row][None], max_new_tokens=6)[:, 0], together[:, row - 1])


# makes a router, and whether the next one has the same buckets
ALIKE: dict[str, tuple[Any, bool]] = {
    "k-means": (lambda seed: random_partition(seed=seed // 2), True),
    "decode gates": (lambda seed: random_decode_gate(std=1.0 if seed < 2 else 0.1), True),
    "pages": (lambda seed: ROUTERS["lsh" if seed == 2 else "quest"]([0, 1]), False),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_cache_keeps_its_partition(name: str, where: str) -> None:
    model, ids, cache = tiny_model().to(where), random_tokens(1, 60).to(where), DynamicCache()
    options: dict[str, Any] = {
        "probes": 1,
        "recent": 5,
        "sink": 1,
        "dense_layers": (),
        "dense_below": 0,
    }
    make, same = ALIKE[name]
    with attach(model, qmodel=make(0), **options):
        model(ids, past_key_values=cache)
    for seed in (1, 2):
        refused = (
            pytest.raises(UserError, match="another k-means or router")
            if seed == 2 or not same
            else nullcontext()
        )
        with attach(model, qmodel=make(seed), **options), refused:
            model(ids[:, :1], past_key_values=cache)


def test_a_router_has_buckets_and_probes_all_of_them_by_default() -> None:
    with pytest.raises(UserError, match="num_buckets=0: expected 1 or more"):
        QuestBlocks(0, [0], KV_HEADS)
    with attach(tiny_model(), qmodel=QuestBlocks(BUCKETS, [0], KV_HEADS)) as sparse:
        assert sparse.dispatch.routed is not None
        assert sparse.dispatch.routed.budget == Probes(BUCKETS)


class HalvesOfTheSpace(BucketRouter):
    """A router that is no part of the package: a key's bucket is the sign of its first channel."""

    num_buckets, layers, kv_heads = 2, [0, 1], KV_HEADS

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        return (k[..., 0] > 0).to(torch.int32)

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        return torch.cat([-q[:, :, 0, :1], q[:, :, 0, :1]], -1).float()


def test_a_router_of_ones_own() -> None:
    model, ids = tiny_model(), random_tokens(1, 80)
    options: dict[str, Any] = {
        "qmodel": HalvesOfTheSpace(),
        "recent": 4,
        "sink": 1,
        "dense_layers": (),
        "dense_below": 0,
    }
    dense = generate(model, ids, max_new_tokens=6)
    with attach(model, probes=2, **options):
        close(generate(model, ids, max_new_tokens=6), dense)
    with attach(model, probes=1, **options) as sparse:
        generate(model, ids, max_new_tokens=6)
        assert 0.2 < sparse.stats()["selectivity"] < 0.9

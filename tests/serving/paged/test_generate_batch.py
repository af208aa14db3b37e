"""Continuous batching of an attached model: dense `generate` if everything is read, and the tokens
of sparse `generate`.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from msattn.kernels.paged import paged_bucket_sizes
from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate, QuestionScores
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.routers.random import RandomBuckets
from msattn.trainer.models.tap import LayerInputs
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.paged import passes
from msattn.trainer.serving.paged.kept_sizes import BucketSizes
from tests.factory import prompts_of, random_partition, tiny_model
from tests.serving.paged.batches import GREEDY, PAGE, alone, answer, one_by_one, served, together
from tests.sparse import BLOCK, BUCKETS, EVERY_BLOCK, HALF, LAYERS, attach_reading_all, gate_for

PRODUCTS = """
import torch

x = torch.randn(8192, 8192, device="cuda")
print(flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""
ROUTED: dict[str, Any] = {
    "qmodel": random_partition(),
    "probes": 2,
    "recent": 64,
    "sink": 1,
    "dense_layers": (0,),
}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the tokens of prefixes that were found in the cache, and the requests that were
    preempted.
    """
    counts: Counter[str] = Counter()
    search, offload = PagedAttentionCache.search_prefix_match, OffloadingManager.offload_requests

    def searched(*args: Any) -> int:
        found = search(*args)
        counts["shared"] += found
        return found

    def offloaded(*args: Any) -> Any:
        counts["preempted"] += 1
        return offload(*args)

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searched)
    monkeypatch.setattr(OffloadingManager, "offload_requests", offloaded)
    return counts


def ragged(count: int) -> list[list[int]]:
    """Returns prompts of 3 to 200 tokens, half of which share prefixes."""
    lengths = [3 + (37 * i) % 198 for i in range(count)]
    return prompts_of(*lengths[::2]) + prompts_of(*lengths[1::2], prefix=100)


@pytest.mark.slow
@pytest.mark.parametrize("pages_of_request", [None, 0], ids=["block tables", "slots"])
@pytest.mark.parametrize("count", [10, pytest.param(64, marks=pytest.mark.slow)])
def test_reading_every_key_gives_the_tokens_of_dense_generate(
    events: Counter[str], count: int, pages_of_request: int | None
) -> None:
    """Prompts are chunked, share prefixes, and are preempted: all of them hold more pages than
    there are.
    """
    model, prompts = tiny_model(), ragged(count)
    expected = [alone(model, prompt) for prompt in prompts]
    with attach_reading_all(model) as sparse:
        options = {
            "page_size": BLOCK,
            "num_blocks": 15,
            "max_batch_tokens": 75,
            "safety_margin": 0.0,
        }
        assert (
            together(model, sparse, prompts, **options, max_blocks_per_request=pages_of_request)
            == expected
        )
        stats = sparse.stats()
        (counter,) = sparse.statistics._key_counts.values()  # one, of whatever number of sequences
    assert len(counter) >= min(count, 75)
    assert (
        stats["sparsity"],
        stats["selectivity"],
        stats["dense_fallbacks"],
        stats["dense_by_choice"],
    ) == (0, 1, 0, 0)
    assert events["shared"] > 0
    assert events["preempted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "select", ["gate", "fewer keys", "quest", "mean_pool", "sink_local", "oracle", "vertical_slash"]
)
def test_chunks_of_whole_blocks_select_as_one_pass(select: str) -> None:
    """Policies look at one row of blocks, so chunks make no difference; nor do other requests in
    the same passes.
    """
    model, prompts = tiny_model(), prompts_of(150, 190, 97)
    attached: dict[str, Any] = {"gate": gate_for(model), "select": HALF}
    if select == "fewer keys":
        gate = Gate.build(
            model.config, GateConfig(block_size=2 * BLOCK, key_block_size=BLOCK)
        ).requires_grad_(False)
        attached = {"gate": gate, "select": HALF}
    elif select != "gate":
        attached = {"select": SelectConfig(sparsity=0.5, scores=select, block_size=BLOCK)}
    dense = [alone(model, prompt) for prompt in prompts]
    # its pattern is that of the last queries of a pass, so only whole prompts agree
    if select == "vertical_slash":
        prompts, dense = prompts[:1], dense[:1]
    attached |= ROUTED
    expected = one_by_one(model, prompts, attached)
    assert expected != dense
    chunk = 512 if select == "vertical_slash" else 4 * BLOCK
    for prompt, tokens in zip(prompts, expected, strict=True):
        found, stats = served(model, [prompt], attached, max_batch_tokens=chunk)
        assert found == [tokens]
        assert 0.2 < stats["sparsity"] < 0.5
        assert 0.3 < stats["selectivity"] < 1
        assert (stats["dense_fallbacks"], stats["dense_by_choice"]) == (0, 0)
    # cut in the middle of a block, prompts would have other row blocks
    twice = [*prompts, *reversed(prompts)]
    found, _ = served(model, twice, attached, max_batch_tokens=chunk + 5)
    assert found == expected + expected[::-1]


@pytest.mark.parametrize("chunk", [512, 4 * BLOCK])
def test_the_last_chunk_of_a_prompt_knows_its_question(chunk: int) -> None:
    """It reads the cached keys of the chunks before, which are selected by the gate alone."""
    model, (prompt,) = tiny_model(), prompts_of(190)

    class KnownEnd(QuestionScores):
        def given(self, x: LayerInputs) -> dict[str, Any]:
            return super().given(replace(x, ends_prompt=x.num_keys >= len(prompt)))

    gate = gate_for(model)
    known = {"select": Selection(TopK(sparsity=0.5), KnownEnd(gate), AlwaysRead(0, 0)), **ROUTED}
    attached = {"gate": gate, "select": replace(HALF, scores="gate_question"), **ROUTED}
    found, stats = served(model, [prompt], attached, max_batch_tokens=chunk)
    assert found == one_by_one(model, [prompt], known, prefill_chunk_size=chunk)
    assert stats["dense_fallbacks"] == 0


def test_the_last_queries_read_every_block() -> None:
    """A prompt that is no longer than these is dense by choice."""
    model, prompts = tiny_model(), prompts_of(150, 190, 97, 2 * BLOCK)
    attached: dict[str, Any] = {
        "gate": gate_for(model),
        "select": replace(HALF, sparsity=0.8, dense_queries=2 * BLOCK),
        **ROUTED,
    }
    found, stats = served(model, prompts, attached)
    assert found == one_by_one(model, prompts, attached)
    assert (stats["dense_fallbacks"], stats["dense_by_choice"]) == (0, LAYERS)
    assert 0.2 < stats["sparsity"] < 0.6
    # in chunks, they stay in one
    assert served(model, prompts, attached, max_batch_tokens=4 * BLOCK)[0] == found


def test_a_shared_prefix_selects_as_one_pass(events: Counter[str]) -> None:
    """Later prompts score the blocks of a prefix by the pooled keys that the first one has left."""
    model, prompts = tiny_model(), prompts_of(3 * PAGE + 5, 190, 150, 4 * PAGE, prefix=3 * PAGE)
    attached = {"gate": gate_for(model), "select": HALF, **ROUTED}
    found, stats = served(model, prompts, attached, max_requests_per_batch=1)
    assert found == one_by_one(model, prompts, attached)
    assert stats["dense_fallbacks"] == 0
    assert events["shared"] == 3 * 3 * PAGE


@pytest.mark.parametrize("router", ["k-means", "random"])
def test_routers_without_training(router: str) -> None:
    model, prompts, layers = tiny_model(), prompts_of(120, 190), list(range(LAYERS))
    roped = KMeans(random_partition().centroids, layers, rope=True)
    routers = {"k-means": roped, "random": RandomBuckets(BUCKETS, layers, 2)}
    attached = ROUTED | {"qmodel": routers[router]}
    found, stats = served(model, prompts, attached)
    assert 0.3 < stats["selectivity"] < 1
    assert stats["sparsity"] is None
    if router == "k-means":  # the hashes of random buckets change with each rounding
        assert found == one_by_one(model, prompts, attached)


@pytest.mark.parametrize("pages_of_request", [None, 0])
def test_short_sequences_stay_dense(pages_of_request: int | None) -> None:
    """Those that are too short for buckets read every key, beside others that do not."""
    model, (short, long) = tiny_model(), prompts_of(40, 190)
    options: dict[str, Any] = {
        **ROUTED,
        "recent": 8,
        "select": EVERY_BLOCK,
        "gate": gate_for(model),
        "dense_below": 100,
    }
    dense = alone(model, short)
    pages = {"max_blocks_per_request": pages_of_request}
    found, stats = served(model, [short], options, **pages)
    # the prompt, and tokens after the first in one routed layer
    assert (found, stats["selectivity"], stats["dense_by_choice"]) == ([dense], 1, LAYERS + 9)
    found, stats = served(model, [short, long], options, **pages)
    assert (found[0], stats["dense_by_choice"]) == (dense, LAYERS)
    assert stats["selectivity"] < 1


def test_masks_are_not_wider_than_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense prompts have none, and short ones do not get the width of a long one in the same
    pass.
    """
    masks, operation = list[tuple[int, ...] | None](), passes.paged_block_sparse_attention

    def seen(q: Any, cache: Any, cu_queries: Any, mask: Any, **options: Any) -> Any:
        masks.append(None if mask is None else tuple(mask.shape))
        return operation(q, cache, cu_queries, mask, **options)

    monkeypatch.setattr(passes, "paged_block_sparse_attention", seen)
    model, prompts = tiny_model(), prompts_of(*[3 + i % 5 for i in range(12)], 40, 45, 200)
    expected = [alone(model, prompt) for prompt in prompts]
    attached = {"gate": gate_for(model), "select": EVERY_BLOCK, "dense_below": 20}
    found, stats = served(model, prompts, attached)
    assert (found, stats["dense_by_choice"]) == (expected, 12 * LAYERS)
    heads = model.config.num_attention_heads
    assert Counter(masks) == dict.fromkeys([None, (2, heads, 3, 1), (1, heads, 13, 1)], LAYERS)


def test_dynamic_rope_falls_back_to_dense_chunks() -> None:
    """Keys of decoded tokens are not known before RoPE if angles depend on the length; those of
    prompts were pooled.
    """
    model, (prompt,) = tiny_model(rope="dynamic"), prompts_of(5 * PAGE - 4)
    follow_up = [*prompt, *alone(model, prompt), *prompt[:20]]
    dense = [alone(model, each) for each in (prompt, follow_up)]
    with attach(model, gate=gate_for(model), select=EVERY_BLOCK) as sparse:
        config = sparse.batching_config(page_size=PAGE, num_blocks=64, max_batch_tokens=4 * BLOCK)
        with model.continuous_batching_context_manager(
            GREEDY, continuous_batching_config=config
        ) as manager:
            for ids, expected, fallbacks in zip(
                (prompt, follow_up), dense, (0, LAYERS), strict=True
            ):
                assert answer(manager, ids).generated_tokens == expected
                assert sparse.stats()["dense_fallbacks"] == fallbacks


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_cuda_graphs_give_the_tokens_of_dense_generate(cuda_graphs: bool) -> None:
    """Passes are padded, and decoded tokens replay graphs; the warm-up of transformers counts
    nowhere.
    """
    model, prompts = tiny_model(), ragged(12)
    model.to("cuda")
    expected = [alone(model, prompt) for prompt in prompts]
    with attach_reading_all(model, cuda_graphs=cuda_graphs) as sparse:
        assert (
            together(model, sparse, prompts, max_batch_tokens=75, max_requests_per_batch=8)
            == expected
        )
        stats = sparse.stats()
    assert (stats["sparsity"], stats["selectivity"], stats["dense_fallbacks"]) == (0, 1, 0)
    attached = {"gate": gate_for(model), "select": HALF, **ROUTED}
    _, stats = served(model, prompts, attached, max_requests_per_batch=8)
    assert 0.2 < stats["sparsity"] < 0.5
    assert 0.3 < stats["selectivity"] < 1


@pytest.mark.gpu
def test_a_gpu_that_others_keep_busy() -> None:
    """Tokens are right where other processes delay the work of this one."""
    model, prompts = tiny_model(), ragged(12)
    model.to("cuda")
    expected = [alone(model, prompt) for prompt in prompts]
    others = [
        subprocess.Popen([sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE) for _ in range(3)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        for _ in range(5):
            with attach_reading_all(model) as sparse:
                assert (
                    together(model, sparse, prompts, max_batch_tokens=75, max_requests_per_batch=8)
                    == expected
                )
    finally:
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.gpu
def test_short_sequences_in_a_graph_read_every_key() -> None:
    model, (short, long) = tiny_model(), prompts_of(40, 190)
    model.to("cuda")
    dense = alone(model, short)
    attached = {**ROUTED, "recent": 8, "dense_below": 100}
    found, stats = served(model, [short, long], attached)
    assert found[0] == dense
    assert stats["selectivity"] < 1


def test_shares_of_the_keys(events: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are chosen by density: with a threshold that all reach, tokens are those of dense
    attention.

    The sizes of buckets are kept while sequences come and go, share pages and are preempted, and
    equal those of a new count.
    """
    model, prompts = tiny_model(), ragged(10)
    router = QModel(random_partition(), 2, 8).requires_grad_(False).eval()
    router.thresholds = KeyThresholds([0.1, 0.5], [1.1, 1e-9])
    expected = [alone(model, prompt) for prompt in prompts]
    count, new = BucketSizes.count, []

    def compared(self: BucketSizes, layer: int, *where: Tensor) -> Tensor:
        sizes = count(self, layer, *where)
        assert torch.equal(sizes, paged_bucket_sizes(*where[:3], num_buckets=BUCKETS))
        new.append(where[2] - where[3])
        return sizes

    monkeypatch.setattr(BucketSizes, "count", compared)
    options: dict[str, Any] = {
        "qmodel": router,
        "recent": 8,
        "sink": 1,
        "dense_layers": (),
        "dense_below": 0,
    }
    pages = {"page_size": BLOCK, "num_blocks": 15, "max_batch_tokens": 75, "safety_margin": 0.0}
    found, stats = served(model, prompts, options | {"keys": 0.5}, **pages)
    assert (found, stats["selectivity"]) == (expected, 1)
    assert events["shared"] > 0
    assert events["preempted"] > 0
    counted = torch.cat(new).tolist()
    assert counted.count(1) > len(counted) / 2  # most sequences go on from their last pass
    assert max(counted) > 1
    _, stats = served(model, prompts, options | {"keys": 0.1})
    assert 0.1 < stats["selectivity"] < 0.9

"""Passes after cached tokens: chunked prefill, further turns, draft tokens, and caches that were
filled without msattn.
"""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores, pool_keys
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, tap
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.contiguous.layers import GrowingLayer
from tests.factory import (
    FAMILIES,
    ROPE_TYPES,
    left_padded,
    positions_of,
    random_partition,
    random_tokens,
    tiny_model,
)
from tests.sparse import (
    BLOCK,
    HALF,
    LAYERS,
    attach_reading_all,
    by_pooled_scores,
    gate_for,
    run_in_passes,
)

TRAINING_FREE = ("quest", "mean_pool", "sink_local", "oracle")
MODELS = [*zip(cycle(FAMILIES), ROPE_TYPES, strict=False)]  # each type of RoPE, families in turn


@pytest.mark.parametrize(
    ("family", "rope", "scores"),
    [
        *((*model, "gate") for model in MODELS),
        *(("llama", "default", each) for each in TRAINING_FREE),
    ],
)
@torch.no_grad()
def test_chunked_prefill_reads_the_blocks_of_one_pass(family: str, rope: str, scores: str) -> None:
    model, ids = tiny_model(family, rope), random_tokens(2, 10 * BLOCK)
    select = (
        by_pooled_scores(model)
        if scores == "gate"
        else SelectConfig(sparsity=0.5, scores=scores, block_size=BLOCK)
    )
    with attach(model, select=select) as sparse:
        expected = model(ids).logits
        once = sparse.stats()["sparsity"]
    assert not torch.allclose(expected, model(ids).logits, atol=1e-3)
    with attach(model, select=select) as sparse:
        found = run_in_passes(model, ids, [4 * BLOCK, BLOCK, 5 * BLOCK])
        stats = sparse.stats()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert stats["dense_fallbacks"] == 0
    assert stats["sparsity"] > 0.79 * once


@pytest.mark.parametrize(
    "sizes", [{"block_size": 32, "key_block_size": 16}, {"block_size": 64, "key_block_size": 16}]
)
@torch.no_grad()
def test_chunks_read_the_blocks_of_one_pass_with_fewer_keys_than_queries(
    sizes: dict[str, int],
) -> None:
    model, ids = tiny_model(), random_tokens(2, 213)
    gate = Gate.build(model.config, GateConfig(**sizes)).requires_grad_(False)
    select = Selection(TopK(sparsity=0.6), GateScores(gate, last_block="pooled"), AlwaysRead(0, 0))
    with attach(model, select=select) as sparse:
        expected = model(ids).logits
        once = sparse.stats()["sparsity"]
    assert once > 0.3
    with attach(model, select=select) as sparse:
        found = run_in_passes(model, ids, [64, 64, 85])
        assert sparse.stats()["dense_fallbacks"] == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_only_the_last_block_of_a_chunk_reads_otherwise() -> None:
    model, ids = tiny_model(num_hidden_layers=1), random_tokens(1, 10 * BLOCK)
    with attach(model, gate=gate_for(model), select=HALF):
        once, chunked = model(ids).logits, run_in_passes(model, ids, [6 * BLOCK, 4 * BLOCK])
    same = torch.isclose(chunked, once, rtol=1e-4, atol=1e-4).all(-1)[0].view(-1, BLOCK).all(-1)
    assert same.tolist() == [True] * 5 + [False] + [True] * 4


@torch.no_grad()
def test_gates_of_rotated_keys_read_cached_tokens_densely() -> None:
    """Caches pool keys before RoPE."""
    model, ids = tiny_model(), random_tokens(1, 10 * BLOCK)
    gate = Gate.build(model.config, GateConfig(block_size=BLOCK, rope="model"))
    with attach(model, gate=gate, select=HALF) as sparse:
        run_in_passes(model, ids, [6 * BLOCK, 4 * BLOCK])
        assert sparse.stats()["dense_fallbacks"] == LAYERS


@torch.no_grad()
def test_the_last_queries_of_a_pass_can_read_every_block() -> None:
    """The last 20 of 75 tokens are in the last two blocks; a pass of as few tokens is dense by
    choice.
    """
    model, ids = tiny_model(num_hidden_layers=1), random_tokens(1, 4 * BLOCK + 11)
    dense = model(ids).logits
    with attach(
        model, gate=gate_for(model), select=replace(HALF, sparsity=0.9, dense_queries=20)
    ) as sparse:
        same = torch.isclose(model(ids).logits, dense, rtol=1e-4, atol=1e-4).all(-1)[0]
        assert same[3 * BLOCK :].all()
        assert not same[BLOCK : 3 * BLOCK].all()
        assert sparse.stats()["dense_by_choice"] == 0
        torch.testing.assert_close(
            run_in_passes(model, ids, [3 * BLOCK + 7, 20])[:, -20:],
            dense[:, -20:],
            rtol=1e-4,
            atol=1e-4,
        )
        assert sparse.stats()["dense_by_choice"] == 1


@pytest.mark.parametrize(
    ("family", "rope"), [(family, rope) for family, rope in MODELS if rope != "dynamic"]
)
@torch.no_grad()
def test_a_cache_that_was_filled_outside_is_taken_over(family: str, rope: str) -> None:
    model, ids = tiny_model(family, rope), random_tokens(1, 120)
    select, router = SelectConfig(sparsity=0.5), random_partition()
    options: dict[str, Any] = {"qmodel": router, "probes": 2, "recent": 5, "dense_layers": ()}
    outside, inside = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :70], past_key_values=outside)
    with attach_reading_all(model, qmodel=router):
        model(ids[:, :70], past_key_values=inside)
    found = []
    for cache in (outside, inside):
        with attach(model, gate=gate_for(model), select=select, **options) as sparse:
            token = model(ids[:, 70:71], past_key_values=cache).logits
            turn = model(ids[:, 71:], past_key_values=cache).logits
            stats = sparse.stats()
        assert stats["dense_fallbacks"] == 0
        assert stats["sparsity"] > 0.2
        assert 0 < stats["selectivity"] < 1
        found.append(torch.cat([token, turn], dim=1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_dynamic_rope_cannot_be_inverted_and_is_counted() -> None:
    model, ids = tiny_model("llama", "dynamic"), random_tokens(1, 80)
    expected, cache = model(ids).logits, DynamicCache()
    model(ids[:, :40], past_key_values=cache)
    with attach(
        model, gate=gate_for(model), select=HALF, qmodel=random_partition(), probes=1
    ) as sparse:
        token = model(ids[:, 40:41], past_key_values=cache).logits
        turn = model(ids[:, 41:], past_key_values=cache).logits
        stats = sparse.stats()
    torch.testing.assert_close(
        torch.cat([token, turn], dim=1), expected[:, 40:], rtol=1e-4, atol=1e-4
    )
    assert stats["dense_fallbacks"] == LAYERS + 1, (
        "a turn in each layer, and a token in the layer that is routed"
    )
    assert (stats["sparsity"], stats["selectivity"]) == (0, 1)


@torch.no_grad()
def test_pooled_keys_after_cache_operations() -> None:
    """After tokens, crops and reordering the pooled keys are those of the keys that the cache
    holds.
    """
    model = tiny_model("qwen3")
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (90, 77)])
    seen: list[LayerInputs] = []
    with tap(model, lambda x: seen.append(x) or dense_attention(x)):
        model(ids, attention_mask=mask, position_ids=positions_of(mask))
    x = seen[0]
    expected = pool_keys(
        ["avg", "max", "min", "rope"], x.k_nope, x.k, block_size=BLOCK, start=x.kv_start
    )

    def turn(cache: DynamicCache, begin: int, end: int) -> None:
        options = {
            "attention_mask": mask[:, :end],
            "position_ids": positions_of(mask)[:, begin:end],
        }
        model(ids[:, begin:end], past_key_values=cache, **options)

    with attach_reading_all(model):
        cache = DynamicCache()
        turn(cache, 0, 60)
        turn(cache, 60, 61)
        cache.crop(40 - 61)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        turn(cache, 40, 41)
        turn(cache, 41, 90)
    layer: Any = cache.layers[0]
    assert isinstance(layer, GrowingLayer)
    (pooled,) = layer.pooled.values()
    pools, complete = pooled.pools, pooled.complete
    assert complete == 77 // BLOCK
    order = {"avg": 0, "max": 1, "min": 2, "rope": 3}
    assert pools[-1] == "rope"
    parts = expected.unflatten(-1, (4, -1))[:, :, :complete]
    wanted = torch.cat([parts[..., order[pool], :] for pool in pools], dim=-1)
    torch.testing.assert_close(pooled.blocks, wanted, rtol=1e-4, atol=1e-4)

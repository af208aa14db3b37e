"""Generation over the cache: reordered rows, drafts, padded batches, static caches, turns, recorded
gradients.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer
from tests.factory import (
    FAMILIES,
    left_padded,
    positions_of,
    random_partition,
    random_tokens,
    tiny_model,
)
from tests.serving.decoding import ALL_BUCKETS, ROUTED, check_steps, close, generate
from tests.sparse import NEAREST_HALF, gate_for


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2, "output_logits": False},
        {"num_return_sequences": 3, "do_sample": True},
    ],
)
def test_rows_that_are_repeated_and_reordered(
    options: dict[str, Any], where: str, small_buffers: None
) -> None:
    model = tiny_model().to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (40, 33)])
    arguments = {"max_new_tokens": 30, "do_sample": False, **options}

    def run() -> Tensor:
        torch.manual_seed(0)
        return model.generate(ids.to(where), attention_mask=mask.to(where), **arguments).cpu()

    dense = run()
    with attach(model, **ALL_BUCKETS) as sparse:
        assert torch.equal(run(), dense)
        check_steps(sparse, where, 29)
        assert sparse.stats()["selectivity"] == 1


def of_density(density: float) -> dict[str, Any]:
    """Options for a share of the keys: buckets are chosen by this density; a tiny one admits every
    bucket.
    """
    router = QModel(random_partition(), 2, 16).requires_grad_(False).eval()
    router.thresholds = KeyThresholds([0.2], [density])
    return {**ROUTED, "qmodel": router, "probes": None, "keys": 0.2}


@torch.no_grad()
@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant"])
@pytest.mark.parametrize(
    ("everything", "some"),
    [(ALL_BUCKETS, ROUTED), (of_density(1e-9), of_density(1.2))],
    ids=["probes", "keys"],
)
def test_drafts_are_verified_with_routed_queries(
    drafts: str, everything: Any, some: Any, where: str
) -> None:
    model = tiny_model(max_position_embeddings=1024).to(where)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if drafts == "assistant":
        options = {"assistant_model": tiny_model(seed=1, max_position_embeddings=1024).to(where)}
    ids = random_tokens(1, 150).to(where)
    plain = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dense = model.generate(ids, **plain)
    for sparsity, router in ((0.0, everything), (0.5, some)):
        with attach(
            model, gate=gate_for(model), select=SelectConfig(sparsity=sparsity), **router
        ) as sparse:
            drafted, stats = model.generate(ids, **plain, **options), sparse.stats()
        assert stats["dense_fallbacks"] == 0
        assert torch.equal(drafted, dense) == (sparsity == 0)
        assert stats["selectivity"] == 1 if sparsity == 0 else 0.1 < stats["selectivity"] < 0.9


@torch.no_grad()
@pytest.mark.parametrize("dense_below", [0, 40])
def test_rows_of_a_batch_are_read_as_alone(dense_below: int, where: str) -> None:
    """A row that is too short for buckets reads all of its keys, however long the others are; its
    padding does not count.
    """
    model, rows = tiny_model().to(where), [random_tokens(1, n, seed=n)[0] for n in (70, 12)]
    ids, mask = left_padded(rows)
    blocks: dict[str, Any] = (
        {} if dense_below else {"gate": gate_for(model), "select": NEAREST_HALF}
    )
    with attach(model, **ROUTED, **blocks, dense_below=dense_below):
        batch = generate(model, ids, mask)
        for number, row in enumerate(rows):
            close(batch[:, number], generate(model, row[None])[:, 0])


@torch.no_grad()
def test_several_new_tokens_of_padded_rows_are_read_as_alone(where: str) -> None:
    model, rows = tiny_model().to(where), [random_tokens(1, n, seed=n)[0] for n in (90, 70)]
    ids, mask = left_padded(rows)
    ids, mask = ids.to(where), mask.to(where)
    new = random_tokens(2, 5).to(where)

    def logits(prompt: Tensor, added: Tensor, given: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(prompt, attention_mask=given, position_ids=positions_of(given), past_key_values=cache)
        whole = torch.cat([given, torch.ones_like(added)], 1)
        positions = positions_of(whole)[:, -5:]
        return model(
            added, attention_mask=whole, position_ids=positions, past_key_values=cache
        ).logits

    with attach(model, **ROUTED):
        batch = logits(ids, new, mask)
        for number, row in enumerate(rows):
            alone = row[None].to(where)
            own = logits(alone, new[number : number + 1], torch.ones_like(alone))
            close(batch[number], own[0])


@torch.no_grad()
def test_pad_tokens_in_a_text_are_tokens(where: str) -> None:
    """Also those that an attached assistant generates; padding is what stands before a text."""
    model = tiny_model().to(where)
    assistant = tiny_model(seed=1).to(where)
    ids = random_tokens(1, 50).to(where)
    plain = {"max_new_tokens": 20, "do_sample": False}
    given = model.generate(ids, **plain, attention_mask=torch.ones_like(ids))
    pad = int(given[0, 55])
    assistant.generation_config.pad_token_id = model.generation_config.pad_token_id = pad
    with attach(assistant, **ROUTED):
        drafted = model.generate(
            ids, **plain, attention_mask=torch.ones_like(ids), assistant_model=assistant
        )
    assert torch.equal(drafted, given)
    text = torch.cat([torch.full_like(ids[:, :7], pad), given], 1)
    mask = (torch.arange(text.shape[1], device=where) >= 7).long()[None]
    expected = model.generate(text, **plain, attention_mask=mask)
    with attach(model, **ALL_BUCKETS):
        assert torch.equal(model.generate(text, **plain), expected)
        right = torch.cat([text, text.flip(1)])
        right[0, -3:] = pad
        with pytest.raises(UserError, match="left padding only"):
            model.generate(right, **plain)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_static_caches(family: str, where: str) -> None:
    model = tiny_model(family).to(where)
    ids = random_tokens(2, 60)
    dense = generate(model, ids)
    with attach(
        model, gate=gate_for(model), select=SelectConfig(sparsity=0.0), **ALL_BUCKETS
    ) as sparse:
        close(generate(model, ids, cache_implementation="static"), dense)
        own = StaticCache(config=model.config, max_cache_len=90)
        close(generate(model, ids, past_key_values=own), dense)
        layer: Any = own.layers[1]
        assert layer.key_buffer.length == 79
        assert sparse.stats()["dense_fallbacks"] == 0
        assert sparse.stats()["selectivity"] == 1
    filled = StaticCache(config=model.config, max_cache_len=100)
    model(ids[:, :59].to(where), past_key_values=filled)
    static: Any = filled.layers[1]
    address = static.keys.data_ptr()
    with attach(model, **ALL_BUCKETS):
        close(generate(model, ids, past_key_values=filled), dense)
        layer: Any = filled.layers[1]
        assert layer.keys.data_ptr() == address, "the memory that the user allocated is used"


@torch.no_grad()
def test_turns_over_one_cache(where: str, small_buffers: None) -> None:
    """Chunked prompt, tokens, crop, another turn, another batch: the steps are those of the cache
    as it is then.
    """
    model = tiny_model(max_position_embeddings=1024).to(where)
    text = random_tokens(1, 300).to(where)
    dense = model(text).logits
    cache = DynamicCache(config=model.config)
    with attach(
        model, gate=gate_for(model), select=SelectConfig(sparsity=0.0), **ALL_BUCKETS
    ) as sparse:
        pieces = [
            model(part, past_key_values=cache).logits for part in text[:, :96].split(48, dim=1)
        ]
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(96, 120)]
        cache.crop(-10)
        pieces = [torch.cat(pieces, dim=1)[:, :110]]
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(110, 130)]
        pieces.append(model(text[:, 130:230], past_key_values=cache).logits)
        shared = copy.deepcopy(cache)
        own, twin = cache.layers[1], shared.layers[1]
        assert isinstance(own, BucketLayer)
        assert isinstance(twin, BucketLayer)
        assert own.partition is twin.partition
        assert own.bucket_buffer is not twin.bucket_buffer
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(230, 260)]
        close(torch.cat(pieces, dim=1), dense[:, :260])
        shared.batch_repeat_interleave(2)
        both = [
            model(text[:, i : i + 1].expand(2, -1), past_key_values=shared).logits
            for i in range(230, 250)
        ]
        close(torch.cat(both, dim=1), dense[:, 230:250].expand(2, -1, -1))
        assert sparse.stats()["dense_fallbacks"] == 0
        assert sparse.stats()["selectivity"] == 1


@pytest.mark.parametrize("trained", ["model.layers.1.self_attn.k_proj", "model"])
def test_few_tokens_with_gradients_are_dense(where: str, trained: str) -> None:
    model = tiny_model().to(where).requires_grad_(False)
    model.get_submodule(trained).requires_grad_(True)
    ids = random_tokens(1, 70).to(where)
    cache = DynamicCache(config=model.config)
    with attach(model, **ROUTED) as sparse:
        with torch.no_grad():
            model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:], past_key_values=cache).logits.sum().backward()
        assert sparse.stats()["dense_fallbacks"] == 1
    assert model.model.layers[1].self_attn.k_proj.weight.grad is not None

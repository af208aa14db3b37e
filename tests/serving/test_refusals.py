"""Caches, prompts and calls that are refused by name, or left to the model."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from msattn.trainer.errors import UserError
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.input_checks import check_inputs
from tests.factory import random_tokens, tiny_config, tiny_model
from tests.serving.decoding import ROUTED


@torch.no_grad()
def test_caches_that_cannot_be_taken_over_are_named() -> None:
    model, ids = tiny_model(), random_tokens(1, 40)
    sliding = DynamicCache(config=transformers.MistralConfig(num_hidden_layers=2, sliding_window=8))
    sliding.update(torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16), 0)
    caches = {
        "an offloaded cache": DynamicCache(config=model.config, offloading=True),
        "DynamicCache with layers of type DynamicSlidingWindowLayer": sliding,
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
    }
    with attach(model, select="quest"):
        for name, cache in caches.items():
            with pytest.raises(
                UserError, match=f"past_key_values: {name}.*expected a DynamicCache or StaticCache"
            ):
                model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_has_as_many_positions_as_its_owner_gave_it() -> None:
    model, ids = tiny_model(), random_tokens(1, 60)
    cache = StaticCache(config=model.config, max_cache_len=60)
    with attach(model, **ROUTED):
        with pytest.raises(UserError, match="max_cache_len=59: 60 tokens need as many positions"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=59))
        model(ids, past_key_values=cache)
        with pytest.raises(UserError, match="max_cache_len=60: 61 tokens"):
            model(ids[:, :1], past_key_values=cache)
    with (
        attach(model, select="quest"),
        pytest.raises(UserError, match="max_cache_len=60: 61 tokens"),
    ):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_prompt_beyond_the_positions_is_refused() -> None:
    model = tiny_model()
    with attach(model, select="quest"):
        with pytest.raises(
            UserError, match="prompt of 257 tokens: the model has positions for 256"
        ):
            model(random_tokens(1, 257))
        cache = DynamicCache(config=model.config)
        model(random_tokens(1, 200), past_key_values=cache)
        with pytest.raises(UserError, match="prompt of 57 tokens after 200 cached ones"):
            model(random_tokens(1, 57), past_key_values=cache)
        assert cache.get_seq_length() == 200


@torch.no_grad()
def test_ids_masks_and_caches_of_another_shape() -> None:
    model, ids = tiny_model(), random_tokens(2, 40)
    past = DynamicCache(config=model.config)
    deeper = DynamicCache(config=tiny_config(num_hidden_layers=3))
    model(ids, past_key_values=past)
    inputs: dict[str, dict[str, Any]] = {
        "input_ids: 128 is no token; expected 0 to 127": {"input_ids": ids + 128 - ids.max()},
        "input_ids: -1 is no token": {"input_ids": ids - ids.min() - 1},
        r"input_ids of float32 \[2, 40\]: expected int64 \[batch, tokens\]": {
            "input_ids": ids.float()
        },
        r"inputs_embeds of float64 \[2, 40, 64\]: expected float32": {
            "inputs_embeds": torch.zeros(2, 40, 64).double()
        },
        r"attention_mask of int64 \[1, 40\]: expected a 2D mask \[2, 40\]": {
            "input_ids": ids,
            "attention_mask": ids[:1],
        },
        r"position_ids of type list: expected integers \[2, 40\]": {
            "input_ids": ids,
            "position_ids": ids.tolist(),
        },
        r"it holds \[2, 2, 40, 16\] .*; expected \[1, 2, 40, 16\]": {
            "input_ids": ids[:1],
            "past_key_values": past,
        },
        "it has 3 layers; expected 2": {"input_ids": ids, "past_key_values": deeper},
    }
    with attach(model, select="quest"):
        for message, arguments in inputs.items():
            with pytest.raises(UserError, match=message):
                model(**arguments)


@pytest.mark.gpu
def test_ids_of_single_tokens_are_not_read() -> None:
    decoder, ids = tiny_model().get_decoder().to("cuda"), random_tokens(2, 3).to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        check_inputs(decoder, {"input_ids": ids[:, :1]}, cached=5)
        with pytest.raises(RuntimeError, match="synchroniz"):
            check_inputs(decoder, {"input_ids": ids}, cached=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@torch.no_grad()
def test_a_capacity_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().to("cuda")
    with attach(model, select="quest"):
        model(random_tokens(1, 10).to("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
        with pytest.raises(
            UserError,
            match=r"a cache of 1,280 positions for 3 sequences needs [\d,]+ bytes more, and 0",
        ):
            model(random_tokens(3, 100).to("cuda"))


@torch.no_grad()
def test_other_outputs_and_other_calls(where: str) -> None:
    model = tiny_model().to(where)
    ids, cache = random_tokens(1, 60).to(where), DynamicCache(config=model.config)
    with attach(model, **ROUTED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ids[:, :50], past_key_values=cache)
        assert model.model(ids[:, 50:51], past_key_values=cache, return_dict=False)[0].shape == (
            1,
            1,
            64,
        )
        model.config.output_hidden_states = True
        assert len(model(ids[:, 51:52], past_key_values=cache).hidden_states) == 3
        model.config.output_hidden_states = False
        assert model(
            ids[:, 52:53], past_key_values=cache, output_hidden_states=False
        ).logits.shape == (1, 1, 128)
        types = torch.zeros(1, 2, device=where)
        assert model(ids[:, 53:54], past_key_values=cache, token_types=types).logits.shape == (
            1,
            1,
            128,
        )
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        with pytest.raises(UserError, match=r"crop\(20\): expected a negative number"):
            cache.crop(20)
        long = DynamicCache(config=model.config)
        model(random_tokens(1, 250).to(where), past_key_values=long)
        model(ids[:, :10], past_key_values=long)  # a draft may exceed the positions

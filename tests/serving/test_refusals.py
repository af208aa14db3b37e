"""Caches, prompts and calls that are refused by name, or left to the model."""

import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from msattn.trainer.attach import attach
from msattn.trainer.errors import UserError
from tests.factory import random_tokens, tiny_model
from tests.serving.decoding import ROUTED


@torch.no_grad()
def test_caches_that_cannot_be_taken_over_are_named() -> None:
    model, ids = tiny_model(), random_tokens(1, 40)
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    caches = {
        "an offloaded cache": DynamicCache(config=model.config, offloading=True),
        "DynamicCache with layers of type DynamicSlidingWindowLayer": DynamicCache(config=config),
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
    }
    with attach(model, select="quest"):
        for name, cache in caches.items():
            with pytest.raises(UserError, match=f"past_key_values: {name}.*accepted are DynamicCache and StaticCache"):
                model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_prompt_beyond_the_positions_is_refused() -> None:
    model = tiny_model()
    with attach(model, select="quest"):
        with pytest.raises(UserError, match="prompt of 257 tokens: the model has positions for 256"):
            model(random_tokens(1, 257))
        cache = DynamicCache(config=model.config)
        model(random_tokens(1, 200), past_key_values=cache)
        with pytest.raises(UserError, match="prompt of 57 tokens after 200 cached ones"):
            model(random_tokens(1, 57), past_key_values=cache)
        assert cache.get_seq_length() == 200


@pytest.mark.gpu
@torch.no_grad()
def test_a_capacity_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().to("cuda")
    with attach(model, select="quest"):
        model(random_tokens(1, 10).to("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
        with pytest.raises(UserError, match=r"a cache of 1,280 positions for 3 sequences needs [\d,]+ bytes more, and 0"):
            model(random_tokens(3, 100).to("cuda"))


@torch.no_grad()
def test_other_outputs_and_other_calls(where: str) -> None:
    model = tiny_model().to(where)
    ids, cache = random_tokens(1, 60).to(where), DynamicCache(config=model.config)
    with attach(model, **ROUTED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ids[:, :50], past_key_values=cache)
        assert model.model(ids[:, 50:51], past_key_values=cache, return_dict=False)[0].shape == (1, 1, 64)
        model.config.output_hidden_states = True
        assert len(model(ids[:, 51:52], past_key_values=cache).hidden_states) == 3
        model.config.output_hidden_states = False
        assert model(ids[:, 52:53], past_key_values=cache, output_hidden_states=False).logits.shape == (1, 1, 128)
        types = torch.zeros(1, 2, device=where)
        assert model(ids[:, 53:54], past_key_values=cache, token_types=types).logits.shape == (1, 1, 128)
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        with pytest.raises(UserError, match=r"crop\(20\): accepted are negative numbers"):
            cache.crop(20)
        long = DynamicCache(config=model.config)
        model(random_tokens(1, 250).to(where), past_key_values=long)
        model(ids[:, :10], past_key_values=long)  # a draft may exceed the positions

"""Tests of RoPE: the model's frequencies and angles, and the inverse rotation."""

import pytest
import torch

from msattn.trainer.models.rope import cos_sin, inverse_frequencies
from tests.factory import ROPE_TYPES, tiny_config, tiny_model


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_frequencies_equal_the_models(kind: str) -> None:
    model = tiny_model("llama", kind)
    inv_freq, scaling = inverse_frequencies(model.config)
    torch.testing.assert_close(inv_freq, model.base_model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert scaling == pytest.approx(model.base_model.rotary_emb.attention_scaling)


def test_yarn_scales_cos_and_sin() -> None:
    inv_freq, scaling = inverse_frequencies(tiny_config("llama", "yarn"))
    assert scaling == pytest.approx(1.1386, abs=1e-4)
    cos, sin = cos_sin(inv_freq, torch.arange(5))
    assert torch.allclose(cos**2 + sin**2, torch.ones(5, 16))


def test_unknown_rope_types_are_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "proportional"
    with pytest.raises(ValueError, match="rope_type=proportional: accepted are default"):
        inverse_frequencies(config)

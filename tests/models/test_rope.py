"""RoPE: the model's frequencies, and their extension by model.rope_scaling."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from msattn.trainer.models.rope import cos_sin, inverse_frequencies, scale_rope
from tests.factory import ROPE_TYPES, tiny_config, tiny_model

BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = st.floats(1, 64).map(lambda factor: round(factor, 2))


def parameters(kind: str, factor: float) -> dict[str, Any]:
    return {"rope_type": kind, "factor": factor, **(BANDS if kind == "llama3" else {})}


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_frequencies_equal_the_models(kind: str) -> None:
    model = tiny_model("llama", kind)
    inv_freq, scaling = inverse_frequencies(model.config)
    torch.testing.assert_close(inv_freq, model.base_model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert scaling == pytest.approx(model.base_model.rotary_emb.attention_scaling)


@pytest.mark.parametrize(("family", "kind"), [("llama", "dynamic"), ("hunyuan_v1_dense", "linear")])
def test_alpha_without_a_meaning_is_ignored(family: str, kind: str) -> None:
    """It replaces the base of Hunyuan's dynamic RoPE alone."""
    model = tiny_model(
        family,
        rope_parameters={"rope_type": kind, "rope_theta": 100.0, "factor": 2.0, "alpha": 8.0},
    )
    torch.testing.assert_close(
        inverse_frequencies(model.config)[0], model.base_model.rotary_emb.inv_freq
    )


def test_yarn_scales_cos_and_sin() -> None:
    inv_freq, scaling = inverse_frequencies(tiny_config("llama", "yarn"))
    assert scaling == pytest.approx(1.1386, abs=1e-4)
    cos, sin = cos_sin(inv_freq, torch.arange(5))
    assert torch.allclose(cos**2 + sin**2, torch.ones(5, 16))


def test_unknown_rope_types_are_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "axial"
    with pytest.raises(ValueError, match="rope_type=axial: expected default"):
        inverse_frequencies(config)


@settings(max_examples=40)
@given(
    st.sampled_from(["default", "linear", "llama3", "yarn"]),
    st.sampled_from(["linear", "llama3", "yarn"]),
    FACTORS,
)
def test_the_slowest_angle_at_the_last_position_stays(
    before: str, after: str, factor: float
) -> None:
    """The model sees no larger angle of its slowest pair than before, and uses all of them."""
    config = tiny_config(rope=before)
    slowest, positions = inverse_frequencies(config)[0][-1], max_length(config)
    scale_rope(config, parameters(after, factor))
    scaled = inverse_frequencies(config)[0][-1]
    assert (scaled * max_length(config)).item() == pytest.approx(
        (slowest * positions).item(), abs=0.51 * scaled.item()
    )  # rounded


def test_llama3_keeps_its_bands_and_yarn_its_definition() -> None:
    config = tiny_config(rope="llama3")  # factor 4, 256 positions, 64 of pretraining
    unscaled = inverse_frequencies(tiny_config())[0]
    scale_rope(config, parameters("llama3", 16.0))
    assert (
        config.max_position_embeddings,
        config.rope_parameters["original_max_position_embeddings"],
    ) == (1024, 64)
    scaled = inverse_frequencies(config)[0]
    assert torch.equal(scaled[0], unscaled[0]), "pairs that turn often in 64 tokens stay"
    slow = unscaled < 2 * math.pi / 64
    torch.testing.assert_close(scaled[slow], unscaled[slow] / 16)
    scale_rope(config, parameters("yarn", 4.0) | {"original_max_position_embeddings": 100})
    assert config.max_position_embeddings == 400


@pytest.mark.parametrize("factor", [math.nan, "x", None])
def test_factors_that_are_no_numbers_are_refused(factor: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.rope_scaling="):
        scale_rope(tiny_config(), {"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize(
    ("overrides", "positions"),
    [
        (
            [
                "model=llama3",
                "model.rope_scaling={rope_type:llama3,factor:32.0,low_freq_factor:1.0,high_freq_factor:4.0}",
            ],
            524288,
        ),
        (["model=llama3_8b", "model.rope_scaling={rope_type:yarn,factor:4.0}"], 32768),
    ],
)
def test_packaged_models_have_the_positions_of_their_scaling(
    overrides: list[str], positions: int
) -> None:
    cfg = compose("eval", [*overrides, "model.init=random"])
    assert max_length(config_and_tokenizer(cfg.model)[0]) == positions

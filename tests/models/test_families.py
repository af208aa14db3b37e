"""Each family: its queries and keys before RoPE, served and kept layers, and attach that reads
everything.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache, StaticCache

from msattn.kernels.unrotate import unrotate
from msattn.trainer.config import GateConfig, ModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.artifact import Shape
from msattn.trainer.methods.gate.attn_gate import AttnGate, Gate
from msattn.trainer.models.families import (
    FAMILIES,
    attention_layers,
    check_supported,
    family_of,
    output_logits,
    served_layers,
)
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.loading import load
from msattn.trainer.models.rope import Rotation, cos_sin, inverse_frequencies, rotate, scale_rope
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.contiguous.install import can_crop
from tests.factory import FAMILIES as LLAMAS
from tests.factory import (
    OTHER_FAMILIES,
    ROPE_TYPES,
    left_padded,
    random_partition,
    random_tokens,
    save_tokenizer,
    tiny_architecture,
    tiny_config,
    tiny_model,
)
from tests.sparse import BLOCK, BUCKETS, attached, run_in_passes

MIXED = [family for family, keys in OTHER_FAMILIES.items() if "layer_types" in keys]
KEPT = {
    "sliding_attention": "it attends through a sliding window of 24 tokens",
    "linear_attention": "it is linear attention, which caches no keys",
}


@pytest.mark.parametrize(
    ("family", "rope"),
    [*((family, "default") for family in FAMILIES), *(("llama", rope) for rope in ROPE_TYPES[1:])],
)
@torch.no_grad()
def test_queries_and_keys_before_rope(family: str, rope: str) -> None:
    model, seen = tiny_model(family, rope), []
    layout = {"interleaved": family_of(model.config).interleaved}
    rotation = Rotation.of(model.config, torch.device("cpu"))
    assert (rotation is None) == (rope == "dynamic")

    def attend(x: LayerInputs) -> Tensor:
        for before, after in ((x.q_nope, x.q), (x.k_nope, x.k)):
            torch.testing.assert_close(
                rotate(before, x.angles.cos, x.angles.sin, **layout), after, rtol=1e-6, atol=1e-6
            )
            torch.testing.assert_close(
                unrotate(after, x.angles.cos, x.angles.sin, **layout), before, rtol=1e-5, atol=1e-5
            )
        if rotation is not None and x.rotates:
            torch.testing.assert_close(
                rotation.invert(x.k, x.angles.positions), x.k_nope, rtol=1e-5, atol=1e-5
            )
        seen.append(x)
        return dense_attention(x)

    # dynamic RoPE changes its frequencies beyond 256 positions
    ids = random_tokens(2, 300 if rope == "dynamic" else 40)
    expected = model(ids).logits
    with tap(model, attend):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        hidden = run_backbone(model, ids)
    torch.testing.assert_close(output_logits(model, hidden), expected, rtol=1e-4, atol=1e-4)
    assert [x.layer for x in seen[: len(seen) // 2]] == served_layers(model.config)


@pytest.mark.parametrize("family", [*LLAMAS, *OTHER_FAMILIES])
@torch.no_grad()
def test_reading_every_key_gives_dense_attention(family: str) -> None:
    """In a padded prompt, in passes over several tokens and over single ones after it, and in
    ``generate``.
    """
    model = tiny_model(family)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (61, 100)])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    passes = [50, 1, 1, 7, 1, 33, 7]
    tokens, expected = model.generate(ids, **options), run_in_passes(model, ids, passes, mask)
    with attached(model, sparsity=0.0, probes=BUCKETS, measure_recall=True) as sparse:
        assert torch.equal(model.generate(ids, **options), tokens)
        found = run_in_passes(model, ids, passes, mask)
        stats = sparse.stats()
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=1e-4, atol=1e-4)
    assert (stats["dense_fallbacks"], stats["sparsity"], stats["selectivity"]) == (0, 0, 1)
    assert [stats[f"{phase}_recall"] for phase in ("prefill", "decode")] == pytest.approx(
        [1, 1], abs=1e-6
    )
    with attached(model, sparsity=0.5, probes=1) as sparse:
        once = run_in_passes(model, ids, [100], mask)
        parts = run_in_passes(model, ids, [64, 36], mask)
        model.generate(ids, **options)
        stats = sparse.stats()
    assert not torch.allclose(once[mask > 0], expected[mask > 0], atol=1e-2)
    torch.testing.assert_close(parts[1], once[1], rtol=1e-4, atol=1e-4)
    assert 0.2 < stats["sparsity"] < 0.6
    assert stats["selectivity"] < 0.5


@pytest.mark.parametrize("family", MIXED)
def test_mixed_models_serve_full_attention_layers(family: str) -> None:
    config = tiny_config(family)
    assert served_layers(config) == [1]
    kept = [KEPT.get(kind) for kind in config.layer_types]
    if family == "gemma4_text":
        kept[-1] = "it reads the keys of another layer"
    assert [layer.kept for layer in attention_layers(config)] == kept
    check_supported(config)


QWEN = {
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"],
}
OWN_KEYS = {  # of all layers, as in the larger ones of Gemma 4
    "num_kv_shared_layers": 0,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}},
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*((family, {}) for family in MIXED), ("qwen2", QWEN), ("gemma4_text", OWN_KEYS)],
)
@torch.no_grad()
def test_caches_of_mixed_models(family: str, overrides: dict[str, Any]) -> None:
    """Layers that keep their attention keep their cache; beams, drafts and caches that were filled
    outside are served.
    """
    model, ids = tiny_model(family, **overrides), random_tokens(1, 120)
    served, linear = served_layers(model.config), "linear_attention" in model.config.layer_types
    assert len(served) == 1
    expected = model(ids).logits
    beams: dict[str, Any] = {
        "num_beams": 2,
        "max_new_tokens": 5,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    greedy = {**beams, "num_beams": 1}
    chosen, tokens = model.generate(ids, **beams), model.generate(ids, **greedy)
    outside = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=outside)
    assert can_crop(outside) is not linear
    model(ids[:, 20:70], past_key_values=outside)
    assert not can_crop(outside), "the window is full, or tokens are summed"
    with attached(model, sparsity=0.0, probes=BUCKETS) as sparse:
        for cache in (outside, DynamicCache()):
            begin = cache.get_seq_length()
            rest = torch.cat(
                [
                    model(part, past_key_values=cache).logits
                    for part in (ids[:, begin:100], ids[:, 100:])
                ],
                dim=1,
            )
            # sums of chunks
            torch.testing.assert_close(
                rest, expected[:, begin:], rtol=1e-4, atol=2e-3 if linear else 1e-4
            )
            own = model.config.num_hidden_layers - getattr(model.config, "num_kv_shared_layers", 0)
            kinds = {
                type(layer).__name__
                for i, layer in enumerate(cache.layers[:own])
                if i not in served
            }
            assert kinds == {"LinearAttentionLayer" if linear else "DynamicSlidingWindowLayer"}
        assert torch.equal(model.generate(ids, **beams), chosen)
        drafts = {} if linear else {"prompt_lookup_num_tokens": 3}  # transformers refuses them
        assert torch.equal(model.generate(ids, **greedy, **drafts), tokens)
        assert (sparse.stats()["dense_fallbacks"], sparse.stats()["sparsity"]) == (0, 0)
        with pytest.raises(UserError, match="expected a DynamicCache, because some layers keep"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=130))
    torch.testing.assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_artifacts_of_other_layers_are_refused() -> None:
    model = tiny_model("gemma3_text")
    with (
        pytest.raises(
            UserError,
            match=r"qmodel\.layers=0: not accepted: it attends through a sliding window of 24 "
            r"tokens",
        ),
        attach(model, qmodel=random_partition()),
    ):
        pass
    every = Gate(Shape(3, 4, 2, 16), GateConfig(block_size=BLOCK), torch.ones(8), layers=[0, 1, 2])
    message = r"=\[0, 1, 2\]: expected the layers \[1\]"
    with pytest.raises(UserError, match=f"gate.layer_numbers{message}"), attach(model, gate=every):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_FAMILIES)
@torch.no_grad()
def test_folders_load_with_all_their_keys(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), random_tokens(1, 40)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, vocab_size=100)
    loaded = load(ModelConfig(name="own", path=str(tmp_path)), device="cpu")
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.fingerprint == {
        **fingerprint(model, loaded.tokenizer),
        "id": "own",
        "revision": None,
    }
    drawn = ModelConfig(
        name="own", init="random", path=str(tmp_path), architecture=tiny_architecture(family)
    )
    assert load(drawn, device="cpu").fingerprint["config_hash"] == loaded.fingerprint["config_hash"]


def test_every_family_is_tested_and_documented() -> None:
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3", *OTHER_FAMILIES}
    guide = (Path(__file__).parents[2] / "docs/guide/models.md").read_text()
    assert all(f"`{family}`" in guide for family in FAMILIES)


# a part of the channels, neighbors, half of the angles
@pytest.mark.parametrize("family", ["phi3", "glm4", "gpt_oss"])
def test_gates_rotate_channels_as_the_model_does(family: str) -> None:
    """The projection of an untrained gate commutes with the rotation, also of the channels that
    stay.
    """
    config = tiny_config(family)
    gate = Gate.build(config, GateConfig(block_size=BLOCK, q_pool=["avg"], k_pool=["avg"]))
    layer, positions = cast(AttnGate, gate.layers[gate.layer_numbers[0]]), torch.arange(50)[None]
    project = layer.key_weight[0].detach()
    frequencies, _ = inverse_frequencies(config)
    interleaved = family_of(config).interleaved
    x = torch.randn(1, 1, 50, 16)
    rotated = (
        rotate(
            x, *cos_sin(frequencies, positions, interleaved=interleaved), interleaved=interleaved
        )
        @ project.T
    )
    torch.testing.assert_close(
        rotate(x @ project.T, *cos_sin(gate.inv_freq, positions)), rotated, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "glm4", "gpt_oss"])
def test_rope_scaling_keeps_what_is_not_scaled(family: str) -> None:
    config, kind = tiny_config(family), "proportional" if family == "gemma4_text" else "linear"
    before = inverse_frequencies(config)[0]
    sliding = config.rope_parameters.get("sliding_attention")
    scale_rope(config, {"rope_type": kind, "factor": 8.0})
    after, scaling = inverse_frequencies(config)
    embedding: Any = tiny_model(family, rope_parameters=config.rope_parameters).model.rotary_emb
    own = getattr(embedding, "full_attention_inv_freq", None)
    torch.testing.assert_close(after, embedding.inv_freq if own is None else own)
    assert (len(after), scaling) == (len(before), 1.0)
    assert config.rope_parameters.get("sliding_attention") == sliding
    if kind == "proportional":
        with pytest.raises(
            UserError, match="rope_type=yarn: expected proportional, the model's own"
        ):
            scale_rope(config, {"rope_type": "yarn", "factor": 8.0})


@torch.no_grad()
def test_longrope_has_other_angles_in_long_sequences() -> None:
    """Keys of the cache have the angles of their pass, which are not known later."""
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **factors}
    model = tiny_model("phi3", rope_parameters=rope, sliding_window=None)
    ids = random_tokens(1, 100)
    default, _ = inverse_frequencies(tiny_config("phi3"))
    torch.testing.assert_close(inverse_frequencies(model.config)[0], default / 4)
    assert Rotation.of(model.config, torch.device("cpu")) is None
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "do_sample": False,
    }
    tokens = model.generate(ids, **options)
    with attached(model, sparsity=0.0, probes=BUCKETS) as sparse:
        assert torch.equal(model.generate(ids, **options), tokens)
        assert (sparse.stats()["dense_fallbacks"], sparse.stats()["selectivity"]) == (0, 1)
    with pytest.raises(UserError, match="long_factor has 3 numbers; expected 4"):
        check_supported(tiny_config("glm4", rope_parameters=rope | {"long_factor": [4.0] * 3}))


VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "vision"),
    [
        ("gemma3", "gemma3_text", "siglip_vision_model"),
        ("llava", "llama", "clip_vision_model"),
        ("gemma4", "gemma4_text", "gemma4_vision"),
        ("mistral3", "ministral3", "pixtral"),
        ("qwen3_5", "qwen3_5_text", "qwen3_5_vision"),
    ],
)
@torch.no_grad()
def test_models_with_images_are_served_on_text(kind: str, text: str, vision: str) -> None:
    parts = {
        "text_config": tiny_architecture(text),
        "vision_config": {"model_type": vision, **VISION},
        "audio_config": None,
    }
    config = AutoConfig.for_model(kind, **parts, image_token_index=127, image_token_id=127)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    ids, mask = left_padded([random_tokens(1, n, seed=n, vocab_size=120)[0] for n in (61, 100)])
    expected = model(input_ids=ids, attention_mask=mask).logits
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(ids, **options)
    with attached(model, sparsity=0.0, probes=BUCKETS) as sparse:
        found = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(model.generate(ids, **options), tokens)
        stats = sparse.stats()
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=1e-4, atol=1e-4)
    assert (stats["dense_fallbacks"], stats["sparsity"], stats["selectivity"]) == (0, 0, 1)
    with attached(model, sparsity=0.5, probes=1) as sparse:
        model.generate(ids, **options)
        assert sparse.stats()["sparsity"] > 0.3
        if kind == "qwen3_5":
            positions = (
                torch.arange(100).expand(4, 2, 100) * torch.tensor([1, 1, 2, 1])[:, None, None]
            )
            with pytest.raises(UserError, match="positions in height and width, are not supported"):
                model(input_ids=ids, position_ids=positions)
        if kind == "gemma3":
            with pytest.raises(UserError, match="images whose tokens see each other"):
                model(input_ids=ids, attention_mask=mask, token_type_ids=torch.ones_like(ids))
    assert model.config.get_text_config()._attn_implementation == "sdpa"

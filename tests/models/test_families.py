"""Each family: its queries and keys before RoPE, served and kept layers, and attach that reads everything."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.attach import attach
from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import (
    FAMILIES,
    attention_layers,
    check_supported,
    family_of,
    output_logits,
    served_layers,
)
from msattn.trainer.models.rope import Rotation, rotate, unrotate
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.seer.gate import Gate
from tests.factory import OTHER_FAMILIES, left_padded, random_tokens, tiny_config, tiny_model

BLOCK, BUCKETS = 16, 6
MIXED = [family for family, keys in OTHER_FAMILIES.items() if "layer_types" in keys]


def gate_for(model: Any) -> Gate:
    return Gate.build(model.config, GateConfig(block_size=BLOCK)).requires_grad_(False)


def partition_for(model: Any) -> KMeans:
    layers = served_layers(model.config)
    centroids = torch.randn(len(layers), 2, BUCKETS, 16, generator=torch.Generator().manual_seed(0))
    return KMeans(torch.nn.functional.normalize(centroids, dim=-1), layers)


def attached(model: Any, *, sparsity: float, probes: int) -> Any:
    select = SelectConfig(sparsity=sparsity, dense_below=0)
    window: dict[str, Any] = {"recent": 1, "sink": 0, "dense_layers": ()}
    return attach(model, gate=gate_for(model), select=select, qmodel=partition_for(model), probes=probes, **window)


def run_in_passes(model: Any, ids: Tensor, lengths: list[int], mask: Tensor) -> Tensor:
    """Returns the logits of ``ids``, which are read in passes of the given lengths over one cache."""
    cache, parts, positions = DynamicCache(config=model.config), ids.split(lengths, dim=1), (mask.cumsum(-1) - 1).clamp(min=0)
    logits, end = [], 0
    for part in parts:
        begin, end = end, end + part.shape[1]
        place = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        logits.append(model(part, past_key_values=cache, **place).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
@torch.no_grad()
def test_queries_and_keys_before_rope(family: str) -> None:
    model, seen = tiny_model(family), []
    layout = {"interleaved": family_of(model.config).interleaved}
    rotation = Rotation.of(model.config, torch.device("cpu"))
    assert rotation is not None

    def attend(x: LayerInputs) -> Tensor:
        for before, after in ((x.q_nope, x.q), (x.k_nope, x.k)):
            torch.testing.assert_close(rotate(before, x.cos, x.sin, **layout), after, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(unrotate(after, x.cos, x.sin, **layout), before, rtol=1e-5, atol=1e-5)
        if x.rotates:
            torch.testing.assert_close(rotation.invert(x.k, x.positions), x.k_nope, rtol=1e-5, atol=1e-5)
        seen.append(x)
        return dense_attention(x)

    ids = random_tokens(2, 40)
    expected = model(ids).logits
    with tap(model, attend):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        hidden = run_backbone(model, ids)
    torch.testing.assert_close(output_logits(model, hidden), expected, rtol=1e-4, atol=1e-4)
    assert [x.layer for x in seen[: len(seen) // 2]] == served_layers(model.config)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
@torch.no_grad()
def test_reading_every_key_gives_dense_attention(family: str) -> None:
    """In a padded prompt, in passes over several tokens and over single ones after it, and in ``generate``."""
    model = tiny_model(family)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (61, 100)])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    tokens, expected = model.generate(ids, **options), run_in_passes(model, ids, [100], mask)
    with attached(model, sparsity=0.0, probes=BUCKETS) as sparse:
        assert torch.equal(model.generate(ids, **options), tokens)
        found = run_in_passes(model, ids, [50, 1, 1, 7, 1, 33, 7], mask)
        stats = sparse.stats()
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=1e-4, atol=1e-4)
    assert (stats["dense_fallbacks"], stats["sparsity"], stats["selectivity"]) == (0, 0, 1)
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
    kept = "it attends through a sliding window of 24 tokens"
    assert [layer.kept for layer in attention_layers(config)] == [kept, None, kept]
    check_supported(config)


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3", *OTHER_FAMILIES}


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("deepseek_v3", {}, "multi-head latent attention"),
    ],
)
def test_refusals(family: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_supported(tiny_config(family, **overrides))

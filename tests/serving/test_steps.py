"""Decoding steps with lengths on the device: the results of ordinary passes, with and without CUDA
graphs.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import ModelWarning
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.models.tap import LayerTap
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.graphs.capture import Step
from msattn.trainer.serving.graphs.fused import fused
from tests.factory import FAMILIES, OTHER_FAMILIES, left_padded, random_tokens, tiny_model
from tests.methods.gate.random_gates import random_decode_gate
from tests.serving.decoding import ALL_BUCKETS, ROUTED, check_steps, close, generate
from tests.sparse import BUCKETS, attached, gate_for

MOSTLY_SLOW = [
    FAMILIES[0],
    *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:]),
]


@torch.no_grad()
@pytest.mark.parametrize("family", MOSTLY_SLOW)
def test_all_buckets_are_dense_attention(family: str, where: str) -> None:
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (70, 41)])
    dense = generate(model, ids, mask)
    with attach(model, **ALL_BUCKETS) as sparse:
        close(generate(model, ids, mask), dense)
        check_steps(sparse, where, 19)
        assert sparse.stats()["selectivity"] == 1
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.0)) as sparse:
        close(generate(model, ids, mask), dense)
        check_steps(sparse, where, 19)


def decode_gate(**reads: Any) -> dict[str, Any]:
    gate = random_decode_gate(std=1.0)
    gate.thresholds = KeyThresholds([0.1, 0.5], [2.0, 1.0])
    return ROUTED | {"qmodel": gate, "probes": None, "recent": 20, "sink": 2} | reads


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(pytest.param(family, ROUTED, marks=pytest.mark.slow) for family in FAMILIES[1:]),
        *(
            ("llama", options)
            for options in (
                ROUTED,
                decode_gate(probes=1),
                decode_gate(keys=0.2),
                decode_gate(threshold=0.3),
            )
        ),
    ],
)
def test_steps_equal_ordinary_passes(
    family: str,
    options: dict[str, Any],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    small_buffers: None,
) -> None:
    """With few buckets or blocks, through growth of the buffers and new indices."""
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (50, 41)])
    with attach(model, **options) as sparse:
        steps, read = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
        check_steps(sparse, where, 149 - 2)  # the index was rebuilt twice
    monkeypatch.setattr(Step, "device_type", "none")
    with attach(model, **options) as sparse:
        ordinary, expected = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
    close(steps, ordinary)
    assert read["selectivity"] == pytest.approx(expected["selectivity"], rel=1e-6)
    assert 0.1 < read["selectivity"] < 0.9
    assert expected["graph_steps"] + expected["eager_steps"] == 0


@torch.no_grad()
def test_fused_passes_keep_nothing_for_the_original_pass(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute queries and keys before RoPE themselves, for a prompt and for new tokens."""
    model, kept = tiny_model().to(where), list[str]()
    for name in ("keep", "_enter"):
        monkeypatch.setattr(LayerTap, name, lambda *args, name=name: kept.append(name))
    with attach(model, **ROUTED) as sparse:
        tap = vars(model.model.layers[1].self_attn)["forward"].tap
        attend = sparse.attend_step
        steps: list[Any] = []
        monkeypatch.setattr(
            sparse,
            "attend_step",
            lambda *args, **kwargs: steps.append(tap.current.q_nope) or attend(*args, **kwargs),
        )
        generate(model, random_tokens(1, 70), max_new_tokens=4)
    assert kept == []
    assert steps
    assert all(q is None for q in steps)


@torch.no_grad()
def test_a_mask_that_changes(where: str) -> None:
    """A step that was launched for the padding of the last token is run again for another
    padding, and counted once.
    """
    model = tiny_model().to(where)
    ids, mask = random_tokens(1, 70).to(where), torch.ones(1, 70, dtype=torch.long, device=where)
    with attach(model, **ALL_BUCKETS) as sparse:
        cache = DynamicCache(config=model.config)
        model(ids[:, :60], past_key_values=cache)
        for i in range(60, 69):
            model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
        held = copy.deepcopy(cache)
        mask[:, :20] = 0
        masked = model(ids[:, 69:], attention_mask=mask, past_key_values=cache).logits
        seen = sum(range(61, 71)) * len(sparse.dispatch.routed_layers) * sparse.kv_heads
        statistics = sparse.statistics
        assert statistics._keys["visible keys"] == seen
        assert sum(int(read.sum()) for read in statistics._key_counts.values()) == seen
        with pytest.raises(ValueError, match="left padding only"):
            model(ids[:, 69:], attention_mask=mask.flip(1), past_key_values=held)
        alone = DynamicCache(config=model.config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        alone.update(layer.keys[:, :, 20:69], layer.values[:, :, 20:69], number)
    positions = torch.tensor([[69]], device=where)
    close(masked, model(ids[:, 69:], past_key_values=alone, position_ids=positions).logits)


@torch.no_grad()
def test_what_cannot_be_captured_is_named(where: str) -> None:
    model = tiny_model().to(where)
    ids = random_tokens(1, 60).to(where)
    seen: list[int] = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    with attach(model, **ROUTED) as sparse:
        if where == "cuda":
            with pytest.warns(ModelWarning, match="layers.0.mlp has a forward hook"):
                model.generate(ids, max_new_tokens=10)
        else:
            model.generate(ids, max_new_tokens=10)
        stats = sparse.stats()
    handle.remove()
    assert len(seen) == 10
    assert (stats["graph_steps"], stats["eager_steps"]) == (0, 9)


@torch.no_grad()
def test_an_exception_leaves_the_model_as_it_was(where: str) -> None:
    model = tiny_model().to(where)
    ids = random_tokens(1, 60)
    dense = generate(model, ids)
    forwards = {name for name, module in model.named_modules() if "forward" in vars(module)}
    if where == "cuda":
        # the stream on which steps are captured gets its workspaces, which stay
        with attach(model, **ROUTED):
            generate(model, ids)
    memory = torch.cuda.memory_allocated() if where == "cuda" else 0

    class Stop(Exception):
        pass

    def stop(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] > 70:
            raise Stop
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    with pytest.raises(Stop), attach(model, **ROUTED):
        generate(model, ids, stopping_criteria=[stop])
    close(generate(model, ids), dense, 0)
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} == forwards
    if where == "cuda":
        assert torch.cuda.memory_allocated() <= memory + 2**20


@torch.no_grad()
def test_a_step_that_was_interrupted_is_run_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model().to(where)
    text, cache = random_tokens(1, 80).to(where), DynamicCache(config=model.config)
    dense = model(text).logits
    advance = Step.advance

    def interrupted(step: Step) -> None:
        advance(step)
        raise KeyboardInterrupt

    with attach(model, **ALL_BUCKETS, cuda_graphs=False):
        model(text[:, :60], past_key_values=cache)
        for i in range(60, 70):
            model(text[:, i : i + 1], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(Step, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(text[:, 70:71], past_key_values=cache)
        found = [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(70, 80)]
    close(torch.cat(found, dim=1), dense[:, 70:])


@pytest.mark.gpu
@torch.no_grad()
def test_autocast_and_compiled_models() -> None:
    model = tiny_model().to("cuda")
    ids = random_tokens(1, 60)
    dense = generate(model, ids)
    with attach(model, **ALL_BUCKETS) as sparse, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autocast("cuda", torch.bfloat16):
            generate(model, ids)
        assert any("autocast is on" in str(each.message) for each in caught)
        assert sparse.stats()["dense_fallbacks"] == 0
        compiled: Any = torch.compile(model)
        close(generate(compiled, ids), dense)
        assert sparse.stats()["graph_steps"] == 18


@torch.no_grad()
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_tokens_of_other_families_are_decoded_in_ordinary_passes(family: str, where: str) -> None:
    """Their layers are not Llama's; there is one warning on a GPU."""
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (70, 41)])
    dense = generate(model, ids, mask, max_new_tokens=8)
    with (
        warnings.catch_warnings(record=True) as caught,
        attached(model, sparsity=0.0, probes=BUCKETS) as sparse,
    ):
        warnings.simplefilter("always")
        close(generate(model, ids, mask, max_new_tokens=8), dense)
        stats = sparse.stats()
    assert (stats["graph_steps"], stats["eager_steps"], stats["dense_fallbacks"]) == (0, 7, 0)
    assert (stats["sparsity"], stats["selectivity"]) == (0, 1)
    assert sum("runs without CUDA graphs" in str(each.message) for each in caught) == (
        where == "cuda"
    )


@pytest.mark.parametrize("family", [*OTHER_FAMILIES, "mistral"])
def test_only_llamas_layers_are_fused(family: str) -> None:
    """Norms of other families round elsewhere, or add 1 to their weights."""
    model = tiny_model(family)
    with fused(model.model):
        replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert bool(replaced) == (family == "mistral")

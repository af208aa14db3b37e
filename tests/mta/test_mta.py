"""Tests of multi-token attention in a Llama model (initialization, gradients, caches) and of the
block retrieval task.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from transformers import DynamicCache, StaticCache

from msattn.trainer.errors import UserError
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import tap
from msattn.trainer.mta.attention import convert, kv_start_of
from msattn.trainer.mta.cache import ROLLBACK
from tests.factory import left_padded, random_tokens, tiny_model

OPTIONS: dict[str, dict[str, Any]] = {
    "kernel": {"kernel": (4, 5)},
    "even kernel": {"kernel": (2, 4)},
    "key mask": {"kernel": (4, 5), "mask": "key"},
    "one layer": {"kernel": (3, 3), "layers": (1,)},
    "kernel and group": {"kernel": (3, 3), "head_mixing": "group"},
    "scores": {"kernel": None, "head_mixing": "scores"},
    "group": {"kernel": None, "head_mixing": "group"},
    "norm": {"kernel": (3, 3), "group_norm": True},
}
UNCHANGED = [name for name in OPTIONS if name != "norm"]


def new_weights(model: Any) -> dict[str, torch.nn.Parameter]:
    names = ("score_kernel", "score_mix", "group_mix", "head_norm.weight")
    return {name: weight for name, weight in model.named_parameters() if name.endswith(names)}


def converted(name: str) -> Any:
    """A tiny Llama with multi-token attention, whose new weights are perturbed away from the
    identity.
    """
    model = convert(tiny_model(), **OPTIONS[name])
    for seed, weight in enumerate(new_weights(model).values()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.data.add_(noise, alpha=0.3)
    return model.requires_grad_(False)


def padded() -> tuple[Tensor, Tensor]:
    return left_padded([random_tokens(1, n, seed=n)[0] for n in (5, 14)])


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "sdpa") for name in UNCHANGED), ("kernel and group", "eager")],
)
@torch.no_grad()
def test_conversion_leaves_the_output_unchanged(name: str, implementation: str) -> None:
    ids, mask = padded()
    model = tiny_model()
    model.config._attn_implementation = implementation
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    assert convert(model, **OPTIONS[name]) is model
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[mask.bool()], expected, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_the_norm_is_per_head_and_scaled_by_depth() -> None:
    attention = convert(tiny_model(), kernel=None, group_norm=True).model.layers[1].self_attn
    x = torch.randn(2, 4, 3, 16)
    attention.head_norm.weight[2] = 5.0
    normed = attention.head_norm(x) / (0.2 + 0.6 * np.exp(-0.3))
    rms = x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(
        normed, x / rms * torch.tensor([1.0, 1.0, 5.0, 1.0])[:, None, None], rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_group_mixing_equals_mixed_probabilities() -> None:
    model = converted("group")
    attention, layer = model.model.layers[0].self_attn, model.model.layers[0]
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    seen: list[Tensor] = []
    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    for name, value in zip(("q_proj", "k_proj", "v_proj"), flat, strict=True):
        getattr(attention, name).register_forward_hook(lambda module, args, out, value=value: value)
    no_rotation = torch.ones(1, 6, 16), torch.zeros(1, 6, 16)
    attention(torch.zeros(1, 6, 64), no_rotation)

    scores = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 0.25).masked_fill(
        torch.ones(6, 6).triu(1).bool(), -torch.inf
    )
    mixed = torch.einsum("kgh,bkhij->bkgij", attention.group_mix, scores.softmax(-1))
    expected = (mixed @ v[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["kernel and group", "scores", "norm"])
def test_gradients_reach_every_weight(name: str, checkpointing: bool) -> None:
    model, ids = converted(name).requires_grad_(True).train(), random_tokens(2, 12)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert len(new_weights(model)) == 2 * (1 + (name != "scores"))
    for weight in model.parameters():
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_rows_of_a_padded_batch_are_the_unpadded_sequences(name: str) -> None:
    model = converted(name)
    ids, mask = padded()
    logits = model(ids, attention_mask=mask).logits
    for row, start in enumerate((9, 0)):
        alone = model(ids[row : row + 1, start:]).logits
        torch.testing.assert_close(logits[row : row + 1, start:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "batched"), [*((name, True) for name in OPTIONS), ("even kernel", False)]
)
@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without(name: str, batched: bool) -> None:
    model = converted(name)
    ids, mask = padded() if batched else (random_tokens(1, 2), torch.ones(1, 2, dtype=torch.long))
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    )


@pytest.mark.parametrize("ends", [(1, 2, 3, 4, 14), (9, 12, 14)])
@pytest.mark.parametrize("name", ["kernel", "even kernel", "scores"])
@torch.no_grad()
def test_chunked_prefill_equals_one_pass(name: str, ends: tuple[int, ...]) -> None:
    model, cache, chunks = converted(name), DynamicCache(), []
    ids, mask = padded()
    for begin, end in zip((0, *ends), ends, strict=False):
        chunks.append(
            model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        )
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(
        torch.cat(chunks, 1)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_cache_rows_can_be_repeated_selected_and_reset() -> None:
    model, ids, cache = converted("kernel"), random_tokens(2, 10), DynamicCache()
    expected = model(ids).logits[1]
    model(ids[:, :9], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3]))
    torch.testing.assert_close(
        model(ids[1:, 9:], past_key_values=cache).logits[0], expected[9:], rtol=1e-4, atol=1e-4
    )
    cache.reset()
    torch.testing.assert_close(
        model(ids[1:], past_key_values=cache).logits[0], expected, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_the_query_window_is_bounded() -> None:
    model, cache = converted("kernel"), DynamicCache()
    model(random_tokens(1, 100), past_key_values=cache)
    window = cache.layers[0].query_window  # pyrefly: ignore[missing-attribute]
    assert window.shape == (1, 4, 3 + ROLLBACK, 16)
    assert window.untyped_storage().nbytes() <= window.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gpu_equals_the_cpu(name: str) -> None:
    """Logits and gradients equal those of the CPU, in fp32 and under autocast; a cache changes no
    generated token.
    """
    ids, mask = padded()
    logits: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for device, half in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = converted(name).requires_grad_(True).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = (
                model(ids.to(device), attention_mask=mask.to(device))
                .logits[mask.bool().to(device)]
                .float()
            )
        out.square().mean().backward()
        logits.append(out.detach().cpu())
        gradients.append(
            [weight.grad.cpu() for weight in new_weights(model).values() if weight.grad is not None]
        )
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-3)
    assert (logits[2] - logits[0]).norm() < 0.05 * logits[0].norm()
    for exact, rounded in zip(gradients[0], gradients[2], strict=True):
        assert (rounded - exact).norm() < 0.2 * exact.norm()

    model, options = converted(name).cuda(), {"max_new_tokens": 8, "do_sample": False}
    inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
    assert torch.equal(
        model.generate(**inputs, **options), model.generate(**inputs, use_cache=False, **options)
    )


@pytest.mark.parametrize("name", ["kernel and group", "scores", "norm"])
@torch.no_grad()
def test_saved_weights_load_into_a_converted_model(name: str, tmp_path: Path) -> None:
    model, ids = converted(name), random_tokens(1, 12)
    save_model(model, str(tmp_path / "model.safetensors"))
    again = convert(tiny_model(seed=1), **OPTIONS[name])
    load_model(again, tmp_path / "model.safetensors")
    assert torch.equal(again(ids).logits, model(ids).logits)
    # a plain model's weights load; the new ones are unchanged
    plain = tiny_model(seed=2).state_dict()
    missing, unexpected = again.load_state_dict(plain, strict=False)
    assert set(missing) == set(new_weights(again))
    assert not unexpected


@torch.no_grad()
def test_unsupported_masks_and_caches_are_refused() -> None:
    model, ids, cache = converted("kernel"), random_tokens(1, 6), DynamicCache()
    tiny_model()(ids, past_key_values=cache)
    right, hole = torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[1, 1, 0, 1, 1, 1]])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: model(ids, attention_mask=right), "left padding only"),
        (lambda: model(ids, attention_mask=hole), "left padding only"),
        (lambda: kv_start_of(right[:, :3], 6, 6), r"expected \[batch, 6\] or \[batch, 1, 6, 6\]"),
        (
            lambda: model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool)),
            "left-padded sequence per row",
        ),
        (
            lambda: model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False),
            "left-padded sequence per row",
        ),
        (
            lambda: model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=32)),
            "not a StaticLayer",
        ),
        (lambda: model(ids, past_key_values=cache), "filled by another attention"),
    ]
    for call, message in cases:
        with pytest.raises(UserError, match=message):
            call()
    with tap(model, dense_attention), pytest.raises(UserError, match="cannot be tapped"):
        model(ids)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_model, {"head_mixing": "scores"}, "cannot be combined.*products"),
        (tiny_model, {"head_mixing": "heads"}, "expected 'scores', 'group', None"),
        (tiny_model, {"mask": "keys"}, "mask='keys': expected"),
        (tiny_model, {"kernel": (0, 3)}, r"kernel=\(0, 3\)"),
        (tiny_model, {"layers": (0, 2)}, "expected 0 to 1"),
        (
            lambda: tiny_model("qwen3"),
            {},
            "attention=Qwen3Attention: expected LlamaAttention",
        ),
        (lambda: tiny_model(attention_dropout=0.1), {}, r"attention_dropout=0\.1"),
        (lambda: converted("kernel"), {}, "attention=MultiTokenAttention"),
    ],
)
def test_invalid_options_and_other_attention_are_refused(
    make: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    model = make()
    before = new_weights(model).keys()
    with pytest.raises(UserError, match=message):
        convert(model, **options)
    assert new_weights(model).keys() == before

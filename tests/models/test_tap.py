"""Tests of the tap: its inputs equal the model's, dense attention changes nothing, and no hooks
remain.
"""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from msattn.trainer.errors import UserError
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from tests.factory import left_padded, random_tokens, tiny_config, tiny_model


@torch.no_grad()
def test_a_model_with_the_configuration_of_a_tapped_one_is_refused() -> None:
    model = tiny_model()
    other = type(model)(model.config).eval()
    with (
        tap(model, dense_attention),
        pytest.raises(UserError, match="shares its configuration with an attached model"),
    ):
        other(random_tokens(1, 4))
    assert other(random_tokens(1, 4)).logits.isfinite().all()


@torch.no_grad()
def test_tensors_of_a_layer_are_freed_after_its_attention() -> None:
    model, held = tiny_model(), []

    def attend(x: LayerInputs) -> torch.Tensor:
        assert all(ref() is None for ref in held)
        held[:] = [weakref.ref(t) for t in (x.q, x.k, x.v, x.q_nope, x.k_nope)]
        out = dense_attention(x)
        gc.collect()
        return out

    with tap(model, attend):
        run_backbone(model, random_tokens(1, 20))


@torch.no_grad()
def test_left_padded_rows_equal_unpadded_sequences() -> None:
    model = tiny_model("qwen2")
    rows = [random_tokens(1, n, seed=n)[0] for n in (5, 17, 11)]
    ids, mask = left_padded(rows)
    starts: list[Any] = []
    with tap(model, lambda x: (starts.append(x.kv_start), dense_attention(x))[1]):
        batched = model(ids, attention_mask=mask).logits
        unpadded = [model(row[None]).logits[0] for row in rows]
    for row, expected in zip(batched, unpadded, strict=True):
        torch.testing.assert_close(row[-len(expected) :], expected, rtol=1e-4, atol=1e-4)
    assert starts[0].tolist() == [12, 0, 6]
    assert starts[0].dtype == torch.int32
    assert starts[-1] is None


@torch.no_grad()
def test_a_fully_padded_row_gives_zeros() -> None:
    model = tiny_model()
    ids, mask = random_tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0] = 0
    outs = []
    with tap(model, lambda x: (outs.append(dense_attention(x)), outs[-1])[1]):
        model(ids, attention_mask=mask)
        model(ids[:, :1], attention_mask=mask[:, :1])
    for out in outs:
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out.isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_the_models(checkpointing: bool) -> None:
    tokens, grads = random_tokens(2, 12), []
    for context in (nullcontext, lambda model: tap(model, dense_attention)):
        model = tiny_model().requires_grad_(True).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        with context(model):
            model(tokens, labels=tokens).loss.backward()
        grads.append(model.base_model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_dense_attention_on_the_gpu_equals_fp64(dtype: torch.dtype) -> None:
    model = tiny_model(head_dim=64).to("cuda", dtype)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (70, 200)])
    ids, mask = ids.cuda(), mask.cuda()

    def attend(x: LayerInputs) -> torch.Tensor:
        exact = {name: getattr(x, name).double().cpu() for name in ("q", "k", "v")}
        start = None if x.kv_start is None else x.kv_start.cpu()
        out = dense_attention(x)
        expected = dense_attention(replace(x, **exact, kv_start=start))
        # probabilities and output rounded; fp32 scores of some tens
        error = 2 * torch.finfo(dtype).eps + 1e-5
        torch.testing.assert_close(
            out.double().cpu(), expected, rtol=0, atol=error * float(exact["v"].abs().max())
        )
        return out

    with tap(model, attend):
        cache = DynamicCache(config=model.config)
        # a prompt, a chunk after it, a single token
        for begin, end in ((0, 150), (150, 199), (199, 200)):
            model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
        model(ids[1:])


RIGHT = torch.tensor([[1, 1, 1, 1, 0, 0]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": RIGHT}, "left padding only"),
        ({"attention_mask": torch.zeros_like(RIGHT)}, "no row has a token"),
        ({"attention_mask": RIGHT[:, :3]}, r"expected \[batch, 6\]"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "2D mask"),
        ({"position_ids": PACKED, "use_cache": False}, "packed"),
        (
            {"past_key_values": StaticCache(config=tiny_config(), max_cache_len=32)},
            "DynamicCache",
        ),
    ],
)
@torch.no_grad()
def test_inputs_that_are_refused(inputs: dict[str, Any], message: str) -> None:
    model = tiny_model()
    with tap(model, dense_attention), pytest.raises(UserError, match=message):
        model(random_tokens(1, 6), **inputs)


@torch.no_grad()
def test_a_cache_under_an_unknown_name_is_not_taken_for_none(monkeypatch: Any) -> None:
    model = tiny_model()
    monkeypatch.setattr("msattn.trainer.models.tap.CACHE", "renamed")
    with tap(model, dense_attention), pytest.raises(KeyError, match="renamed"):
        model(random_tokens(1, 6))

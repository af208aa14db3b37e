"""attach on quantized, offloaded, fine-tuned and adapted models, in threads, and in training."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import msattn
from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import UserError
from tests.factory import random_partition, random_tokens, tiny_model
from tests.sparse import NEAREST_HALF, gate_for, save

SPARSE: dict[str, Any] = {"select": NEAREST_HALF, "probes": 1, "recent": 4, "dense_layers": ()}


def quantized_to_int8(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch recommends torchao
        return torch.ao.quantization.quantize_dynamic(
            tiny_model(), {torch.nn.Linear}, dtype=torch.qint8
        )


def with_tensor_subclasses(folder: Path) -> Any:
    """A model whose weights are tensors of another class, as those of torchao and bitsandbytes."""

    class Quantized(torch.nn.Parameter):
        pass

    model = tiny_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.__class__ = Quantized
    return model


def with_other_modules(folder: Path) -> Any:
    """A model with layers that have no ``weight``, as those of some quantization libraries."""

    class Packed(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.register_buffer("packed", linear.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.packed)  # pyrefly: ignore[bad-argument-type]

    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj)
        layer.mlp.down_proj = Packed(layer.mlp.down_proj)
    return model


def with_packed_weights(folder: Path) -> Any:
    """A model with a weight in blocks of bytes, as transformers keeps those of some GGUF files."""

    class Blocks(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(
                linear.weight.detach().view(torch.uint8), requires_grad=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight.view(torch.float32))

    model = tiny_model()
    model.model.layers[0].self_attn.q_proj = Blocks(model.model.layers[0].self_attn.q_proj)
    return model


def offloaded(folder: Path) -> Any:
    from accelerate import disk_offload

    model = tiny_model()
    disk_offload(model, folder / "offload", execution_device=torch.device("cpu"))
    return model


def fine_tuned(folder: Path) -> Any:
    model = tiny_model()
    model.model.layers[0].self_attn.q_proj.weight.data += 0.01
    return model


def with_one_more_token(folder: Path) -> Any:
    model = tiny_model()
    model.resize_token_embeddings(model.config.vocab_size + 1)
    return model


def without_head(folder: Path) -> Any:
    return tiny_model().model


def adapted(folder: Path) -> Any:
    adapters = LoraConfig(target_modules=["q_proj", "k_proj"], r=4, init_lora_weights=False)
    return get_peft_model(tiny_model(), adapters).eval()


MODELS: dict[Callable[[Path], Any], str | None] = {  # with the warning of attach
    quantized_to_int8: "weights are quantized, offloaded",
    with_tensor_subclasses: "weights are quantized, offloaded",
    with_other_modules: "weights are quantized, offloaded",
    with_packed_weights: "weights are quantized, offloaded",
    offloaded: "weights are quantized, offloaded",
    fine_tuned: "its weights_hash is",
    with_one_more_token: "its config_hash is",
    without_head: None,
    adapted: None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_models_of_the_same_shape_are_served(make: Callable[[Path], Any], tmp_path: Path) -> None:
    base, ids = tiny_model(), random_tokens(1, 80)
    artifacts: dict[str, Any] = {
        "gate": save(tmp_path, base, gate_for(base)),
        "qmodel": save(tmp_path, base, random_partition()),
    }
    model, warning = make(tmp_path), MODELS[make]
    dense = model(input_ids=ids)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with msattn.attach(model, **artifacts, **SPARSE) as sparse:
            cache = model(input_ids=ids[:, :79], use_cache=True).past_key_values
            last = model(input_ids=ids[:, 79:], past_key_values=cache)[0]
            stats = sparse.stats()
    messages = [str(each.message) for each in caught if "artifact made for" in str(each.message)]
    assert len(messages) == (0 if warning is None else 2)
    assert all(warning in message for message in messages if warning)
    assert 0.3 < stats["sparsity"] < 0.6
    assert stats["selectivity"] < 0.5
    assert not torch.allclose(last, dense[:, -1:], atol=1e-3)
    everything: dict[str, Any] = {
        "select": SelectConfig(sparsity=0.0),
        "probes": 6,
        "dense_layers": (),
    }
    with msattn.attach(model, **artifacts, **everything):
        torch.testing.assert_close(model(input_ids=ids)[0], dense, rtol=1e-4, atol=1e-4)
    if warning is not None:
        with (
            pytest.raises(UserError, match=warning),
            msattn.attach(model, **artifacts, strict=True),
        ):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_threads_share_an_attached_model(family: str) -> None:
    model = tiny_model(family)

    def generate(length: int) -> Any:
        ids = random_tokens(1, length, seed=length)
        options = {"output_logits": True, "return_dict_in_generate": True}
        with torch.no_grad():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                do_sample=False,
                **options,
            )

    lengths = [17 + 9 * i for i in range(16)]
    artifacts: dict[str, Any] = {"gate": gate_for(model), "qmodel": random_partition()}
    with msattn.attach(model, **artifacts, **SPARSE) as sparse:
        expected, alone = [generate(length) for length in lengths], sparse.stats()
    with msattn.attach(model, **artifacts, **SPARSE) as sparse, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(generate, lengths))
        together = sparse.stats()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    assert together.pop("sparsity_by_layer") == pytest.approx(alone.pop("sparsity_by_layer"))
    assert together == pytest.approx(alone)


@pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["stored", "checkpointed", "reentrant"]
)
def test_backward_after_leaving(reentrant: bool | None) -> None:
    """Without activation checkpointing the gradients are the same; with it, backward would run
    dense attention.
    """
    gradients = []
    for inside in (True, False):
        model = tiny_model().requires_grad_(True)
        if reentrant is not None:
            model.train().gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        with msattn.attach(model, gate=gate_for(model), select=SPARSE["select"]):
            loss = model(random_tokens(1, 64), use_cache=False).logits.square().mean()
            if inside:
                loss.backward()
        if not inside and reentrant is not None:
            with pytest.raises(UserError, match="call it inside the attached context"):
                loss.backward()
            return
        if not inside:
            loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = tiny_model(num_hidden_layers=3)
    gate = save(tmp_path, base, gate_for(base))
    with (
        pytest.raises(UserError, match="its num_layers is 3, this model's is 2"),
        msattn.attach(offloaded(tmp_path), gate=gate),
    ):
        pass


def test_training_with_a_cache_keeps_no_graph_in_it() -> None:
    model = tiny_model().requires_grad_(True)
    with msattn.attach(model, gate=gate_for(model), select=SPARSE["select"]):
        output = model(random_tokens(1, 64), use_cache=True)
        output.logits.square().mean().backward()
    (pooled,) = output.past_key_values.layers[0].pooled.values()
    assert not pooled.blocks.requires_grad

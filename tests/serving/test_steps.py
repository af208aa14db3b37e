"""Decoding steps with lengths on the device: the same results as ordinary passes, with and without CUDA graphs."""

import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from msattn.trainer.attach import Sparse, attach
from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.models import break_even
from msattn.trainer.models.families import FAMILIES
from msattn.trainer.serving import buffer
from msattn.trainer.serving.cache import BucketLayer
from msattn.trainer.serving.steps import DecodingSteps, Step
from tests.factory import left_padded, random_tokens, tiny_model
from tests.test_attach import BUCKETS, gate_for, random_partition

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUTED: dict[str, Any] = {"qmodel": random_partition(), "probes": 2, "recent": 5, "dense_layers": (0,)}
ALL_BUCKETS = {**ROUTED, "probes": BUCKETS}


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which single tokens are steps; on the CPU they are launched kernel by kernel."""
    monkeypatch.setattr(DecodingSteps, "device_type", request.param)
    return request.param


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow every few tokens."""
    monkeypatch.setattr(buffer, "MIN_FREE", 4)
    monkeypatch.setattr(buffer, "STEP", 1)


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Returns the logits of greedy generation ``[tokens, B, vocabulary]``."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    return torch.stack(model.generate(**inputs, **arguments).logits).cpu()


def check_steps(sparse: Sparse, device: str, tokens: int) -> None:
    """Asserts that ``tokens`` were decoded in steps, nearly all of them as graphs on a GPU."""
    stats = sparse.stats()
    assert stats["graph_steps"] + stats["eager_steps"] == tokens
    if device == "cuda":
        assert stats["graph_steps"] > 0.7 * tokens


def close(a: Tensor, b: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
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


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_ordinary_passes(family: str, where: str, monkeypatch: pytest.MonkeyPatch, small_buffers: None) -> None:
    """With few buckets, through growth of the buffers and new indices."""
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (50, 41)])
    with attach(model, **ROUTED) as sparse:
        steps, read = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
    monkeypatch.setattr(DecodingSteps, "device_type", "none")
    with attach(model, **ROUTED) as sparse:
        ordinary, expected = generate(model, ids, mask, max_new_tokens=150), sparse.stats()
    close(steps, ordinary)
    assert read["selectivity"] == pytest.approx(expected["selectivity"], rel=1e-6)
    assert read["graph_steps"] + read["eager_steps"] == 149 - 2, "the index was rebuilt twice"
    assert expected["graph_steps"] + expected["eager_steps"] == 0


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "num_return_sequences": 2, "output_logits": False}, {"num_return_sequences": 3, "do_sample": True}],
)
def test_rows_that_are_repeated_and_reordered(options: dict[str, Any], where: str, small_buffers: None) -> None:
    model = tiny_model().to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (40, 33)])
    arguments = {"max_new_tokens": 30, "do_sample": False, **options}

    def run() -> Tensor:
        torch.manual_seed(0)
        return model.generate(ids.to(where), attention_mask=mask.to(where), **arguments).cpu()

    dense = run()
    with attach(model, **ALL_BUCKETS) as sparse:
        assert torch.equal(run(), dense)
        check_steps(sparse, where, 29)
        assert sparse.stats()["selectivity"] == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}], ids=["prompt lookup", "assistant"]
)
def test_drafts_are_verified_with_routed_queries(options: dict[str, Any], where: str) -> None:
    model = tiny_model(max_position_embeddings=1024).to(where)
    if "assistant_model" in options:
        options = {"assistant_model": tiny_model(seed=1, max_position_embeddings=1024).to(where)}
    ids = random_tokens(1, 150).to(where)
    plain = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dense = model.generate(ids, **plain)
    for sparsity, router in ((0.0, ALL_BUCKETS), (0.5, ROUTED)):
        with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=sparsity), **router) as sparse:
            drafted, stats = model.generate(ids, **plain, **options), sparse.stats()
        assert stats["dense_fallbacks"] == 0
        assert torch.equal(drafted, dense) == (sparsity == 0)
        assert stats["selectivity"] == 1 if sparsity == 0 else 0.1 < stats["selectivity"] < 0.8


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_static_caches(family: str, where: str) -> None:
    model = tiny_model(family).to(where)
    ids = random_tokens(2, 60)
    dense = generate(model, ids)
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.0), **ALL_BUCKETS) as sparse:
        close(generate(model, ids, cache_implementation="static"), dense)
        own = StaticCache(config=model.config, max_cache_len=90)
        close(generate(model, ids, past_key_values=own), dense)
        layer: Any = own.layers[1]
        assert layer.key_buffer.length == 79
        assert sparse.stats()["dense_fallbacks"] == 0
        assert sparse.stats()["selectivity"] == 1
    filled = StaticCache(config=model.config, max_cache_len=100)
    model(ids[:, :59].to(where), past_key_values=filled)
    static: Any = filled.layers[1]
    address = static.keys.data_ptr()
    with attach(model, **ALL_BUCKETS):
        close(generate(model, ids, past_key_values=filled), dense)
        layer: Any = filled.layers[1]
        assert layer.keys.data_ptr() == address, "the memory that the user allocated is used"


@torch.no_grad()
def test_turns_over_one_cache(where: str, small_buffers: None) -> None:
    """Chunked prompt, tokens, crop, another turn, another batch: the steps are those of the cache as it is then."""
    model = tiny_model(max_position_embeddings=1024).to(where)
    text = random_tokens(1, 300).to(where)
    dense = model(text).logits
    cache = DynamicCache(config=model.config)
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.0), **ALL_BUCKETS) as sparse:
        pieces = [model(part, past_key_values=cache).logits for part in text[:, :96].split(48, dim=1)]
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(96, 120)]
        cache.crop(-10)
        pieces = [torch.cat(pieces, dim=1)[:, :110]]
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(110, 130)]
        pieces.append(model(text[:, 130:230], past_key_values=cache).logits)
        shared = copy.deepcopy(cache)
        own, twin = cache.layers[1], shared.layers[1]
        assert isinstance(own, BucketLayer)
        assert isinstance(twin, BucketLayer)
        assert own.partition is twin.partition
        assert own.bucket_buffer is not twin.bucket_buffer
        pieces += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(230, 260)]
        close(torch.cat(pieces, dim=1), dense[:, :260])
        shared.batch_repeat_interleave(2)
        both = [model(text[:, i : i + 1].expand(2, -1), past_key_values=shared).logits for i in range(230, 250)]
        close(torch.cat(both, dim=1), dense[:, 230:250].expand(2, -1, -1))
        assert sparse.stats()["dense_fallbacks"] == 0
        assert sparse.stats()["selectivity"] == 1


@torch.no_grad()
def test_a_mask_that_changes(where: str) -> None:
    """A step that was launched for the padding of the last token is run again for another padding."""
    model = tiny_model().to(where)
    ids, mask = random_tokens(1, 70).to(where), torch.ones(1, 70, dtype=torch.long, device=where)
    with attach(model, **ALL_BUCKETS):
        cache = DynamicCache(config=model.config)
        model(ids[:, :60], past_key_values=cache)
        for i in range(60, 69):
            model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
        held = copy.deepcopy(cache)
        mask[:, :20] = 0
        masked = model(ids[:, 69:], attention_mask=mask, past_key_values=cache).logits
        with pytest.raises(ValueError, match="left padding only"):
            model(ids[:, 69:], attention_mask=mask.flip(1), past_key_values=held)
        alone = DynamicCache(config=model.config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        alone.update(layer.keys[:, :, 20:69], layer.values[:, :, 20:69], number)
    positions = torch.tensor([[69]], device=where)
    close(masked, model(ids[:, 69:], past_key_values=alone, position_ids=positions).logits)


@torch.no_grad()
def test_10_000_tokens_read_each_key_once(where: str) -> None:
    tokens = 10_000 if where == "cuda" else 700
    model = tiny_model(max_position_embeddings=16384).to(where)
    ids = random_tokens(1, 50)
    with attach(model, **{**ALL_BUCKETS, "dense_layers": ()}) as sparse:
        sequence = model.generate(ids.to(where), attention_mask=torch.ones_like(ids).to(where), max_new_tokens=tokens)
        assert sparse.stats()["selectivity"] == 1, "a key lost or read twice changes the share of keys"
        assert sparse.stats()["dense_fallbacks"] == 0
    cache = DynamicCache(config=model.config)
    with attach(model, **{**ALL_BUCKETS, "dense_layers": ()}):
        for i in sorted(torch.randint(60, sequence.shape[1], (8,)).tolist()):
            model(sequence[:, cache.get_seq_length() : i], past_key_values=cache)
            step = model(sequence[:, i : i + 1], past_key_values=cache).logits
            close(step[:, -1], model.__class__.forward(model, sequence[:, : i + 1]).logits[:, -1], 2e-3)


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
def test_threads_with_models_of_their_own(where: str) -> None:
    models = [tiny_model(seed=seed).to(where) for seed in range(3)]
    ids = random_tokens(1, 80)

    def run(number: int) -> Tensor:
        with torch.no_grad(), attach(models[number], **ROUTED):
            return generate(models[number], ids, max_new_tokens=60)

    expected = [run(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for found, logits in zip(pool.map(run, range(3)), expected, strict=True):
            close(found, logits, 1e-5)


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


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny_model(head_dim=64).to("cuda", dtype)
    ids = random_tokens(2, 200)
    with attach(model, select="quest", sparsity=0.0, dense_below=0) as sparse:
        graphs = generate(model, ids)
        assert sparse.stats()["graph_steps"] == 18
    with attach(model, select="quest", sparsity=0.0, dense_below=0, cuda_graphs=False) as sparse:
        eager = generate(model, ids)
        assert sparse.stats()["graph_steps"] == 0
    assert torch.equal(graphs, eager), "a replayed graph gives the bits of launched kernels"
    close(graphs[:3].float(), generate(model, ids)[:3].float(), 0.1)


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
def test_tokens_are_dense_up_to_the_break_even_length(where: str) -> None:
    model = tiny_model().to(where)
    ids = random_tokens(1, 60)
    dense = generate(model, ids, max_new_tokens=60)
    with attach(model, **ROUTED, dense_below=100) as sparse:
        found, stats = generate(model, ids, max_new_tokens=60), sparse.stats()
    close(found[:40], dense[:40])
    assert not torch.allclose(found[42:], dense[42:], atol=1e-2)
    assert stats["dense_by_choice"] == 39, "tokens over 61 to 99 keys, in the one routed layer"
    assert stats["dense_fallbacks"] == 0
    assert stats["selectivity"] < 1


@pytest.mark.break_even
@torch.no_grad()
def test_short_contexts_are_dense_as_users_get_them() -> None:
    model = tiny_model(max_position_embeddings=1024)
    ids = random_tokens(1, 300)
    dense = generate(model, ids)
    with attach(model, gate=gate_for(model), select="topk", **ROUTED) as sparse:
        close(generate(model, ids), dense)
        stats = sparse.stats()
    assert (stats["sparsity"], stats["selectivity"], stats["dense_fallbacks"]) == (0, 1, 0)
    assert stats["dense_by_choice"] == 2 + 19


def test_break_even_length_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_even, "_measured_device", lambda device, measured: 90)
    device, key_bytes = torch.device("cuda"), 4096

    def keys(batch: int, share: float = 1 / 32, window: int = 2048) -> int:
        return break_even.decoding_break_even(device, key_bytes, window, share, batch)

    assert 25_000 < keys(1) < 31_000
    assert [keys(batch) for batch in (1, 2, 4, 8, 16, 32)] == sorted((keys(2**i) for i in range(6)), reverse=True)
    assert keys(1, share=0.9) > 2**31, "never, if nearly all buckets are read"
    assert keys(1, window=8192) > keys(1)
    monkeypatch.setattr(break_even, "_measured_device", lambda device, measured: -1)
    assert break_even.decoding_break_even(device, key_bytes, 1, 0.1, 7) == 0, "not measured on such a GPU"


@torch.no_grad()
def test_a_cache_is_freed_inside_the_context(where: str) -> None:
    model = tiny_model().to(where)
    with attach(model, **ROUTED):
        cache = DynamicCache(config=model.config)
        generate(model, random_tokens(1, 60), past_key_values=cache)
        held = weakref.ref(cache)
        del cache
        gc.collect()
        assert held() is None


@torch.no_grad()
def test_a_cache_goes_from_one_attached_model_to_another(where: str) -> None:
    """Layers that are routed later, or no longer, have an index of another length."""
    model = tiny_model(max_position_embeddings=1024).to(where)
    text = random_tokens(1, 250).to(where)
    dense, cache, pieces = model(text).logits, DynamicCache(config=model.config), []
    plans: list[dict[str, Any]] = [{"dense_layers": (1,)}, {"dense_layers": ()}, {"dense_layers": (0,)}]
    for number, plan in enumerate(plans):
        with attach(model, **{**ALL_BUCKETS, **plan}) as sparse:
            if number == 0:
                pieces.append(model(text[:, :50], past_key_values=cache).logits)
            for i in range(cache.get_seq_length(), 110 + 60 * number):
                pieces.append(model(text[:, i : i + 1], past_key_values=cache).logits)
            stats = sparse.stats()
        assert stats["selectivity"] == 1
        assert stats["graph_steps"] + stats["eager_steps"] >= 55
    with attach(model, select="quest", sparsity=0.0):  # a cache with buckets, and no router
        pieces.append(model(text[:, 230:], past_key_values=cache).logits)
    close(torch.cat(pieces, dim=1), dense)


@torch.no_grad()
def test_a_step_that_was_interrupted_is_run_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_inference_mode_then_no_grad(where: str) -> None:
    model = tiny_model().to(where)
    ids = random_tokens(1, 60).to(where)
    cache = DynamicCache(config=model.config)
    with attach(model, **ALL_BUCKETS):
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
        with torch.no_grad():
            cache.reorder_cache(torch.LongTensor([1, 0]))
            for _ in range(70):
                model(ids[:, :1].expand(2, -1), past_key_values=cache)
    assert cache.get_seq_length() == 130


def test_few_tokens_with_gradients_are_dense(where: str) -> None:
    model = tiny_model().to(where).requires_grad_(True)
    ids = random_tokens(1, 70).to(where)
    cache = DynamicCache(config=model.config)
    with attach(model, **ROUTED) as sparse:
        with torch.no_grad():
            model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:], past_key_values=cache).logits.sum().backward()
        assert sparse.stats()["dense_fallbacks"] == 1
    assert model.model.embed_tokens.weight.grad is not None


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

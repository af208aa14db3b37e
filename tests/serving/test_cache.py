"""The bucket cache: every key is read exactly once, after any sequence of cache operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from msattn.kernels.testing import dense_attention as masked_attention
from msattn.trainer.methods.buckets import route
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.rope import KeysNotKnown
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.serving.cache.install import install_layers
from msattn.trainer.serving.cache.layers import BucketLayer
from msattn.trainer.serving.routed import decode_attention
from tests.factory import left_padded, random_tokens, tiny_model

BUCKETS = 5
LAYERS = 3


class ModuloRouter:
    """Router for keys that hold a number: key i is in bucket i % BUCKETS."""

    num_buckets, layers = BUCKETS, [0]

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        assert torch.equal(k_nope, k)
        return (k_nope[..., 0] % BUCKETS).to(torch.int32)

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        raise NotImplementedError

    head_scores = probe = scores


def forward_pass(layer: BucketLayer, new: Tensor, kv_start: Tensor | None) -> None:
    """Updates the layer with keys ``new [B, Hkv, N, 1]`` and assigns their buckets."""
    keys, values = layer.update(new, -new)
    assert torch.equal(keys, -values)
    assign(layer, keys, new, kv_start)


def assign(layer: BucketLayer, keys: Tensor, new: Tensor, kv_start: Tensor | None) -> None:
    """Assigns the buckets of ``new``, the last of ``keys``."""
    x: Any = SimpleNamespace(
        layer=0, k=keys, k_nope=new, num_keys=keys.shape[2], kv_start=kv_start, positions=None, rotates=True
    )
    layer.assign(ModuloRouter(), x)


def check_layer(layer: BucketLayer, expected: Tensor, kv_start: Tensor, recent: int) -> None:
    """Asserts that the layer holds ``expected [B, Hkv, M, 1]``, and that index and dense window hold every unpadded key."""
    num_keys = expected.shape[2]
    assert layer.get_seq_length() == num_keys
    assert layer.keys is not None
    assert torch.equal(layer.keys, expected)
    window = set(range(num_keys - layer.window(recent), num_keys))
    offsets, order = layer.index
    for b in range(len(expected)):
        real = set(range(int(kv_start[b]), num_keys))
        for h in range(expected.shape[1]):
            listed = order[b, h, : offsets[b, h, -1]].tolist()
            assert len(listed) == len(set(listed)), "a key is listed twice"
            assert set(listed) == {i for i in real if i < layer.indexed}
            assert set(listed) | window >= real, "a key is lost"
            for c in range(BUCKETS):
                members = order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]].long()
                assert (expected[b, h, members, 0] % BUCKETS == c).all()


event = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 7)),
    st.tuples(st.just("crop"), st.integers(1, 6)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("repeat"), st.just(2)),
    st.tuples(st.just("select"), st.just([1, 0])),
)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 12),
    padding=st.integers(0, 4),
    rebuild_every=st.integers(1, 9),
    recent=st.integers(1, 6),
    events=st.lists(event, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_every_key_is_kept_once_after_any_operations(
    prompt: int, padding: int, rebuild_every: int, recent: int, events: list[tuple[str, Any]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = BucketLayer(BUCKETS, rebuild_every)
    kv_start = torch.tensor([0, min(padding, prompt - 1)], dtype=torch.int32)

    def draw(batch: int, count: int) -> Tensor:
        return torch.randint(0, 1000, (batch, 2, count, 1), generator=generator).float()

    expected = draw(2, prompt)
    forward_pass(layer, expected, kv_start)
    check_layer(layer, expected, kv_start, recent)
    for name, value in events:
        if name == "append":
            new = draw(len(expected), value)
            expected = torch.cat([expected, new], dim=2)
            forward_pass(layer, new, kv_start)
        elif name == "crop" and value < expected.shape[2] - int(kv_start.max()):
            expected = expected[:, :, :-value]
            layer.crop(-value)
        elif name == "reorder":
            expected, kv_start = expected[value], kv_start[value]
            layer.reorder_cache(torch.LongTensor(value))
        elif name == "repeat" and len(expected) <= 2:
            expected, kv_start = expected.repeat_interleave(value, 0), kv_start.repeat_interleave(value)
            layer.batch_repeat_interleave(value)
        elif name == "select":
            expected, kv_start = expected[value], kv_start[value]
            layer.batch_select_indices(torch.tensor(value))
        check_layer(layer, expected, kv_start, recent)


def test_calls_in_another_order_are_rejected() -> None:
    layer = BucketLayer(BUCKETS)
    with pytest.raises(RuntimeError, match="the layer has no keys"):
        _ = layer.index
    new = torch.zeros(1, 2, 4, 1)
    forward_pass(layer, new, None)
    with pytest.raises(RuntimeError, match="4 keys have buckets, 4 are new, but layer 0 holds 4"):
        assign(layer, new, new, None)
    layer.update(new, -new)
    with pytest.raises(KeysNotKnown, match="layer 0: 4 cached keys"):
        forward_pass(layer, new, None)
    with pytest.raises(ValueError, match="rebuild_every=0"):
        BucketLayer(BUCKETS, rebuild_every=0)


def random_partition(seed: int = 0) -> KMeans:
    centroids = torch.randn(LAYERS, 2, BUCKETS, 16, generator=torch.Generator().manual_seed(seed))
    return KMeans(torch.nn.functional.normalize(centroids, dim=-1), list(range(LAYERS)))


def read_mask(layer: BucketLayer, probes: Tensor, *, recent: int, sink: int, kv_start: Tensor | None = None) -> Tensor:
    """Returns the mask of the keys that :func:`decode_attention` reads, bool ``[B, Hkv, M]``, from the bucket of every key."""
    batch, kv_heads, num_keys = *layer.index.offsets.shape[:2], layer.get_seq_length()
    visited = torch.zeros(batch, kv_heads, layer.num_buckets + 1, dtype=torch.bool, device=probes.device)
    visited.scatter_(2, probes.long(), True)
    buckets = layer.bucket_buffer.filled
    assert buckets is not None
    listed = torch.where(buckets < 0, layer.num_buckets, buckets).long()[:, :, : layer.indexed]
    read = torch.zeros(batch, kv_heads, num_keys, dtype=torch.bool, device=probes.device)
    read[:, :, : layer.indexed] = visited.gather(2, listed)
    position = torch.arange(num_keys, device=probes.device)
    start = torch.zeros_like(position[:1]) if kv_start is None else kv_start[:, None, None]
    dense = (position < start + sink) | (position >= num_keys - layer.window(recent))
    return (read | dense) & (position >= start)


class RoutedDecoding:
    """Attention function with dense prompts and routed tokens."""

    def __init__(self, probes: int, recent: int, check: bool = False) -> None:
        self.router = random_partition()
        self.probes, self.recent, self.check = probes, recent, check
        self.decoded = 0

    def __call__(self, x: LayerInputs) -> Tensor:
        layer = x.cache
        if not isinstance(layer, BucketLayer):
            return dense_attention(x)
        layer.assign(self.router, x)
        if x.num_queries > 1:
            return dense_attention(x)
        visited = route(self.router, x, self.probes)
        self.decoded += 1
        counts = torch.zeros(x.k.shape[:2], dtype=torch.int64)
        out, lse = decode_attention(x, visited, window=layer.window(self.recent), sink=1, counts=counts)
        if self.check:
            read = read_mask(layer, visited, recent=self.recent, sink=1, kv_start=x.kv_start)
            assert torch.equal(counts, read.sum(-1))
            mask = read.repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1)[:, :, None]
            exact = masked_attention(x.q, x.k, x.v, mask, scale=x.scale)
            torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)
        return out

    def cache(self) -> DynamicCache:
        cache = DynamicCache()
        install_layers(cache, self.router, num_layers=LAYERS, rebuild_every=4)
        return cache


def generate(attention: Any, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    model = tiny_model(num_hidden_layers=LAYERS)
    arguments = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    if attention is None:
        result = model.generate(**prompt, **arguments)
    else:
        with tap(model, attention):
            result = model.generate(**prompt, past_key_values=attention.cache(), **arguments)
        assert attention.decoded > 0
    if arguments.get("num_beams", 1) > 1:
        return result.sequences
    return torch.stack(result.logits)


def padded_prompt() -> dict[str, Tensor]:
    rows = [random_tokens(1, length, seed=length)[0] for length in (33, 20)]
    ids, mask = left_padded(rows)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_all_buckets_give_dense_attention() -> None:
    prompt = padded_prompt()
    torch.testing.assert_close(generate(RoutedDecoding(BUCKETS, recent=1), prompt), generate(None, prompt), rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("probes", [0, 2])
def test_decoding_attends_to_the_counted_keys(probes: int) -> None:
    generate(RoutedDecoding(probes, recent=3, check=True), padded_prompt())


@torch.no_grad()
def test_beam_search_matches_dense_attention() -> None:
    prompt = {"input_ids": random_tokens(2, 25)}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(RoutedDecoding(BUCKETS, recent=1), prompt, **beams), generate(None, prompt, **beams))
    generate(RoutedDecoding(1, recent=2, check=True), prompt, **beams)


def test_install_replaces_the_layers_of_a_cache() -> None:
    router = random_partition()
    cache = DynamicCache()
    install_layers(cache, router, num_layers=LAYERS, dense_layers=(0, 2))
    assert [type(layer).__name__ for layer in cache.layers] == ["GrowingLayer", "BucketLayer", "GrowingLayer"]
    keys = torch.randn(1, 2, 3, 16)
    cache.update(keys, -keys, 0)
    install_layers(cache, router, num_layers=LAYERS, dense_layers=())
    assert [type(layer).__name__ for layer in cache.layers] == ["BucketLayer"] * LAYERS
    first: Any = cache.layers[0]
    assert torch.equal(first.keys, keys)
    held = list(cache.layers)
    install_layers(cache, router, num_layers=LAYERS, dense_layers=(0,))
    assert cache.layers == held, "a layer with buckets also serves dense attention"
    sliding = DynamicCache(config=transformers.MistralConfig(num_hidden_layers=LAYERS, sliding_window=8))
    sliding.update(keys, -keys, 0)
    install_layers(sliding, router, num_layers=LAYERS, served=[0, 2])
    names = ["GrowingLayer", "DynamicSlidingWindowLayer", "BucketLayer"]
    assert [type(layer).__name__ for layer in sliding.layers] == names, "a window that is not full holds all keys"
    full = DynamicCache(config=transformers.MistralConfig(num_hidden_layers=LAYERS, sliding_window=3))
    full.update(keys, -keys, 0)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        install_layers(full, router, num_layers=LAYERS)

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

from msattn.trainer.models.layer_attention import Angles
from msattn.trainer.models.rope import KeysNotKnown
from msattn.trainer.serving.contiguous.bucket_layers import BucketLayer
from msattn.trainer.serving.contiguous.install import install_layers
from tests.factory import random_partition

BUCKETS = 5
LAYERS = 3


class ModuloRouter:
    """Partition of keys that hold a number: key i is in bucket i % BUCKETS."""

    num_buckets = BUCKETS

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        assert torch.equal(k_nope, k)
        return (k_nope[..., 0] % BUCKETS).to(torch.int32)


def forward_pass(layer: BucketLayer, new: Tensor, kv_start: Tensor | None) -> None:
    """Updates the layer with keys ``new [B, Hkv, N, 1]`` and assigns their buckets."""
    keys, values = layer.update(new, -new)
    assert torch.equal(keys, -values)
    assign(layer, keys, new, kv_start)


def assign(layer: BucketLayer, keys: Tensor, new: Tensor, kv_start: Tensor | None) -> None:
    """Assigns the buckets of ``new``, the last of ``keys``."""
    x: Any = SimpleNamespace(
        layer=0,
        k=keys,
        k_nope=new,
        num_keys=keys.shape[2],
        kv_start=kv_start,
        angles=Angles(new, new),
        rotates=True,
    )
    layer.assign(x)


def check_layer(layer: BucketLayer, expected: Tensor, kv_start: Tensor, recent: int) -> None:
    """Asserts that the layer holds ``expected [B, Hkv, M, 1]``, and that index and dense window
    hold every unpadded key.
    """
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
    prompt: int,
    padding: int,
    rebuild_every: int,
    recent: int,
    events: list[tuple[str, Any]],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = BucketLayer(ModuloRouter(), rebuild_every)
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
            expected = expected.repeat_interleave(value, 0)
            kv_start = kv_start.repeat_interleave(value)
            layer.batch_repeat_interleave(value)
        elif name == "select":
            expected, kv_start = expected[value], kv_start[value]
            layer.batch_select_indices(torch.tensor(value))
        check_layer(layer, expected, kv_start, recent)


def test_calls_in_another_order_are_rejected() -> None:
    layer, new = BucketLayer(ModuloRouter()), torch.zeros(1, 2, 4, 1)
    with pytest.raises(RuntimeError, match="the layer has no keys"):
        _ = layer.index
    forward_pass(layer, new, None)
    with pytest.raises(RuntimeError, match="4 keys have buckets, 4 are new, but layer 0 holds 4"):
        assign(layer, new, new, None)
    layer.update(new, -new)
    with pytest.raises(KeysNotKnown, match="layer 0: 4 cached keys"):
        forward_pass(layer, new, None)


def test_install_replaces_the_layers_of_a_cache() -> None:
    router = random_partition(BUCKETS, layers=range(LAYERS))
    cache = DynamicCache()
    install_layers(cache, router, num_layers=LAYERS, routed=[1])
    assert [type(layer).__name__ for layer in cache.layers] == [
        "GrowingLayer",
        "BucketLayer",
        "GrowingLayer",
    ]
    keys = torch.randn(1, 2, 3, 16)
    cache.update(keys, -keys, 0)
    install_layers(cache, router, num_layers=LAYERS, routed=range(LAYERS))
    assert [type(layer).__name__ for layer in cache.layers] == ["BucketLayer"] * LAYERS
    first: Any = cache.layers[0]
    assert torch.equal(first.keys, keys)
    held = list(cache.layers)
    install_layers(cache, router, num_layers=LAYERS, routed=[1, 2])
    assert cache.layers == held, "a layer with buckets also serves dense attention"
    sliding = DynamicCache(
        config=transformers.MistralConfig(num_hidden_layers=LAYERS, sliding_window=8)
    )
    sliding.update(keys, -keys, 0)
    install_layers(sliding, router, num_layers=LAYERS, served=[0, 2], routed=[1, 2])
    names = ["GrowingLayer", "DynamicSlidingWindowLayer", "BucketLayer"]
    assert [type(layer).__name__ for layer in sliding.layers] == names, (
        "a window that is not full holds all keys"
    )
    full = DynamicCache(
        config=transformers.MistralConfig(num_hidden_layers=LAYERS, sliding_window=3)
    )
    full.update(keys, -keys, 0)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        install_layers(full, router, num_layers=LAYERS)

"""The bucket cache: nothing lost, nothing read twice, whatever happens to it."""

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
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.saap.index import route
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.serving.cache import BucketLayer, GrowingLayer, decode, install
from tests.factory import left_padded, random_tokens, tiny_model

BUCKETS = 5
LAYERS = 3


class ById:
    """A router for keys that carry a number: key i goes to bucket i % BUCKETS."""

    num_buckets, layers = BUCKETS, [0]

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        assert torch.equal(k_nope, k)
        return (k_nope[..., 0] % BUCKETS).to(torch.int32)

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        raise NotImplementedError

    head_scores = probe = scores


def step(layer: BucketLayer, new: Tensor, kv_start: Tensor | None) -> None:
    """One forward pass with keys ``new [B, Hkv, N, 1]``."""
    keys, values = layer.update(new, -new)
    assert torch.equal(keys, -values)
    layer.assign(ById(), SimpleNamespace(layer=0, k=keys, k_nope=new, kv_start=kv_start))  # type: ignore[arg-type]


def check(layer: BucketLayer, expected: Tensor, kv_start: Tensor, recent: int) -> None:
    """The layer holds ``expected [B, Hkv, M, 1]``; lists and dense window together hold every real key."""
    num_keys = expected.shape[2]
    assert layer.get_seq_length() == num_keys
    assert layer.keys is not None
    assert torch.equal(layer.keys, expected)
    window = set(range(num_keys - layer.window(recent), num_keys))
    offsets, order = layer.index
    for b in range(len(expected)):
        real = set(range(int(kv_start[b]), num_keys))
        for h in range(expected.shape[1]):
            lists = order[b, h, : offsets[b, h, -1]].tolist()
            assert len(lists) == len(set(lists)), "a key is listed twice"
            assert set(lists) == {i for i in real if i < layer.indexed}
            assert set(lists) | window >= real, "a key is lost"
            for c in range(BUCKETS):
                members = order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]].long()
                assert (expected[b, h, members, 0] % BUCKETS == c).all()
    probes = torch.tensor([[[0, 3], [2, 2]]], dtype=torch.int32).expand(len(expected), -1, -1)
    counts = layer.keys_read(probes, recent=recent, sink=2, kv_start=kv_start)
    for b in range(len(expected)):
        start = int(kv_start[b])
        for h in range(expected.shape[1]):
            visited = set(probes[b, h].tolist())
            listed = {i for i in range(start, layer.indexed) if int(expected[b, h, i, 0]) % BUCKETS in visited}
            dense = {i for i in window | {start, start + 1} if start <= i < num_keys}
            assert counts[b, h] == len(listed | dense)


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
    merge_every=st.integers(1, 9),
    recent=st.integers(1, 6),
    events=st.lists(event, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_any_schedule_keeps_each_key_once(
    prompt: int, padding: int, merge_every: int, recent: int, events: list[tuple[str, Any]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = BucketLayer(BUCKETS, merge_every)
    kv_start = torch.tensor([0, min(padding, prompt - 1)], dtype=torch.int32)

    def draw(batch: int, count: int) -> Tensor:
        return torch.randint(0, 1000, (batch, 2, count, 1), generator=generator).float()

    expected = draw(2, prompt)
    step(layer, expected, kv_start)
    check(layer, expected, kv_start, recent)
    for name, value in events:
        if name == "append":
            new = draw(len(expected), value)
            expected = torch.cat([expected, new], dim=2)
            step(layer, new, kv_start)
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
        check(layer, expected, kv_start, recent)


@pytest.mark.parametrize("layer", [BucketLayer(BUCKETS), GrowingLayer()])
def test_tokens_do_not_copy_the_cache(layer: GrowingLayer) -> None:
    def add(new: Tensor) -> None:
        step(layer, new, None) if isinstance(layer, BucketLayer) else layer.update(new, new)

    add(torch.zeros(1, 2, 100, 1))
    assert layer.keys is not None
    address = layer.keys.data_ptr()
    for _ in range(200):
        add(torch.ones(1, 2, 1, 1))
    layer.crop(-1)
    add(torch.full((1, 2, 1, 1), 2.0))
    assert layer.keys.data_ptr() == address
    assert layer.keys.flatten(2)[0, 0].tolist() == [0.0] * 100 + [1.0] * 199 + [2.0]


def test_keys_without_buckets_are_refused() -> None:
    layer = BucketLayer(BUCKETS)
    with pytest.raises(RuntimeError, match="no key has a bucket"):
        _ = layer.index
    new = torch.zeros(1, 2, 4, 1)
    step(layer, new, None)
    layer.update(new, new)
    with pytest.raises(RuntimeError, match="4 keys have buckets, 4 are new, but layer 0 holds 12"):
        step(layer, new, None)
    with pytest.raises(ValueError, match="merge_every=0"):
        BucketLayer(BUCKETS, merge_every=0)


def test_reset_forgets() -> None:
    layer = BucketLayer(BUCKETS)
    step(layer, torch.zeros(1, 2, 4, 1), None)
    layer.reset()
    assert layer.get_seq_length() == 0
    new = torch.full((3, 2, 5, 1), 7.0)
    step(layer, new, None)
    check(layer, new, torch.zeros(3, dtype=torch.int32), 1)


def random_partition(seed: int = 0) -> KMeans:
    centroids = torch.randn(LAYERS, 2, BUCKETS, 16, generator=torch.Generator().manual_seed(seed))
    return KMeans(torch.nn.functional.normalize(centroids, dim=-1), list(range(LAYERS)))


def read_mask(layer: BucketLayer, probes: Tensor, *, recent: int, sink: int, kv_start: Tensor | None = None) -> Tensor:
    """Which keys :func:`decode` reads, bool ``[B, Hkv, M]``; looks at every key's bucket."""
    batch, kv_heads, num_keys = *layer.index.offsets.shape[:2], layer.get_seq_length()
    visited = torch.zeros(batch, kv_heads, layer.num_buckets + 1, dtype=torch.bool, device=probes.device)
    visited.scatter_(2, probes.long(), True)
    assert layer.buckets is not None
    listed = torch.where(layer.buckets < 0, layer.num_buckets, layer.buckets).long()[:, :, : layer.indexed]
    read = torch.zeros(batch, kv_heads, num_keys, dtype=torch.bool, device=probes.device)
    read[:, :, : layer.indexed] = visited.gather(2, listed)
    position = torch.arange(num_keys, device=probes.device)
    start = torch.zeros_like(position[:1]) if kv_start is None else kv_start[:, None, None]
    dense = (position < start + sink) | (position >= num_keys - layer.window(recent))
    return (read | dense) & (position >= start)


class Serving:
    """Attention as `attach` does it: dense prompts, routed tokens."""

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
        out, lse = decode(x, visited, recent=self.recent, sink=1)
        if self.check:
            read = read_mask(layer, visited, recent=self.recent, sink=1, kv_start=x.kv_start)
            count = layer.keys_read(visited, recent=self.recent, sink=1, kv_start=x.kv_start)
            assert torch.equal(count, read.sum(-1))
            seen = read.repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1)[:, :, None]
            exact = masked_attention(x.q, x.k, x.v, seen, scale=x.scale)
            torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)
        return out

    def cache(self) -> DynamicCache:
        cache = DynamicCache()
        install(cache, self.router, num_layers=LAYERS, merge_every=4)
        return cache


def generate(serving: Any, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    model = tiny_model(num_hidden_layers=LAYERS)
    arguments = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    if serving is None:
        result = model.generate(**prompt, **arguments)  # pyright: ignore[reportCallIssue]
    else:
        with tap(model, serving):
            result = model.generate(**prompt, past_key_values=serving.cache(), **arguments)  # pyright: ignore[reportCallIssue]
        assert serving.decoded > 0
    if arguments.get("num_beams", 1) > 1:
        return result.sequences
    return torch.stack(result.logits)


def padded_prompt() -> dict[str, Tensor]:
    rows = [random_tokens(1, length, seed=length)[0] for length in (33, 20)]
    ids, mask = left_padded(rows)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_all_buckets_are_dense_attention() -> None:
    prompt = padded_prompt()
    torch.testing.assert_close(generate(Serving(BUCKETS, recent=1), prompt), generate(None, prompt), rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("probes", [0, 2])
def test_what_is_read_is_what_is_attended(probes: int) -> None:
    generate(Serving(probes, recent=3, check=True), padded_prompt())


@torch.no_grad()
def test_beam_search() -> None:
    prompt = {"input_ids": random_tokens(2, 25)}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(Serving(BUCKETS, recent=1), prompt, **beams), generate(None, prompt, **beams))
    generate(Serving(1, recent=2, check=True), prompt, **beams)


def test_install() -> None:
    router = random_partition()
    cache = DynamicCache()
    install(cache, router, num_layers=LAYERS, dense_layers=(0, 2))
    assert [type(layer).__name__ for layer in cache.layers] == ["GrowingLayer", "BucketLayer", "GrowingLayer"]
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="cache holds 3 tokens"):
        install(cache, router, num_layers=LAYERS)
    config = transformers.MistralConfig(num_hidden_layers=LAYERS, sliding_window=8)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        install(DynamicCache(config=config), router, num_layers=LAYERS)

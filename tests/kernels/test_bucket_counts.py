"""Tests of `keys_read`, the number of keys that a decoding step reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.common import bucket_counts
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.testing import random_buckets
from msattn.kernels.types import BucketIndex

SEQUENCES, HEADS = 2, 3


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    num_keys=st.integers(1, 700),
    num_buckets=st.sampled_from([1, 7, 300]),
    num_probes=st.sampled_from([0, 1, 5, 40]),
    unlisted=st.integers(0, 9),
    recent=st.integers(0, 300),
    sink=st.integers(0, 4),
    padding=st.one_of(st.none(), st.integers(0, 700)),
    seed=st.integers(0, 99),
)
def test_counts_each_key_once(
    device: str,
    num_keys: int,
    num_buckets: int,
    num_probes: int,
    unlisted: int,
    recent: int,
    sink: int,
    padding: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = [0, 0 if padding is None else min(padding, num_keys)]
    buckets = random_buckets(SEQUENCES, HEADS, num_keys, num_buckets, seed=seed).clamp(min=0)
    for b, start in enumerate(starts):
        buckets[b, :, :start] = -1
    indexed = max(0, num_keys - unlisted)
    index = build_bucket_index(buckets[:, :, :indexed], num_buckets)
    probes = torch.randint(0, num_buckets, (SEQUENCES, HEADS, num_probes), generator=generator, dtype=torch.int32)
    kv_start = None if padding is None else torch.tensor(starts, dtype=torch.int32)

    room = torch.full((SEQUENCES, HEADS, num_keys + 5), -7, dtype=torch.int32)  # buckets are a view, as in the cache
    room[:, :, :num_keys] = buckets
    on_device = room.to(device)[:, :, :num_keys], probes.to(device)
    index = BucketIndex(*(x.to(device) for x in index))
    start = None if kv_start is None else kv_start.to(device)
    got = bucket_counts.keys_read(index, *on_device, indexed=indexed, recent=recent, sink=sink, kv_start=start)
    by_kernel = bucket_counts.launch(index.offsets, *on_device, indexed, min(recent, num_keys), sink, start)
    for b, h in ((b, h) for b in range(SEQUENCES) for h in range(HEADS)):
        visited = set(probes[b, h].tolist())
        read = {i for i in range(indexed) if int(buckets[b, h, i]) in visited}
        exact = {*range(starts[b], starts[b] + sink), *range(num_keys - recent, num_keys)}
        read |= {i for i in exact if max(starts[b], 0) <= i < num_keys}
        assert got[b, h] == by_kernel[b, h] == len(read)


@pytest.mark.parametrize("recent", [1, 3000])
def test_window_longer_than_the_cache(recent: int, device: str) -> None:
    buckets = torch.zeros(1, 1, 20, dtype=torch.int32)
    index = build_bucket_index(buckets, 2)
    count = bucket_counts.keys_read(
        BucketIndex(*(x.to(device) for x in index)),
        buckets.to(device),
        torch.ones(1, 1, 1, dtype=torch.int32, device=device),
        indexed=20,
        recent=recent,
        sink=0,
    )
    assert count.tolist() == [[min(recent, 20)]]

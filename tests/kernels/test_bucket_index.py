"""build_bucket_index: the lists of the keys in each bucket."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.common.bucket_index import build_bucket_index


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**16))
def test_lists_hold_each_key_of_a_bucket_once(num_keys: int, num_buckets: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(
        -1, num_buckets, (2, 3, num_keys), generator=generator, dtype=torch.int32
    )
    index = build_bucket_index(buckets, num_buckets)
    assert index.offsets.dtype == index.order.dtype == torch.int32
    assert index.offsets.shape == (2, 3, num_buckets + 1)
    for b in range(2):
        for h in range(3):
            edges = index.offsets[b, h].tolist()
            assert edges[0] == 0
            for c in range(num_buckets):
                members = index.order[b, h, edges[c] : edges[c + 1]].tolist()
                assert members == (buckets[b, h] == c).nonzero().flatten().tolist()

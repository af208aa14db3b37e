"""Bucket lists and the choice of buckets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.trainer.errors import UserError
from msattn.trainer.saap.index import slot_of, top_buckets


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**16))
def test_lists_hold_each_key_of_a_bucket_once(num_keys: int, num_buckets: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(-1, num_buckets, (2, 3, num_keys), generator=generator, dtype=torch.int32)
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


def test_top_buckets() -> None:
    scores = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]])
    best = top_buckets(scores, 2)
    assert best.dtype == torch.int32
    assert [set(row) for row in best[0].tolist()] == [{1, 2}, {0, 2}]
    assert top_buckets(scores, 0).shape == (1, 2, 0)


@pytest.mark.parametrize("probes", [-1, 4])
def test_probes_out_of_range_are_refused(probes: int) -> None:
    with pytest.raises(UserError, match=rf"probes={probes}: accepted are 0 to 3"):
        top_buckets(torch.zeros(1, 1, 3), probes)


def test_a_layer_that_is_not_routed_is_named() -> None:
    assert slot_of([1, 2], 2) == 1
    with pytest.raises(ValueError, match=r"layer=0: this router holds layers \[1, 2\]"):
        slot_of([1, 2], 0)

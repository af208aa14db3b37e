"""The choice of buckets from their scores."""

import pytest
import torch

from msattn.trainer.methods.buckets import layer_index, top_buckets


def test_top_buckets_have_the_highest_scores() -> None:
    scores = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]])
    best = top_buckets(scores, 2)
    assert best.dtype == torch.int32
    assert [set(row) for row in best[0].tolist()] == [{1, 2}, {0, 2}]
    assert top_buckets(scores, 0).shape == (1, 2, 0)


def test_a_layer_that_is_not_routed_is_rejected() -> None:
    assert layer_index([1, 2], 2) == 1
    with pytest.raises(ValueError, match=r"layer=0: this router holds layers \[1, 2\]"):
        layer_index([1, 2], 0)

"""Tests of the attention masses of the last queries by block, against fp64."""

import pytest
import torch

from msattn.kernels import testing
from msattn.kernels.common import block_masses

CASES = {  # query heads, key heads, queries, keys, head size, block, padding, softcap
    "a few tiles": (4, 2, 64, 300, 16, 16, None, None),
    "padding": (2, 2, 64, 150, 24, 32, [0, 37, 149], None),
    "capped scores": (7, 1, 5, 140, 80, 64, None, 5.0),
    "as many queries as keys": (2, 1, 40, 40, 16, 128, [0, 11], None),
    "one query": (2, 1, 1, 129, 128, 16, None, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_fp64(case: str, dtype: torch.dtype, device: str, poisoned: None) -> None:
    q_heads, kv_heads, queries, keys, size, block, padding, softcap = CASES[case]
    batch = 1 if padding is None else len(padding)
    q, k, _ = testing.random_qkv(batch, q_heads, kv_heads, queries, keys, size, dtype, device)
    kv_start, scale = testing.starts(padding, device), 0.5
    seen = testing.visible(batch, queries, keys, True, kv_start, device)
    rows, cols = testing.block_numbers(batch, queries, keys, True, kv_start, 16, block)
    exact, eager = (
        testing.dense_attention(q, k, k, seen, scale, of, testing.capped(softcap)).probs
        for of in (torch.float64, dtype)
    )
    blocks = -(-keys // block)
    cols = cols.where(cols >= 0, blocks).to(device)
    expected, rounded = (
        probs.new_zeros(*probs.shape[:3], blocks + 1).scatter_add_(
            3, cols[:, None, None].expand_as(probs), probs
        )[..., :-1]
        for probs in (exact, eager)
    )
    got = block_masses.launch(q, k, kv_start, block, scale, softcap)
    testing.assert_within_budget("masses", got, expected, rounded.float())
    padded = (rows < 0)[:, None].expand(got.shape[:3])
    assert (got[padded] == 0).all()

"""``msattn bench`` compares what it has timed with fp64, also where a small problem would not show a mistake."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels import bench
from msattn.kernels.bench import cases, full_size
from msattn.kernels.block_sparse_attention import forward as block_sparse_attention
from msattn.kernels.operations import DIFFERENTIABLE

SHAPE = bench.Shape(700, batch=2, q_heads=6, kv_heads=2, head_size=16, dtype=torch.float32, device="cpu")
OPTIONS = bench.Options(lengths=[700], queries=[1, 3])
CHECKED = [
    *("maxpool_attention", "block_sparse_attention", "multiscale_attention", "conv_attention", "head_mix_attention"),
    *("bucket_decode", "probe_buckets", "flash_decode", "conv_decode", "bucket_mass"),
]


@pytest.mark.parametrize(
    ("name", "backward"),
    [(name, backward) for name in CHECKED for backward in (False, True) if name in DIFFERENTIABLE or not backward],
)
def test_errors_at_the_timed_size(name: str, backward: bool) -> None:
    """Three windows of 128 rows in 700, of the second sequence: what the reference says of them is what it says of all."""
    for case in bench.CASES[name](SHAPE, replace(OPTIONS, backward=backward)):
        error = full_size.error_at_size(case, backward)
        assert error is not None
        assert 0 <= error < 1e-5
        if case.queries is None or case.queries > full_size.FEW:
            assert len(list(full_size._spans(case.queries or 700))) == 3


@pytest.mark.parametrize(("backward", "row"), [(False, 650), (True, 300)])
def test_what_is_wrong_at_the_timed_size_alone_is_refused(backward: bool, row: int) -> None:
    def wrong(q: Tensor, *others: Tensor) -> Any:
        out, lse = block_sparse_attention.block_sparse_attention(q, *others)
        worse = torch.zeros_like(out)
        worse[-1, -1, row:] = 0.01
        return out + worse * q[-1:, -1:].sum(), lse

    (case, *_) = bench.CASES["block_sparse_attention"](SHAPE, replace(OPTIONS, backward=backward))
    with pytest.raises(cases.Disagreement, match=r"first input \[2, 6, 700, 16\]: off by"):
        full_size.error_at_size(replace(case, call=wrong), backward)


def test_a_gradient_that_is_wrong_where_it_is_small_is_refused() -> None:
    """Keys from 384 to 640 are seen by the last window alone: their gradients are far smaller than the first keys'."""

    def wrong(q: Tensor, k: Tensor, *others: Tensor) -> Any:
        k = k.clone()
        k.register_hook(lambda gradient: gradient * ((place < 384) | (place >= 640)))
        return block_sparse_attention.block_sparse_attention(q, k, *others)

    place = torch.arange(700)[:, None]
    shape, options = replace(SHAPE, dtype=torch.bfloat16), replace(OPTIONS, sparsities=[0.0], backward=True)
    (case, *_) = bench.CASES["block_sparse_attention"](shape, options)
    error = full_size.error_at_size(case, True)
    assert error is not None
    assert error < 0.03
    with pytest.raises(cases.Disagreement, match=r"off by 1\.0e\+00 of a row's size"):
        full_size.error_at_size(replace(case, call=wrong), True)

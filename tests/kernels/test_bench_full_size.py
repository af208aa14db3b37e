"""``msattn bench`` checks timed results against fp64, at sizes where a small check would miss an
error.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels import bench, block_sparse_attention
from msattn.kernels.bench import cases, full_size
from msattn.kernels.operations import DIFFERENTIABLE

SHAPE = bench.Shape(
    700, batch=2, q_heads=6, kv_heads=2, head_size=16, dtype=torch.float32, device="cpu"
)
OPTIONS = bench.Options(lengths=[700], queries=[1, 3])
CHECKED = [
    *(
        "maxpool_attention",
        "block_sparse_attention",
        "paged_block_sparse_attention",
        "multiscale_attention",
    ),
    *("conv_attention", "head_mix_attention"),
    *("bucket_decode", "probe_buckets", "flash_decode", "conv_decode", "bucket_mass"),
    *("paged_bucket_decode", "paged_flash_decode"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backward"),
    [
        (name, backward)
        for name in CHECKED
        for backward in (False, True)
        if name in DIFFERENTIABLE or not backward
    ],
)
def test_error_at_full_size_is_rounding(name: str, backward: bool) -> None:
    """Covers three windows of 128 rows of the second sequence of 700 tokens."""
    for case in bench.CASES[name](SHAPE, replace(OPTIONS, backward=backward)):
        error = full_size.error_at_full_size(case, backward)
        assert error is not None
        assert 0 <= error < 1e-5
        if case.queries is None or case.queries > full_size.MAX_WHOLE_QUERIES:
            assert len(list(full_size._window_ranges(case.queries or 700))) == 3


@pytest.mark.parametrize(("backward", "row"), [(False, 650), (True, 300)])
def test_error_that_only_occurs_at_full_size_is_found(backward: bool, row: int) -> None:
    def wrong(q: Tensor, *others: Tensor) -> Any:
        out, lse = block_sparse_attention.block_sparse_attention(q, *others)
        worse = torch.zeros_like(out)
        worse[-1, -1, row:] = 0.01
        return out + worse * q[-1:, -1:].sum(), lse

    (case, *_) = bench.CASES["block_sparse_attention"](SHAPE, replace(OPTIONS, backward=backward))
    with pytest.raises(
        cases.ReferenceMismatch, match=r"first input \[2, 6, 700, 16\]: relative error"
    ):
        full_size.error_at_full_size(replace(case, call=wrong), backward)


def test_wrong_gradient_is_found_where_it_is_small() -> None:
    """Only the last window sees keys 384 to 640; their gradients are far smaller than those of the
    first keys.
    """

    def wrong(q: Tensor, k: Tensor, *others: Tensor) -> Any:
        k = k.clone()
        k.register_hook(lambda gradient: gradient * ((position < 384) | (position >= 640)))
        return block_sparse_attention.block_sparse_attention(q, k, *others)

    position = torch.arange(700)[:, None]
    shape = replace(SHAPE, dtype=torch.bfloat16)
    options = replace(OPTIONS, sparsities=[0.0], backward=True)
    (case, *_) = bench.CASES["block_sparse_attention"](shape, options)
    error = full_size.error_at_full_size(case, True)
    assert error is not None
    assert error < 0.03
    with pytest.raises(cases.ReferenceMismatch, match=r"relative error 1\.0e\+00 of a row"):
        full_size.error_at_full_size(replace(case, call=wrong), True)

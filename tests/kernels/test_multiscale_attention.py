"""Tests multiscale_attention alone: compiled shapes, tiles of means, zooms; see also
test_block_maps.py.
"""

import itertools

import pytest
import torch
from torch import Tensor

from msattn.kernels.multiscale_attention import multiscale_attention, zoom_of_mask
from msattn.kernels.testing import random_qkv
from tests.kernels.block_maps import MULTISCALE, check, random_zoom
from tests.kernels.problems import Case, full_product


@pytest.mark.slow
@pytest.mark.parametrize("last", [8, 4, 2, 0])
def test_tiles_of_means_across_zooms(last: int, device: str) -> None:
    """Tiles lie within one zoom or span several; the last group is smaller."""
    case = Case(1, 1, 1, 16, 493, 16, causal=False, block_size=16)
    for zooms in ((8, 4, 2), (8, 8, 8, 8, 4, 2), (4, 1)):
        zoom = (
            torch.tensor(zooms, dtype=torch.uint8, device=device).repeat(31)[:31].repeat(1, 1, 1, 1)
        )
        zoom[..., -1] = last
        check(MULTISCALE, case, zoom, "triton", device, with_gradients=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_size", "block_size"), [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (1, 333), (111, 300), (1100, 1100), (130, 65)]
    if head_size == 256:  # an unusual size that takes minutes to compile in fp32
        lengths = [(65, 65), (111, 300), (130, 65)]
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for case in full_product(head_size, dtype, lengths, block_size):
        check(
            MULTISCALE,
            case,
            random_zoom(1, case.q_heads, case.blocks, 0.5, "cuda"),
            "triton",
            "cuda",
            softcap=next(limits),
        )


def test_masks_of_the_paper_are_zooms() -> None:
    mask = torch.tensor([[1.0, 0.5], [0.25, 0.125], [0.0, 1.0]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zoom = zoom_of_mask(mask.to(dtype))
        assert (zoom.dtype, zoom.tolist()) == (torch.uint8, [[1, 2], [4, 8], [0, 1]])
    assert zoom_of_mask(torch.tensor([True, False])).tolist() == [1, 0]
    with pytest.raises(
        ValueError, match=r"mask has the values \[0.0, 2.0\]: expected \[0.0, 0.125"
    ):
        zoom_of_mask(torch.tensor([2, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("long", ["keys", "queries"])
def test_offsets_beyond_32_bits(long: str) -> None:
    """The last tokens give the same results as alone; needs up to 50 GB."""
    tokens, tail, head_size = 2**24 + 192, 192, 128
    num_queries, num_keys = (tail, tokens) if long == "keys" else (tokens, tail)
    q, k, v = (
        x.cuda()
        for x in random_qkv(1, 1, 1, tail, head_size=head_size, dtype=torch.bfloat16, strided=False)
    )

    def lengthen(x: Tensor, length: int) -> Tensor:
        wide = torch.zeros(1, 1, length, head_size, dtype=x.dtype, device="cuda")
        wide[:, :, -tail:] = x
        return wide

    causal = long == "keys"
    zoom = random_zoom(1, 1, (3, 3), 1.0, "cuda")
    wide_zoom = torch.zeros(
        1, 1, -(-num_queries // 64), -(-num_keys // 64), dtype=torch.uint8, device="cuda"
    )
    wide_zoom[:, :, -3:, -3:] = zoom
    dout = torch.randn_like(q)
    results = []
    for length_q, length_k, levels in ((num_queries, num_keys, wide_zoom), (tail, tail, zoom)):
        long_q, long_k, long_v = (
            lengthen(x, n).requires_grad_()
            for x, n in ((q, length_q), (k, length_k), (v, length_k))
        )
        got = multiscale_attention(long_q, long_k, long_v, levels, causal=causal)
        grads = torch.autograd.grad(got.out, (long_q, long_k, long_v), lengthen(dout, length_q))
        results.append([x[:, :, -tail:].clone() for x in (*got, *grads)])
        del long_q, long_k, long_v, got, grads
    torch.testing.assert_close(*results, rtol=0, atol=0)

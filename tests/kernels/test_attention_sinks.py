"""Tests of `apply_sinks`: agreement with fp64 softmax that has the sinks as one more column,
gradients, edge cases.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.testing import (
    capped,
    dense_attention,
    random_block_mask,
    random_qkv,
    starts,
    tokens_of_blocks,
)
from msattn.kernels.types import SparseAttention
from tests.kernels import shared
from tests.kernels.problems import CASES, Case


def random_sinks(heads: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws sinks from far below the LSE of a row to far above it."""
    return (6 * torch.randn(heads, device=device)).to(dtype)


@pytest.mark.parametrize(
    ("case", "softcap"), zip(CASES, itertools.cycle([None, 5.0]), strict=False), ids=str
)
def test_agrees_with_fp64(case: Case, softcap: float | None, device: str) -> None:
    """Covers rows without visible keys, whose LSE is the sink, and outputs in half precision."""
    q, k, v = case.qkv(device)
    sinks = random_sinks(case.q_heads, device, case.dtype)
    mask = random_block_mask(1, 1, *case.blocks, 0.4, device)
    sizes = (
        case.batch,
        case.q_heads,
        case.num_queries,
        case.num_keys,
        case.causal,
        starts(case.padding, device),
    )
    seen = case.visible(device) & tokens_of_blocks(mask, *sizes, case.block_size)
    state = block_sparse_attention(q, k, v, mask, **case.options(device), softcap=softcap)
    got = apply_sinks(state, sinks)
    # the band is that of both roundings
    shared.assert_agrees(got, q, k, v, seen, None, capped(softcap), sinks)
    empty = ~seen.expand(-1, case.q_heads, -1, -1).any(-1)
    assert torch.equal(got.lse[empty], sinks.float()[:, None].expand_as(got.lse)[empty])


def test_gradients_match_fp64_softmax_with_one_more_column() -> None:
    """Gradients of q, k, v and of the sinks, with rows that see no key."""
    drawn = *random_qkv(2, 4, 2, 20, 20, 8, torch.float64), random_sinks(4, "cpu", torch.float64)
    q, k, v, sinks = inputs = [x.requires_grad_() for x in drawn]
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    mask[:, :, 1] = False
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    seen[16:] = False
    got = apply_sinks(block_sparse_attention(q, k, v, mask, block_size=16), sinks)
    want = dense_attention(q, k, v, seen, sinks=sinks)
    dout, dlse = torch.randn_like(got.out), torch.randn_like(got.lse)
    gradients, wanted = (torch.autograd.grad(x[:2], inputs, (dout, dlse)) for x in (got, want))
    for x, y in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_compiles(device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 20, head_size=16, device=device)
    sinks = random_sinks(2, device)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> SparseAttention:
        return apply_sinks(flash_decode(q, k, v, causal=True, backend="torch"), sinks)

    compiled: Callable[..., SparseAttention] = torch.compile(
        attend, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, k, v, sinks), attend(q, k, v, sinks))

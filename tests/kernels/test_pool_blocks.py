"""Tests of `pool_blocks` against fp64, on both backends."""

import itertools

import pytest
import torch

from msattn.kernels.pool_blocks import pool_blocks
from msattn.kernels.testing import assert_within_budget, random_qkv
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS

NAMES: list[str] = ["avg", "max", "min"]
REDUCE = {"avg": lambda x: x.mean(1), "max": lambda x: x.amax(1), "min": lambda x: x.amin(1)}


def pool_by_block(
    x: torch.Tensor, poolings: list[str], block_size: int, start: list[int] | None
) -> torch.Tensor:
    """Pools block by block, in fp64."""
    batch, heads, tokens, head = x.shape
    pooled = torch.zeros(
        batch,
        heads,
        -(-tokens // block_size),
        len(poolings) * head,
        dtype=torch.float64,
        device=x.device,
    )
    for b in range(batch):
        first = 0 if start is None else start[b % len(start)]
        for t, part in enumerate(
            x[b, :, first:].double().split(block_size, dim=1) if first < tokens else ()
        ):
            pooled[b, :, t] = torch.cat([REDUCE[name](part) for name in poolings], dim=-1)
    return pooled


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("tokens", "head_size", "block_size", "start"),
    [
        (70, 16, 16, None),
        (64, 80, 64, None),
        (1, 8, 32, None),
        (200, 256, 128, None),
        (70, 64, 16, [0, 5, 69]),
        (65, 128, 64, [0, 65, 1]),
        (40, 24, 32, [7]),
    ],
)
def test_agrees_with_fp64(
    tokens, head_size, block_size, start, dtype, backend: Backend, device: str, poisoned: None
) -> None:
    x, _, _ = random_qkv(3, 2, 1, tokens, None, head_size, dtype, device)
    starts = None if start is None else torch.tensor(start, device=device)
    rotated = x.roll(1, 2).transpose(1, 2).contiguous().transpose(1, 2)
    got = pool_blocks(
        x, NAMES, block_size=block_size, start=starts, rotated=rotated, backend=backend
    )
    exact = torch.cat(
        [
            pool_by_block(x, NAMES, block_size, start),
            pool_by_block(rotated, ["avg"], block_size, start),
        ],
        -1,
    )
    assert got.dtype == torch.float32
    for name, own in (("avg", slice(head_size)), ("rotated", slice(3 * head_size, None))):
        assert_within_budget(name, got[..., own], exact[..., own], exact[..., own].float())
    own = slice(head_size, 3 * head_size)
    assert torch.equal(got[..., own].double(), exact[..., own])  # max and min are exact
    alone = pool_blocks(x, NAMES, block_size=block_size, start=starts, backend=backend)
    assert torch.equal(alone, got[..., : 3 * head_size])


@pytest.mark.parametrize("backend", BACKENDS)
def test_poolings_keep_their_order(backend: Backend, device: str) -> None:
    x, _, _ = random_qkv(1, 2, 1, 40, None, 8, device=device)
    for poolings in (list(order) for n in (1, 2, 3) for order in itertools.permutations(NAMES, n)):
        got = pool_blocks(x, poolings, block_size=16, backend=backend)
        torch.testing.assert_close(
            got.double(), pool_by_block(x, poolings, 16, None), rtol=1e-6, atol=1e-6
        )

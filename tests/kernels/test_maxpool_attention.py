"""Tests maxpool_attention: accuracy against fp64, edge cases."""

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.kernels.testing import (
    assert_within_budget,
    block_numbers,
    capped,
    pool_over_blocks,
    random_qkv,
    starts,
)
from msattn.kernels.types import Backend, Pool
from tests.kernels import shared
from tests.kernels.problems import ANY_LENGTHS, CAPPED_SCALE, CASES, Case, full_product
from tests.kernels.shared import BACKENDS

MASSES: tuple[Pool, ...] = ("mass", "mean_mass")


def exact_map(probs: torch.Tensor, case: Case, pool: Pool) -> torch.Tensor:
    sizes = case.batch, case.num_queries, case.num_keys, case.causal, starts(case.padding)
    sizes = (*sizes, case.block_size, case.key_block_size)
    return pool_over_blocks(probs, *block_numbers(*sizes), case.blocks, pool)


def check(
    case: Case,
    backend: Backend,
    device: str,
    softcap: float | None = None,
    with_sinks: bool = False,
    pool: Pool = "max",
) -> None:
    """Compares with dense attention; padding holds NaN."""
    q, k, v = case.qkv(device)
    seen, scale = case.visible(device), None if softcap is None else CAPPED_SCALE
    sinks = 3 * torch.randn(case.q_heads, device=device).to(case.dtype) if with_sinks else None
    inputs = [x.detach() for x in shared.fill_padding(case, q, k, v)]
    options = case.options(device) | {
        "pool": pool,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
    }
    got = maxpool_attention(*inputs, **options, backend=backend)
    assert got.pooled.dtype == torch.float32
    exact, full = shared.assert_agrees(got, q, k, v, seen, scale, capped(softcap), sinks)
    assert_within_budget(
        "pooled", got.pooled, exact_map(exact.probs, case, pool), exact_map(full.probs, case, pool)
    )
    assert (
        got.pooled[exact_map(seen.expand(exact.probs.shape).float(), case, pool) == 0] == 0
    ).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("number", "pool", "softcap", "with_sinks"),
    [
        (8, "max", None, True),
        (2, "max", 5.0, False),
        (3, "mass", 5.0, True),
        (4, "mean_mass", None, False),
        *((n, "max", None, False) for n in range(len(CASES))),
        *(
            (n, "max", cap, sinks)
            for n, cap, sinks in ((1, 50.0, False), (4, 50.0, True), (8, 5.0, False))
        ),
        *((n, "max", None, True) for n in (1, 5)),
        *(
            (n, pool, None, False)
            for n, pool in zip(range(len(CASES)), itertools.cycle(MASSES), strict=False)
        ),
        *((n, pool, cap, n == 8) for n, cap in ((5, None), (8, 5.0)) for pool in MASSES),
    ],
    ids=str,
)
def test_agrees_with_fp64(
    number: int,
    pool: Pool,
    softcap: float | None,
    with_sinks: bool,
    backend: Backend,
    device: str,
    poisoned: None,
) -> None:
    """Each row's probabilities are normalized with the sink, before the maximum over rows."""
    check(CASES[number], backend, device, softcap, with_sinks, pool)


# rows and keys of blocks; two tiles of queries, several of keys, a part of a block at each end
RECTANGLES = [
    Case(1, 4, 2, 150, 200, 16, torch.float16, block_size=64, key_block_size=16),
    Case(2, 3, 1, 150, 150, 16, torch.float16, padding=(0, 37), block_size=64, key_block_size=32),
    Case(2, 3, 1, 150, 150, 16, padding=(0, 37), block_size=64, key_block_size=32),
    Case(1, 2, 2, 70, 150, 24, block_size=32, key_block_size=16),
    Case(
        2,
        7,
        1,
        90,
        130,
        16,
        torch.float16,
        causal=False,
        padding=(5, 100),
        block_size=64,
        key_block_size=16,
    ),
    Case(1, 2, 1, 40, 260, 16, torch.float16, block_size=16, key_block_size=64),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", get_args(Pool))
@pytest.mark.parametrize("number", range(len(RECTANGLES)))
def test_blocks_of_more_queries_than_keys(
    number: int, pool: Pool, backend: Backend, device: str, poisoned: None
) -> None:
    check(
        RECTANGLES[number],
        backend,
        device,
        softcap=5.0 if number == 1 else None,
        with_sinks=number == 3,
        pool=pool,
    )


@settings(max_examples=10, deadline=None)
@given(**ANY_LENGTHS, pool=st.sampled_from(get_args(Pool)))
def test_any_lengths(
    n: int, more: int, causal: bool, block: int, softcap: float | None, pool: Pool
) -> None:
    check(
        Case(1, 2, 1, n, max(1, n + more), 16, causal=causal, block_size=block),
        "torch",
        "cpu",
        softcap,
        pool=pool,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_size", "block_size"),
    [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64), (512, 64)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (1100, 1100), (130, 65)]
    long = Case(1, 4, 1, 4095, 4095, head_size, dtype, block_size=block_size)
    variants = itertools.cycle(
        [(None, False), (5.0, False), (None, True), (50.0, True), (None, False)]
    )
    pools = itertools.cycle([*get_args(Pool), "max"])  # each variant with each pool
    cases = (*full_product(head_size, dtype, lengths, block_size), long)
    for case, variant, pool in zip(cases, variants, pools, strict=False):
        check(case, "triton", "cuda", *variant, pool)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [1e5, 1e300])
def test_a_large_cap_changes_nothing(softcap: float, backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 70, device=device)
    plain, wide = (
        maxpool_attention(q, k, v, softcap=x, scale=0.3, backend=backend) for x in (None, softcap)
    )
    for x, y in zip(wide, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_cap_makes_all_scores_equal(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 1, 70, device=device)
    got = maxpool_attention(q, k, v, causal=False, softcap=1e-300, backend=backend)
    torch.testing.assert_close(got.out, v.mean(2, keepdim=True).expand_as(got.out))
    torch.testing.assert_close(got.pooled, torch.full_like(got.pooled, 1 / 70))


def test_rejects_unsupported_layout_and_dtype(device: str) -> None:
    q, k, v = random_qkv(1, 1, 1, 64, head_size=64, device=device)
    with pytest.raises(ValueError, match=r"k.stride\(\)"):
        maxpool_attention(q, k.transpose(2, 3), v, backend="triton")
    with pytest.raises(ValueError, match="float64"):
        maxpool_attention(q.double(), k.double(), v.double(), backend="triton")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = random_qkv(2, 4, 2, 300, dtype=torch.bfloat16, device="cuda")
    padding = torch.zeros(2, dtype=torch.int32, device="cuda")
    shared.assert_cuda_graph(
        lambda: maxpool_attention(q, k, v, kv_start=padding),
        lambda: padding.copy_(torch.tensor([17, 100])),
    )
